"""Backward: bring offloaded activations back ahead of their use.

Emitted IR, where ``gelu`` is a placeholder that now arrives in host memory::

    reload_gelu = autohete.reload(gelu, session, ...)       # issued prefetch_distance blocks ahead
    ...
    wait_gelu = autohete.wait(reload_gelu, gelu, session)   # before block b's backward; freed after its last use
"""

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.graph.readers import readers_of
from autohete_fx.passes.base import PassContext, insert_copy


def reload_activations(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Every placeholder named in ``context.offloaded`` is copied back and its uses read the copy."""
    for node in [n for n in gm.graph.nodes if n.op == "placeholder" and n.name in context.offloaded]:
        users = list(node.users)
        if not users:
            continue
        readers = (
            annotations.block_of(reader) for _, reader in readers_of(node)
        )  # views of it may be of an earlier block
        first_use = min((context.region(block) for block in readers if block is not None), default=0)
        owner = context.offloaded[node.name]
        distance = context.decision(owner).prefetch_distance
        copy = insert_copy(
            gm,
            ops.reload,
            node,
            context,
            what="activation",
            block=owner,
            issue_slot=max(0, first_use - distance),
            wait_slot=first_use,
        )
        for user in users:
            user.replace_input_with(node, copy)
    return gm
