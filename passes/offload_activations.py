"""Forward: send saved activations of offloading blocks to the host.

Emitted IR, where the graph returned ``gelu`` as a tensor saved for backward::

    gelu = ...                                              # block b
    offload_gelu = autohete.offload(gelu, session, ...)     # issued before block b+1
    ...                                                     # prefetch_distance blocks
    wait_gelu = autohete.wait(offload_gelu, gelu, session)  # after them: gelu's device memory is free
    return [..., wait_gelu, ...]
"""

from torch import fx

from autohete_fx.graph import ops
from autohete_fx.graph.saved import output_args
from autohete_fx.passes.base import PassContext, insert_copy, output_node


def offload_activations(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Replace each saved output named in ``context.offloaded`` by its copy on the host."""
    outputs = output_args(gm)
    for position in range(context.num_outputs, len(outputs)):
        node = outputs[position]
        if node is None or node.name not in context.offloaded:
            continue
        block = context.offloaded[node.name]
        outputs[position] = insert_copy(
            gm,
            ops.offload,
            node,
            context,
            what="activation",
            block=block,
            issue_slot=block + 1,
            wait_slot=block + 1 + context.decision(block).prefetch_distance,
        )
    output_node(gm).args = (tuple(outputs),)
    return gm
