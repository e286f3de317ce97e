"""Tag whole parameters that were gathered, so that the partitioner gathers them again in backward instead of saving them.

The emitted IR is the same code with MUST_RECOMPUTE on each gather and on all that shows the whole otherwise: views, casts. The
shard is saved, an input, which is there anyhow. A block that keeps what it gathered has MUST_SAVE on its gathers.
Ids are above those of all blocks, so that no region keeps what another one reads. Runs after `tag_recompute`, whose tags on
these nodes do not count.
"""

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autohete_fx.graph import annotations
from autohete_fx.graph.collectives import gather
from autohete_fx.graph.saved import gathered
from autohete_fx.passes.base import PassContext

_ABOVE_ALL_REGIONS = 1 << 30


def gather_again(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """No-op for graphs without gathers."""
    for node in gathered(gm.graph):
        block = annotations.block_of(node)
        is_kept = node.target is gather and block is not None and context.decision(block).keeps_fetched
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _ABOVE_ALL_REGIONS
    return gm
