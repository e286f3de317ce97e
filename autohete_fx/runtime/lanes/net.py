"""Collectives of several ranks.

In: a function that starts a collective on the current stream. Out: nothing, when it is done: on a CPU device when all have their
results, on an accelerator when the current stream waits for that. Whatever a collective raises becomes a CollectiveError that names
the rank for which it failed (`failures`).
"""

import datetime
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from autohete_fx.runtime.lanes.failures import Group, named_failures, raise_diverged, raise_known


class Work(Protocol):
    """A collective under way, as ``torch.distributed`` gives it."""

    def wait(self, timeout: datetime.timedelta = ...) -> object:
        """Return when it is done, or make the current stream wait for it. With a timeout, raise RuntimeError after it."""
        ...

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        ...


Start = Callable[[], Sequence[Work]]
"""Starts a collective. It holds the tensors that the collective reads and writes."""

_LOOK_EVERY = datetime.timedelta(seconds=1)


def run_collective(start: Start, among: Group | None = None, *, on_cpu: bool) -> None:
    """Start a collective and wait for it.

    Args:
        among: a group of the ranks for any of which it may wait, be it through another one; None: of all ranks.
        on_cpu: whether its tensors are on the CPU, so that this thread is to wait.

    Raises:
        CollectiveError: another rank has failed or left, or a collective took longer than its process group allows.
    """
    with named_failures(among):
        for work in start():
            if on_cpu:
                _wait(work, among)
            else:
                work.wait()


def all_reduce(tensor: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM, *, among: Group | None = None) -> None:
    """``torch.distributed.all_reduce``, as `run_collective` waits for it; ``among`` is the same group unless another is given."""
    start: Any = functools.partial(dist.all_reduce, tensor, op=op, group=group, async_op=True)
    run_collective(lambda: [start()], among or group, on_cpu=tensor.device.type == "cpu")


def _wait(work: Work, among: Group | None) -> None:
    for looks in itertools.count(1):
        try:
            work.wait(_LOOK_EVERY)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises what was wrong, if that was not the timeout
                return
            raise_known(among)
            if looks & (looks - 1) == 0:  # ever less often: of many ranks each would look at all others
                raise_diverged(among)
