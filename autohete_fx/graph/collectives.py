"""Collectives of several ranks as nodes of a graph: schemas, fake implementations and gradients.

A parameter of which each rank holds a shard is read through one node, and its gradient leaves through another::

    whole = autohete.gather(shard, num_ranks, group)      # (rows, ...) of each rank -> (num_ranks * rows, ...)
    shard_grad = autohete.reduce(grad, num_ranks, group)  # the mean over ranks, of which each rank gets its rows

* Shards have equally many rows on all ranks. Where the whole has fewer, a slice behind the gather cuts off the padding.
* The backward of each is the other, up to the factor that makes a sum a mean. A frozen shard has no backward, and so no reduce.
* ``group`` is the digest of the ranks that take part, the same in every process whatever groups were made before.
* All ranks run the same collectives in the same order: the order of a graph.

The kernels are in `autohete_fx.runtime.shard.kernels`.
"""

from typing import Any

import torch
from torch import Tensor

from autohete_fx.graph.ops import library

_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)

library.define("gather(Tensor shard, int num_ranks, str group) -> Tensor", tags=_TAGS)
library.define("reduce(Tensor grad, int num_ranks, str group) -> Tensor", tags=_TAGS)

gather = torch.ops.autohete.gather.default
reduce = torch.ops.autohete.reduce.default

COLLECTIVES = (gather, reduce)
"""The ops that wait for other ranks."""


@torch.library.register_fake("autohete::gather", lib=library)
def _fake_gather(shard: Tensor, num_ranks: int, group: str) -> Tensor:
    return shard.new_empty((num_ranks * shard.shape[0], *shard.shape[1:]))


@torch.library.register_fake("autohete::reduce", lib=library)
def _fake_reduce(grad: Tensor, num_ranks: int, group: str) -> Tensor:
    return grad.new_empty((grad.shape[0] // num_ranks, *grad.shape[1:]))


def _keep_ranks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.num_ranks, ctx.group = inputs


def _backward_of_gather(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return reduce(grad.contiguous(), ctx.num_ranks, ctx.group), None, None


torch.library.register_autograd("autohete::gather", _backward_of_gather, setup_context=_keep_ranks, lib=library)
