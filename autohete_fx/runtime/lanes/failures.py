"""Errors of collectives that name the rank for which one failed.

A rank that fails writes why into the store where the ranks met. That is one that refuses a step, or that an exception ends. The
others look there after a collective has failed, and each second while one takes longer. Only ranks that hold the same model count:
those of other models may have failed, and gone on or ended, without harm. One that was killed has written nothing.
Others learn it from a message to each rank over a group on the CPU, whose connections its end has closed. A collective that goes
well costs nothing of all this.
"""

import atexit
import contextlib
import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autohete_fx.errors import CollectiveError
from autohete_fx.internals.groups import meeting
from autohete_fx.runtime.lanes.positions import diverged

Group = dist.ProcessGroup

_NUM_PROBES, _PROBE_S = 5, 0.2  # an end closes the connections of a process one after the other
_PROBE_TAG = 0x617574
_CLOSED = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection timed out",
    "broken pipe",
    "no route",
)
_NO_MEMORY = "can't allocate memory", "not enough memory"  # of tensors on the CPU, which have no OutOfMemoryError
_KEY = "autohete_fx/failure"
_MORE_THAN_ANY = 1 << 62  # refusals of others, which go on together
_reading = threading.Lock()  # lanes and the program may look at once


@contextlib.contextmanager
def named_failures(among: Group | None) -> Iterator[None]:
    """Around collectives: raises CollectiveError for what they raise, naming the rank that failed where that can be known.
    Where this rank has no memory, its own error stays as it is.

    Args:
        among: a group of the ranks for any of which they may wait, be it through another one; None: of all ranks.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_MEMORY):
            raise
        raise _error(_found(error, _members(among)), error) from error


def raise_known(among: Group | None) -> None:
    """Raise CollectiveError where a rank of ``among`` is known to have failed."""
    if (failure := _written(_members(among))) is not None:
        raise _error(failure) from None


def raise_diverged(among: Group | None) -> None:
    """Raise CollectiveError where a rank of ``among`` is known to wait for another collective than this one, for ever."""
    if words := diverged(among):
        raise _collective_error(
            words, "Let all of them run as many forwards, backwards and steps, also where a batch is left out"
        ) from None


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why the collectives of a rank may not end.

    Attributes:
        rank: its number in the job.
        text: what became of it.
        number: of a refusal, among those of the same ranks; None where the rank is gone.
        members: the ranks that hold the model whose step it refused; none where it is gone.
    """

    rank: int
    text: str
    number: int | None = None
    members: tuple[int, ...] = ()


def _error(failure: _Failure | None, error: RuntimeError | None = None) -> CollectiveError:
    who = "the other ranks' output for the one that failed first"
    why = [] if error is None else [str(error)]
    if failure is not None:
        who, why = f"the output of rank {failure.rank}", [f"rank {failure.rank} {failure.text}", *why]
    return _collective_error(": ".join(why), f"Look at {who}, and start all of them again")


def _collective_error(reason: str, advice: str) -> CollectiveError:
    if (job := _job()) is not None:
        job.is_told = True
    return CollectiveError(
        f"a collective over the ranks that hold the model failed: {reason}. Expected was that all of them run the same step"
        f" until it ends. {advice}",
        reason=reason,
    )


# -- what ranks write ---------------------------------------------------------------------------------------------------


class _Job:
    """What this rank has written into a store and read there.

    Attributes:
        num_refusals: how many of its errors it has written, by the ranks that hold the model. All of these may refuse the same:
            those of others count as far as they are more.
        failures: those of other ranks of which it has read. None is forgotten: collectives that waited for such a rank were begun
            here alone, and pair with others from then on.
        is_told: whether a collective has failed here: whatever ends this process follows from that.
    """

    def __init__(self) -> None:
        self.num_refusals: Counter[tuple[int, ...]] = Counter()
        self.num_read, self.failures = 0, list[_Failure]()
        self.is_told = False


_jobs: "weakref.WeakKeyDictionary[Any, _Job]" = weakref.WeakKeyDictionary()
_controls: "weakref.WeakSet[Group]" = weakref.WeakSet()


def tell_failures(control: Group) -> None:
    """The ranks of a job hold something together from now on.

    Args:
        control: a process group of these on the CPU.
    """
    _controls.add(control)


def tell_refusal(error: Exception, among: Group) -> None:
    """Let the other ranks know what this one is about to raise. Those that have as many refusals of their own go on.

    Args:
        among: a group of the ranks that hold the model.
    """
    if (job := _job()) is not None:
        members = tuple(_members(among))
        job.num_refusals[members] += 1
        _write(dist.get_rank(), f"failed with {type(error).__name__}: {error}", job.num_refusals[members], members)


def tell_end(error: Exception, among: Group) -> None:
    """Let the other ranks know what this one is about to raise, and that it runs no collective of theirs any more.

    Args:
        among: a group of the ranks that hold the model.
    """
    if _job() is not None:
        _write(dist.get_rank(), f"failed with {type(error).__name__}: {error}", _MORE_THAN_ANY, tuple(_members(among)))


@atexit.register
def _tell_end() -> None:
    """The interpreter ends: where an exception is why, let the others know."""
    error, job = getattr(sys, "last_value", None), _job()
    if error is not None and job is not None and not job.is_told:
        _write(dist.get_rank(), f"failed with {type(error).__name__}: {error}")


def _job() -> _Job | None:
    """None where there are no others to tell."""
    store = meeting()
    return None if store is None or not _controls else _jobs.setdefault(store, _Job())


def _write(rank: int, text: str, number: int | None = None, members: Sequence[int] = ()) -> None:
    with contextlib.suppress(RuntimeError):  # where the store is gone, the process that had it is
        store: Any = meeting()
        store.set(f"{_KEY}/{store.add(_KEY, 1)}", json.dumps([rank, text, number, members]))


def _members(among: Group | None) -> list[int]:
    """The numbers of its ranks in the job; of none where the group was destroyed."""
    if not dist.is_initialized():
        return []
    with contextlib.suppress(KeyError, ValueError):
        return dist.get_process_group_ranks(among)
    return []


def _written(members: Sequence[int]) -> _Failure | None:
    """The first failure of another rank that those of a collective may wait for, and that this one has not had itself."""
    store, job = meeting(), _job()
    if store is None or job is None:
        return None
    with contextlib.suppress(RuntimeError), _reading:
        while store.check([key := f"{_KEY}/{job.num_read + 1}"]):
            job.num_read += 1
            rank, text, number, of = json.loads(store.get(key))
            if rank != dist.get_rank():
                job.failures.append(_Failure(rank, text, number, tuple(of)))
    for failure in job.failures:
        is_more = failure.number is None or failure.number > job.num_refusals[failure.members]
        if failure.rank in members and is_more and (failure.number is None or set(members) <= set(failure.members)):
            return failure
    return None


def _found(error: RuntimeError, members: Sequence[int]) -> _Failure | None:
    """The rank that a collective failed for. It may have been about to write; one that does not answer was not."""
    is_late = "timed out" in str(error).lower()
    for attempt in range(1 if is_late else _NUM_PROBES):
        time.sleep(_PROBE_S if attempt else 0)
        if (failure := _written(members)) is not None:
            return failure
        if (rank := _ended(members)) is not None:
            _write(rank, "has ended")  # so that those who wait for this one learn of it
            return _Failure(rank, "has ended")
    return None


def _ended(members: Sequence[int]) -> int | None:
    """One of the members whose process is not there: a message to it cannot be sent. Others get one more than they ask for."""
    for control in list(_controls):
        for place, rank in enumerate(_members(control)):
            if rank in members and rank != dist.get_rank():
                try:
                    dist.isend(torch.zeros(1, device="cpu"), group=control, group_dst=place, tag=_PROBE_TAG)
                except RuntimeError as error:  # gloo has no class of its own for it
                    if any(words in str(error).lower() for words in _CLOSED):
                        return rank
    return None
