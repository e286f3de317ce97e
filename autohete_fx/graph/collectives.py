"""Collectives of several ranks as nodes of a graph: schemas, fake implementations and gradients.

A parameter of which each rank holds a shard is read through one node, and its gradient leaves through another::

    whole = autohete.gather(shard, num_ranks, group)      # (rows, ...) of each rank -> (num_ranks * rows, ...)
    shard_grad = autohete.reduce(grad, num_ranks, group)  # the mean over ranks, of which each rank gets its rows

* Shards have equally many rows on all ranks. Where the whole has fewer, a slice after the gather cuts off the padding.
* The backward of each is the other, up to the factor that makes a sum a mean. A frozen shard has no backward, and so no reduce.
* ``group`` is the digest of the ranks that take part, the same in every process whatever groups were made before.
* All ranks run the same collectives in the same order: the order of a graph.

Passes make of those of a block one collective that runs beside computation, two kinds of nodes as for a copy (`ops`)::

    handle = autohete.gather.issue([shard_1, shard_2], num_ranks, group, session)
    whole_1 = autohete.gather.wait(handle, shard_1, 0, num_ranks, session)
    whole_2 = autohete.gather.wait(handle, shard_2, 1, num_ranks, session)

and likewise with ``reduce``. Each wait gives the result ``at`` a position. It is given the source because the collective reads that
until then.

Whole parameters that stay on the ranks from step to step are gathered by nodes of their own, in the same places::

    handle = autohete.gather.issue_once([shard_1, shard_2], num_ranks, group, session)
    whole_1 = autohete.gather.wait_once(handle, shard_1, 0, num_ranks, session)

The first is a collective in the first pass of a step alone. The result of the second belongs to the session. Its schema calls it an
alias of the shard, so that a compiler neither frees its memory nor writes there.

The kernels are in `autohete_fx.runtime.shard.kernels`.

Tensor parallelism puts collectives of PyTorch's own into a graph, two nodes each, which stay where the program has them::

    all_reduce = _c10d_functional.all_reduce(mm, "sum", group_name)
    wait_tensor = _c10d_functional.wait_tensor(all_reduce)  # the same memory
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autohete_fx.graph.ops import library
from autohete_fx.graph.sizes import num_bytes
from autohete_fx.internals.operators import OpOverload

_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)

library.define("gather(Tensor shard, int num_ranks, str group) -> Tensor", tags=_TAGS)
library.define("reduce(Tensor grad, int num_ranks, str group) -> Tensor", tags=_TAGS)
for _name in ("gather", "reduce"):
    library.define(
        f"{_name}.issue(Tensor[] src, int num_ranks, str group, str session, Tensor? after=None) -> Tensor", tags=_TAGS
    )
    library.define(
        f"{_name}.wait(Tensor handle, Tensor src, int at, int num_ranks, str session, Tensor? after=None) -> Tensor",
        tags=_TAGS,
    )
library.define(
    "gather.issue_once(Tensor[] src, int num_ranks, str group, str session, Tensor? after=None) -> Tensor", tags=_TAGS
)
library.define(
    "gather.wait_once(Tensor handle, Tensor(a) src, int at, int num_ranks, str session, Tensor? after=None) -> Tensor(a)",
    tags=_TAGS,
)

gather = torch.ops.autohete.gather.default
reduce = torch.ops.autohete.reduce.default
issue_gather = torch.ops.autohete.gather.issue
wait_gather = torch.ops.autohete.gather.wait
issue_gather_once = torch.ops.autohete.gather.issue_once
wait_gather_once = torch.ops.autohete.gather.wait_once
issue_reduce = torch.ops.autohete.reduce.issue
wait_reduce = torch.ops.autohete.reduce.wait

wait_functional = torch.ops._c10d_functional.wait_tensor.default

COLLECTIVES = (gather, reduce)
"""The ops that wait for other ranks while they run, as they were traced."""
ISSUING_GATHERS = (issue_gather, issue_gather_once)
ISSUING_COLLECTIVES = (*ISSUING_GATHERS, issue_reduce)
"""The ops that start a collective, or find that it need not run."""
WAITS = (wait_gather, wait_gather_once, wait_reduce)
"""The ops that give one result of a collective, when that is there."""


def is_functional(target: object) -> bool:
    """Whether an op is a functional collective of PyTorch's, or the wait for one."""
    return isinstance(target, OpOverload) and target.namespace == "_c10d_functional"


def needs_others(target: object) -> bool:
    """Whether an op, as it was traced, waits for other ranks: one rank alone cannot run it."""
    return target in COLLECTIVES or is_functional(target)


def starts_functional(target: object) -> bool:
    """Whether an op is a functional collective, and no wait."""
    return is_functional(target) and target is not wait_functional


def exchanged_bytes(node: fx.Node) -> int:
    """Bytes of the wholes of a functional collective: of the larger of what goes in and what comes out."""
    return max(_bytes_of(node.args[0]), _bytes_of(node))


def _bytes_of(value: Any) -> int:
    """Of the tensors that nodes stand for."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    return num_bytes(value) if isinstance(value, Tensor) else 0


@torch.library.register_fake("autohete::gather", lib=library)
def _fake_gather(shard: Tensor, num_ranks: int, group: str) -> Tensor:
    return shard.new_empty((num_ranks * shard.shape[0], *shard.shape[1:]))


@torch.library.register_fake("autohete::reduce", lib=library)
def _fake_reduce(grad: Tensor, num_ranks: int, group: str) -> Tensor:
    return grad.new_empty((grad.shape[0] // num_ranks, *grad.shape[1:]))


def _fake_issue(src: Sequence[Tensor], num_ranks: int, group: str, session: str, after: Tensor | None = None) -> Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


def _fake_wait_gather(
    handle: Tensor, src: Tensor, at: int, num_ranks: int, session: str, after: Tensor | None = None
) -> Tensor:
    return _fake_gather(src, num_ranks, "")


def _fake_wait_reduce(
    handle: Tensor, src: Tensor, at: int, num_ranks: int, session: str, after: Tensor | None = None
) -> Tensor:
    return _fake_reduce(src, num_ranks, "")


torch.library.register_fake("autohete::reduce.issue", _fake_issue, lib=library)
for _once in ("", "_once"):
    torch.library.register_fake(f"autohete::gather.issue{_once}", _fake_issue, lib=library)
    torch.library.register_fake(f"autohete::gather.wait{_once}", _fake_wait_gather, lib=library)
torch.library.register_fake("autohete::reduce.wait", _fake_wait_reduce, lib=library)


def result_of(target: object, src: Tensor, num_ranks: int) -> Tensor:
    """An empty tensor like the one that a collective, by one of its ops, makes of a source."""
    make = _fake_reduce if target in (reduce, issue_reduce, wait_reduce) else _fake_gather
    return make(src, num_ranks, "")


def _keep_ranks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.num_ranks, ctx.group = inputs


def _backward_of_gather(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return reduce(grad.contiguous(), ctx.num_ranks, ctx.group), None, None


torch.library.register_autograd("autohete::gather", _backward_of_gather, setup_context=_keep_ranks, lib=library)
