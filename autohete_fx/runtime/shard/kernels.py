"""The kernels of ``torch.ops.autohete.gather`` and ``reduce`` on every device. Importing this module registers them.

Those that were traced wait for the collective before they return: to the compute lane, on which they run, they are as any other
kernel. Those that passes made of them start on the net lane what another node waits for. Gathers and reduces have process groups
of their own.
"""

import datetime
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autohete_fx.graph.collectives import gather, library, reduce, result_of
from autohete_fx.internals import versions
from autohete_fx.runtime.lanes.net import Work, run_collective
from autohete_fx.runtime.lanes.positions import note_collective
from autohete_fx.runtime.session import session_by_digest
from autohete_fx.runtime.shard.ranks import ranks_by_digest

_all_gather = versions.named(dist, versions.ALL_GATHER)
_reduce_scatter = versions.named(dist, versions.REDUCE_SCATTER)


def gather_into(whole: Tensor, shard: Tensor, group: str) -> None:
    """Make a tensor what the ranks of a digest hold shards of. All of them call it."""
    shard, ranks = shard.contiguous(), ranks_by_digest(group)
    note_collective(ranks.control)
    start = functools.partial(_all_gather, whole, shard, group=ranks.group, async_op=True)
    run_collective(lambda: [start()], ranks.control, on_cpu=shard.device.type == "cpu")


def _gather(shard: Tensor, num_ranks: int, group: str) -> Tensor:
    whole = result_of(gather, shard, num_ranks)
    gather_into(whole, shard, group)
    return whole


def _reduce(grad: Tensor, num_ranks: int, group: str) -> Tensor:
    mine, grad, ranks = result_of(reduce, grad, num_ranks), grad.contiguous(), ranks_by_digest(group)
    over = ranks.reduces
    note_collective(ranks.control)
    if grad.device.type == "cpu":
        run_collective(lambda: [_ReduceOfCopy([mine], [grad], over)], ranks.control, on_cpu=True)
    else:
        average = functools.partial(_reduce_scatter, mine, grad, op=dist.ReduceOp.AVG, group=over, async_op=True)
        run_collective(lambda: [average()], ranks.control, on_cpu=False)
    return mine


def _issue_gather(
    src: Sequence[Tensor], num_ranks: int, group: str, session: str, after: Tensor | None = None
) -> Tensor:
    shards = [shard.contiguous() for shard in src]
    with torch.inference_mode(False):  # the lane's thread writes them, which is in no such mode
        wholes = [result_of(gather, shard, num_ranks) for shard in src]
    ranks, num_bytes = ranks_by_digest(group), _num_bytes(wholes)
    note_collective(ranks.control)
    start, among = functools.partial(_start_gathers, wholes, shards, ranks.group), ranks.control
    return session_by_digest(session).issue_collective("gather", start, src, wholes, num_bytes=num_bytes, among=among)


def _issue_gather_once(
    src: Sequence[Tensor], num_ranks: int, group: str, session: str, after: Tensor | None = None
) -> Tensor:
    owner, ranks = session_by_digest(session), ranks_by_digest(group)
    found = owner.wholes.current(src, ranks.rank)
    if found is None:
        with torch.inference_mode(False):
            wholes = [owner.wholes.memory_of(shard, num_ranks) for shard in src]
        start = functools.partial(_start_gathers, wholes, [shard.contiguous() for shard in src], ranks.group)
        num_bytes, among = _num_bytes(wholes), ranks.control
        note_collective(ranks.control)
        found = wholes, owner.lanes.collective("gather", start, num_bytes=num_bytes, among=among)
        owner.wholes.keep(src, *found)
    return owner.note_issued(src, *found)


def _issue_reduce(
    src: Sequence[Tensor], num_ranks: int, group: str, session: str, after: Tensor | None = None
) -> Tensor:
    grads, mine = [grad.contiguous() for grad in src], [result_of(reduce, grad, num_ranks) for grad in src]
    ranks, num_bytes = ranks_by_digest(group), _num_bytes(grads)
    note_collective(ranks.control)
    start, among = functools.partial(_start_reduces, mine, grads, ranks.reduces), ranks.control
    return session_by_digest(session).issue_collective("reduce", start, src, mine, num_bytes=num_bytes, among=among)


def _start_gathers(results: Sequence[Tensor], sources: Sequence[Tensor], group: dist.ProcessGroup) -> Sequence[Work]:
    """Start all of them as one, which gloo can of one dtype."""
    assert len({source.dtype for source in sources}) == 1, "shards of several dtypes in one gather"
    with versions.coalescing(group) as together:
        for result, source in zip(results, sources, strict=True):
            _all_gather(result, source, group=group, async_op=True)
    return together.works


def _start_reduces(results: Sequence[Tensor], sources: Sequence[Tensor], group: dist.ProcessGroup) -> Sequence[Work]:
    """Likewise."""
    if sources[0].device.type == "cpu":
        return [_ReduceOfCopy(results, sources, group)]
    with versions.coalescing(group) as together:
        for result, source in zip(results, sources, strict=True):
            _reduce_scatter(result, source, op=dist.ReduceOp.AVG, group=group, async_op=True)
    return together.works


class _ReduceOfCopy:
    """As gloo reduces, but all in one message, and the copy is gone when that is over. Gloo's thread lets go of its own some time
    later."""

    def __init__(self, results: Sequence[Tensor], sources: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._results, self._sizes, self._rank = results, [each.numel() for each in sources], dist.get_rank(group)
        self._copy = torch.cat([each.flatten() for each in sources])
        self._work: Any = dist.all_reduce(self._copy, dist.ReduceOp.AVG, group, async_op=True)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self, timeout: datetime.timedelta = datetime.timedelta()) -> None:
        self._work.wait(timeout)
        for result, mean in zip(self._results, self._copy.split(self._sizes), strict=True):
            result.copy_(mean.narrow(0, self._rank * result.numel(), result.numel()).view_as(result))
        self._copy.untyped_storage().resize_(0)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _wait(handle: Tensor, src: Tensor, at: int, num_ranks: int, session: str, after: Tensor | None = None) -> Tensor:
    return session_by_digest(session).wait(handle, src, at)


_DISPATCH_KEY = "CompositeExplicitAutograd"

library.impl("gather", _gather, _DISPATCH_KEY)
library.impl("reduce", _reduce, _DISPATCH_KEY)
library.impl("gather.issue", _issue_gather, _DISPATCH_KEY)
library.impl("gather.issue_once", _issue_gather_once, _DISPATCH_KEY)
library.impl("reduce.issue", _issue_reduce, _DISPATCH_KEY)
library.impl("gather.wait", _wait, _DISPATCH_KEY)
library.impl("gather.wait_once", _wait, _DISPATCH_KEY)
library.impl("reduce.wait", _wait, _DISPATCH_KEY)
