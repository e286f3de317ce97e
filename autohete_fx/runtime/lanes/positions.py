"""Where ranks are in their program: whether one waits for a collective that another has left out.

Each rank counts, in the order of its program, the collectives of graphs that it issued and the optimizer's steps that it began. All
ranks that hold a model go through the same pairs of numbers. One that has waited for a second writes its own where the ranks met,
and looks for those of the others. Two pairs on one way never have one number greater and the other smaller. Where they have,
a rank has left out a backward or a step, or runs a forward by itself. Pairs of the past prove it as well.
"""

import contextlib
import json
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from autohete_fx.internals.groups import meeting

Group = dist.ProcessGroup

_KEY = "autohete_fx/position"
_FEW = 16
"""Ranks that all look at all others."""
_positions: "weakref.WeakKeyDictionary[Group, tuple[int, int]]" = weakref.WeakKeyDictionary()
"""By the group for values of the ranks that hold a model: collectives and steps."""


def note_collective(control: Group) -> None:
    """This rank issues a collective of a graph."""
    collectives, steps = _positions.get(control, (0, 0))
    _positions[control] = collectives + 1, steps


def note_step(control: Group) -> None:
    """This rank begins a step of an optimizer."""
    collectives, steps = _positions.get(control, (0, 0))
    _positions[control] = collectives, steps + 1


def num_collectives(control: Group) -> int:
    """How many collectives of graphs this rank has issued."""
    return _positions.get(control, (0, 0))[0]


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


def _diverged(store: Any, control: Group, mine: tuple[int, int]) -> str:
    key = f"{_KEY}/{control.group_name}"
    store.set(f"{key}/{dist.get_rank()}", json.dumps(mine))
    for rank in _peers(dist.get_process_group_ranks(control)):
        if store.check([f"{key}/{rank}"]):
            collectives, steps = json.loads(store.get(f"{key}/{rank}"))
            if (collectives - mine[0]) * (steps - mine[1]) < 0:
                return (
                    f"rank {rank} has begun {steps} steps of the optimizer and {collectives} collectives of forwards and backwards,"
                    f" this rank {mine[1]} and {mine[0]}: one of them has left out a forward, a backward or a step"
                )
    return ""


def _peers(members: list[int]) -> Iterator[int]:
    """The other ranks. Of many, each looks at some alone, and is looked at by as many."""
    count, place = len(members), members.index(dist.get_rank())
    offsets = range(1, count) if count <= _FEW else [1 << power for power in range((count - 1).bit_length())]
    return (members[(place + offset) % count] for offset in offsets)
