"""The kernels of ``torch.ops.autohete.gather`` and ``reduce`` on every device. Importing this module registers them.

They wait for the collective before they return: to the compute lane, on which they run, they are as any other kernel.
"""

import torch.distributed as dist
from torch import Tensor

from autohete_fx.graph.collectives import library
from autohete_fx.internals import versions
from autohete_fx.runtime.shard.ranks import ranks_by_digest

_all_gather = versions.named(dist, versions.ALL_GATHER)
_reduce_scatter = versions.named(dist, versions.REDUCE_SCATTER)


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
