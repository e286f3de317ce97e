"""The kernels of ``torch.ops.autohete.gather`` and ``reduce`` on every device. Importing this module registers them.

They wait for the collective before they return: to the compute lane, on which they run, they are as any other kernel.
"""

import torch.distributed as dist
from torch import Tensor

from autohete_fx.graph.collectives import library
from autohete_fx.runtime.shard.ranks import ranks_by_digest

# 2.13 gave them new names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _gather(shard: Tensor, num_ranks: int, group: str) -> Tensor:
    whole = shard.new_empty((num_ranks * shard.shape[0], *shard.shape[1:]))
    _all_gather(whole, shard.contiguous(), group=ranks_by_digest(group).group)
    return whole


def _reduce(grad: Tensor, num_ranks: int, group: str) -> Tensor:
    mine = grad.new_empty((grad.shape[0] // num_ranks, *grad.shape[1:]))
    _reduce_scatter(mine, grad.contiguous(), op=dist.ReduceOp.AVG, group=ranks_by_digest(group).group)
    return mine


_DISPATCH_KEY = "CompositeExplicitAutograd"

library.impl("gather", _gather, _DISPATCH_KEY)
library.impl("reduce", _reduce, _DISPATCH_KEY)
