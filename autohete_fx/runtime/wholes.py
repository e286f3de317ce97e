"""Whole parameters that a plan replicates: gathered in the first pass of a step, and there until a step changes them.

In: shards that compiled code is about to gather. Out: the wholes of those that have not changed since they were gathered. Every
rank has to say the same, or one waits for a collective that another does not start. It therefore goes by what all ranks do
together: a step, a load, an exit of `gathered` (`note_change`). Each use compares the shard with its rows of the whole. A write
that other ranks could not know of thus is an error, not a stale value. A CPU raises at once, an accelerator at the next step.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from autohete_fx.errors import ShardError
from autohete_fx.graph.collectives import gather, result_of
from autohete_fx.runtime.lanes.ticket import Ticket

_changes = itertools.count(1)
_last_change = 0
_all: "weakref.WeakSet[Wholes]" = weakref.WeakSet()


def note_change() -> None:
    """All ranks change parameters, or are about to."""
    global _last_change
    _last_change = next(_changes)


def check_unwritten() -> None:
    """Before a step. Raises ShardError where an accelerator has found a shard that was written to since it was gathered."""
    for wholes in list(_all):
        wholes.settle()


@dataclasses.dataclass(frozen=True, slots=True)
class _Whole:
    """A gathered parameter, the ticket of its gather, and how many gathers came before."""

    memory: Tensor
    ticket: Ticket
    number: int
    change: int


class Wholes:
    """Those of one model. A shard is known by its address, which is that of a parameter's memory."""

    def __init__(self) -> None:
        self._wholes: dict[int, _Whole] = {}
        self._numbers = itertools.count()
        self._were_written: list[Tensor] = []
        _all.add(self)

    def memory_of(self, shard: Tensor, num_ranks: int) -> Tensor:
        """Memory for the whole of a shard: that of the one before, where it fits."""
        known, size = self._wholes.get(shard.data_ptr()), (num_ranks * shard.shape[0], *shard.shape[1:])
        if known is not None and known.memory.shape == size and known.memory.dtype == shard.dtype:
            return known.memory
        return result_of(gather, shard, num_ranks)

    def keep(self, shards: Sequence[Tensor], wholes: Sequence[Tensor], ticket: Ticket) -> None:
        """Shards are being gathered into these."""
        for shard, whole in zip(shards, wholes, strict=True):
            self._wholes[shard.data_ptr()] = _Whole(whole, ticket, next(self._numbers), _last_change)

    def current(self, shards: Sequence[Tensor], rank: int) -> tuple[list[Tensor], Ticket] | None:
        """The wholes of shards, and the ticket of the last of their gathers; None unless all are there and nothing has changed.

        Raises:
            ShardError: a shard was written to since it was gathered.
        """
        found = [self._wholes.get(shard.data_ptr()) for shard in shards]
        there = [each for each in found if each is not None and self._is_current(each)]
        if len(there) < len(shards):
            return None
        last = max(there, key=lambda each: each.number)
        last.ticket.wait()
        for shard, each in zip(shards, there, strict=True):
            self._compare(shard, each.memory, rank)
        return [each.memory for each in there], last.ticket

    def forget(self) -> None:
        """Let go of all: a plan that comes may replicate less."""
        self._wholes.clear()

    def settle(self) -> None:
        """Raise ShardError where a comparison that an accelerator was given found a write."""
        flags, self._were_written = self._were_written, []
        if flags and bool(torch.stack(flags).any()):
            raise _written()

    @staticmethod
    def _is_current(whole: _Whole) -> bool:
        return whole.change == _last_change and whole.ticket.error is None

    def _compare(self, shard: Tensor, whole: Tensor, rank: int) -> None:
        """Whether the shard still has the bits that were gathered. It takes next to no memory."""
        own, now = (_words(t) for t in (whole.narrow(0, rank * shard.shape[0], shard.shape[0]), shard))
        if shard.device.type == "cpu":
            if not torch.equal(own, now):
                raise _written()
            return
        pieces = zip(own.split(_PIECE), now.split(_PIECE), strict=True)
        self._were_written += [(before != after).any() for before, after in pieces]


_PIECE = 1 << 22
"""Words that are compared at a time."""


def _words(t: Tensor) -> Tensor:
    """The memory of a tensor, as integers of 8 bytes where they fit."""
    flat = t.detach().contiguous().flatten()
    fits = flat.nbytes % 8 == flat.storage_offset() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if fits else torch.uint8)


def _written() -> ShardError:
    return ShardError(
        "a shard was written to between micro-batches, and its block is replicated: other ranks could not know of that. Expected"
        " were writes by optimizer.step(), load_state_dict(), or within autohete_fx.gathered(model). Write there, or give a plan"
        " without replicates"
    )
