"""Give every issued copy its lane and priority, as an annotation.

Copies to the host run on the ``d2h`` lane, copies to the device on ``h2d``. A smaller priority is served first. Copies to the
device are ordered by the region that needs them. Those of backward come before all that the next forward needs. That includes
parameters that were updated on the host, which are sent up meanwhile. Gradients are ordered by block, lowest first, because the
next forward needs block 0 first. Activations leave in the order in which they are made, ahead of gradients.
"""

import dataclasses

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.ir import Lane
from autohete_fx.passes.base import PassContext, Stage


def assign_lanes(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Annotations of issuing nodes get a lane and a priority; the code of the graph does not change."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in ops.ISSUING_OPS:
            continue
        note = annotations.inserted(node)
        wait_note = annotations.inserted(ops.wait_of(node))
        assert note is not None and wait_note is not None
        if node.target is not ops.offload:
            ahead = context.num_blocks if context.stage is Stage.BACKWARD else 0
            lane, priority = Lane.H2D, wait_note.slot - ahead
        elif note.what == "gradient":
            lane, priority = Lane.D2H, context.num_blocks + note.block
        else:
            lane, priority = Lane.D2H, note.block
        annotations.set_inserted(node, dataclasses.replace(note, lane=lane, priority=priority))
    return gm
