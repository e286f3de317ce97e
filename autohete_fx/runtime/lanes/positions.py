"""Where ranks are in their program: whether one waits for a collective that another has left out.

Each rank counts, in the order of its program, the forwards, backwards and optimizer's steps that it began. It also counts the
collectives of graphs that it issued. All ranks of a replica go through the same numbers. One that has waited for a second
writes its own where the ranks met, and looks for those of the others. Numbers on one way never have one that is greater and one
that is smaller. Where they have, a rank has left out a backward or a step, or runs a forward by itself. Numbers of the past prove
it as well.
"""

import contextlib
import json
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from autohete_fx.internals.groups import meeting

Group = dist.ProcessGroup

_KEY = "autohete_fx/position"
_FEW = 16
"""Ranks that all look at all others."""


class _Position(NamedTuple):
    """How many of each a rank has begun."""

    forwards: int = 0
    backwards: int = 0
    steps: int = 0
    collectives: int = 0


_positions: "weakref.WeakKeyDictionary[Group, _Position]" = weakref.WeakKeyDictionary()
"""By the group for values of the ranks that hold a model."""
_quiet: "weakref.WeakSet[Group]" = weakref.WeakSet()
"""Groups whose backward has begun and has issued nothing yet. Where one never does, ranks may leave it out."""
_alike: "weakref.WeakKeyDictionary[Group, list[int]]" = weakref.WeakKeyDictionary()
"""By the group for values: the ranks that go through the same numbers, where these are not all of it."""


def are_alike(control: Group, members: list[int]) -> None:
    """These ranks run the same collectives. Other replicas may run others, where values decide what a graph runs."""
    _alike[control] = members


def note_forward(control: Group) -> None:
    """This rank begins the forward of a graph."""
    at = position_of(control)
    _positions[control] = at._replace(forwards=at.forwards + 1)
    _quiet.discard(control)


def note_backward(control: Group) -> None:
    """This rank begins the backward of a graph. It counts with its first collective."""
    _quiet.add(control)


def note_step(control: Group) -> None:
    """This rank begins a step of an optimizer."""
    at = position_of(control)
    _positions[control] = at._replace(steps=at.steps + 1)


def note_collective(control: Group) -> None:
    """This rank issues a collective of a graph."""
    at = position_of(control)
    _positions[control] = at._replace(collectives=at.collectives + 1, backwards=at.backwards + (control in _quiet))
    _quiet.discard(control)


def position_of(control: Group) -> _Position:
    """How many of each this rank has begun."""
    return _positions.get(control, _Position())


def collectives_of_all(control: Group) -> int:
    """How many collectives each rank of a group has issued, where all of them run the same; else 0."""
    return 0 if control in _alike else position_of(control).collectives


def diverged(control: Group | None) -> str:
    """How another rank has left the way that this one goes; "" where none is known to have.

    Args:
        control: in which this rank waits, of the ranks that hold a model.
    """
    store, mine = meeting(), None if control is None else _positions.get(control)
    if store is None or control is None or mine is None:
        return ""
    with contextlib.suppress(RuntimeError, KeyError, ValueError):  # the store is gone, or the group
        return _diverged(store, control, mine)
    return ""


def _diverged(store: Any, control: Group, mine: _Position) -> str:
    key = f"{_KEY}/{control.group_name}"
    store.set(f"{key}/{dist.get_rank()}", json.dumps(mine))
    for rank in _peers(_alike.get(control) or dist.get_process_group_ranks(control)):
        if store.check([f"{key}/{rank}"]):
            theirs = _Position(*json.loads(store.get(f"{key}/{rank}")))
            ahead = [there - here for there, here in zip(theirs, mine, strict=True)]
            if min(ahead) < 0 < max(ahead):
                return (
                    f"rank {rank} has begun {_words(theirs)}, this rank {_words(mine)}: one of them has left out a forward, a"
                    " backward or a step"
                )
    return ""


def _words(at: _Position) -> str:
    return f"{at.forwards} forwards, {at.backwards} backwards, {at.steps} steps and {at.collectives} collectives"


def _peers(members: list[int]) -> Iterator[int]:
    """The other ranks. Of many, each looks at some alone, and is looked at by as many."""
    count, place = len(members), members.index(dist.get_rank())
    offsets = range(1, count) if count <= _FEW else [1 << power for power in range((count - 1).bit_length())]
    return (members[(place + offset) % count] for offset in offsets)
