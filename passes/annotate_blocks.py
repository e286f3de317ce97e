"""Write every node's block index on it, so that later passes and the compiler's copies of the node know it."""

from torch import fx

from autohete_fx.graph import annotations
from autohete_fx.passes.base import PassContext


def annotate_blocks(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """``context.block_of`` becomes node annotations; the code of the graph does not change."""
    for node in gm.graph.nodes:
        if node.name in context.block_of:
            annotations.set_block(node, context.block_of[node.name])
    return gm
