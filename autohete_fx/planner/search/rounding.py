"""From shares to decisions: in come a relaxation's shares of every option, out come assignments in whole blocks.

A relaxation may give a block a third of one option and two thirds of another. How much of each has been chosen up to any block
matters to lanes and memory. The shares are therefore rounded like the brightness of a line of pixels. Every block takes the
option whose share so far lags most.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import Activations, BlockDecision, Optimizer, Problem
from autohete_fx.planner.model.choices import activation_choices, joined, place_choices, place_of, treatment_of

Decisions = tuple[BlockDecision, ...]

_LEAST_SHARE = 1e-6


def rounded(problem: Problem, shares: Sequence[NDArray[np.float64]], distances: Iterable[int]) -> list[Decisions]:
    """Assignments near ``shares``, from the first block on, from the last one on, and block by block, at each prefetch
    distance. They need not keep the budgets."""
    blocks = range(len(problem.costs))
    orders = (blocks, blocks[::-1], None)
    kinds = _by_kind(problem, shares)
    found = [[_diffused(*kind, order) for kind in kinds] for order in orders]
    return [
        tuple(replace(joined(*pair), prefetch_distance=distance) for pair in zip(*row, strict=True))
        for row in found
        for distance in distances
    ]


def supported_choices(problem: Problem, shares: Sequence[NDArray[np.float64]]) -> list[list[BlockDecision]]:
    """The choices of every block that have a share in any block, and the one that moves nothing.

    A choice of a part of a block is a mixture of choices of all of it. It has a share where each of these has.
    """
    supported = []
    for options, of_kind in _by_kind(problem, shares):
        pairs = [pair for each in zip(options, of_kind, strict=True) for pair in zip(*each, strict=True)]
        anywhere = {option for option, share in pairs if share > _LEAST_SHARE}
        whole = anywhere.union(*map(_wholes, anywhere))
        supported.append(
            [[o for k, o in enumerate(of_block) if not k or whole.issuperset(_wholes(o))] for of_block in options]
        )
    return [[joined(a, p) for a in treated for p in placed] for treated, placed in zip(*supported, strict=True)]


def _wholes(option: BlockDecision) -> set[BlockDecision]:
    """The choices of all of a block of which an option is a mixture; itself where it is none."""
    if option.num_offloaded is not None:
        return {replace(option, num_offloaded=None), replace(option, num_offloaded=None, activations=Activations.KEEP)}
    if option.num_moved_states is not None:
        places = option.optimizer, option.other_states
        plain = replace(option, num_moved_states=None, other_states=Optimizer.DEVICE)
        return {replace(plain, optimizer=place) for place in places}
    return {option}


def wasted_seconds(
    problem: Problem, wasted_s: Sequence[NDArray[np.float64]], settings: Sequence[Sequence[BlockDecision]]
) -> NDArray[np.float64]:
    """`Relaxed.wasted_s` of settings, by block and setting; 0 where a block has fewer settings than others."""
    table = np.zeros((len(settings), max(map(len, settings))))
    (treated, of_treated), (placed, of_placed) = _by_kind(problem, wasted_s)
    for block, of_block in enumerate(settings):
        treatments = dict(zip(map(treatment_of, treated[block]), of_treated[block], strict=True))
        places = dict(zip(map(place_of, placed[block]), of_placed[block], strict=True))
        table[block, : len(of_block)] = [treatments[treatment_of(s)] + places[place_of(s)] for s in of_block]
    return table


_Kind = tuple[list[tuple[BlockDecision, ...]], list[NDArray[np.float64]]]


def _by_kind(problem: Problem, shares: Sequence[NDArray[np.float64]]) -> list[_Kind]:
    """By block the options and their shares, of activations and of places."""
    blocks = range(len(problem.costs))
    treated = [activation_choices(problem, block) for block in blocks]
    placed = [place_choices(problem, block) for block in blocks]
    parts = [np.split(share, [len(of_block)]) for share, of_block in zip(shares, treated, strict=True)]
    return [(treated, [part[0] for part in parts]), (placed, [part[1] for part in parts])]


def _diffused(
    options: Sequence[Sequence[BlockDecision]], shares: Sequence[NDArray[np.float64]], order: Iterable[int] | None
) -> list[BlockDecision]:
    if order is None:
        return [of_block[int(np.argmax(share))] for of_block, share in zip(options, shares, strict=True)]
    behind: dict[BlockDecision, float] = {}
    chosen: dict[int, BlockDecision] = {}
    for block in order:
        here = [option for option, share in zip(options[block], shares[block], strict=True) if share > _LEAST_SHARE]
        for option, share in zip(options[block], shares[block], strict=True):
            behind[option] = behind.get(option, 0.0) + share
        chosen[block] = max(here, key=lambda option: behind[option])
        behind[chosen[block]] -= 1.0
    return [chosen[block] for block in range(len(options))]
