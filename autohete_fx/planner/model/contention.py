"""Contention: how much longer pieces of work take beside those of other lanes. In come pieces, out come factors.

While a lane works beside others it keeps the product of the rates that `Machine.kept` has for them. A piece is done when its rate
over time adds up to its seconds alone. How long pieces take decides which others they meet. A replay is therefore repeated with
the factors of the one before, until they stay (`settled`).

Lanes and waits are as they were, and no factor is below 1: no replay is faster than one without contention.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autohete_fx.ir import Lane, Machine

_ROUNDS, _FREE_ROUNDS = 20, 12
"""The most, and after how many of them factors go half of their way only. Few replays come back to factors that they left."""
_STAYS = 1e-4
"""Factors that change by no more are the same."""


class Piece(NamedTuple):
    """A piece of work: the ``number``-th of its kind in a replay."""

    lane: Lane
    label: str
    block: int
    number: int


Times = tuple[Piece, float, float]
"""A piece, or a part of one, with its begin and end."""
Factors = Mapping[Piece, float]
"""By how many times pieces take longer; those not in it take as long as alone."""


def settled(machine: Machine, replay: Callable[[Factors], Iterable[Times]]) -> Factors:
    """The factors under which a replay has these factors."""
    factors: Factors = {}
    for number in range(_ROUNDS if machine.contention else 0):
        before, after = factors, factors_of(machine, replay(factors), factors)
        change = {piece: after.get(piece, 1.0) - before.get(piece, 1.0) for piece in {*before, *after}}
        factors = after
        if all(abs(more) <= _STAYS for more in change.values()):
            break
        if number >= _FREE_ROUNDS:
            factors = {piece: before.get(piece, 1.0) + more / 2 for piece, more in change.items()}
    return factors


def factors_of(machine: Machine, times: Iterable[Times], before: Factors) -> Factors:
    """The factors of pieces that begin at these times, beside others that work at these times.

    Args:
        before: the factors with which these work.
    """
    lanes = {Lane(name) for lane, beside, _ in machine.contention for name in (lane, beside)}
    listed = [each for each in times if each[0].lane in lanes and each[2] > each[1]]
    if not listed:
        return {}
    moments = np.unique([moment for _, begin, end in listed for moment in (begin, end)])
    works = {lane: _works(moments, [each[1:] for each in listed if each[0].lane is lane]) for lane in lanes}
    rates = {lane: _rate(machine, lane, works) for lane in lanes}
    moments = np.append(moments, 2 * moments[-1] + 1.0)  # when nothing works any more
    done = {
        lane: np.concatenate(([0.0], np.cumsum(np.diff(moments) * np.append(rate, 1.0))))
        for lane, rate in rates.items()
    }
    parts: dict[Piece, list[tuple[float, float]]] = {}
    for piece, begin, end in listed:
        parts.setdefault(piece, []).append((begin, end))
    factors = {}
    for piece, intervals in parts.items():
        alone = sum(end - begin for begin, end in intervals) / before.get(piece, 1.0)
        factors[piece] = max(1.0, _takes(sorted(intervals), alone, moments, done[piece.lane]) / alone)
    return factors


def _takes(intervals: Sequence[tuple[float, float]], alone: float, moments: np.ndarray, done: np.ndarray) -> float:
    """The seconds of work that ``alone`` takes so many: interrupted after each interval, and to its end in the last.

    Args:
        done: what a lane that works all the time has done at each moment.
    """
    left, took = alone, 0.0
    for begin, end in intervals[:-1]:
        work = float(np.interp(end, moments, done) - np.interp(begin, moments, done))
        if work >= left:
            break
        left, took = left - work, took + end - begin
    else:
        begin = intervals[-1][0]
    return took + float(np.interp(np.interp(begin, moments, done) + left, done, moments)) - begin


def _works(moments: np.ndarray, intervals: list[tuple[float, float]]) -> np.ndarray:
    """Between one moment and the next, whether a lane works."""
    change = np.zeros(len(moments))
    for begin, end in intervals:
        change[np.searchsorted(moments, begin)] += 1
        change[np.searchsorted(moments, end)] -= 1
    return np.cumsum(change)[:-1] > 0


def _rate(machine: Machine, lane: Lane, works: Mapping[Lane, np.ndarray]) -> np.ndarray:
    """Between moments, the rate of a lane that works."""
    found = np.ones(len(works[lane]))
    for beside, is_working in works.items():
        if beside is not lane:
            found *= np.where(is_working, machine.kept(lane, beside), 1.0)
    return found
