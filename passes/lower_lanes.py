"""Turn lane and priority annotations into arguments of the inserted ops, where generated code can see them.

``autohete.prefetch(w, session, lane, 0)`` becomes ``autohete.prefetch(w, session, lane, priority)``.
"""

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.passes.base import PassContext


def lower_lanes(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Every issuing node carries its lane's index and its priority as integer arguments."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in ops.ISSUING_OPS:
            note = annotations.inserted(node)
            assert note is not None and note.lane is not None and note.priority is not None
            node.args = (node.args[0], context.session, note.lane.index, note.priority)
    return gm
