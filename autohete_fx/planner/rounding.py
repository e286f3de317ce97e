"""From shares to decisions: in come a relaxation's shares of every option, out come assignments in whole blocks.

A relaxation may give a block a third of one option and two thirds of another. What matters to lanes and memory is how much of
each has been chosen up to any block, so the shares are rounded like the brightness of a line of pixels: every block takes
the option that is furthest behind its share so far.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.planner.choices import choices

Decisions = tuple[BlockDecision, ...]

_LEAST_SHARE = 1e-6


def rounded(problem: Problem, shares: Sequence[NDArray[np.float64]], distances: Iterable[int]) -> list[Decisions]:
    """Assignments near ``shares``, from the first block on, from the last one on, and block by block, at each prefetch
    distance. They need not keep the budgets."""
    blocks = range(len(problem.costs))
    options = [choices(problem, block) for block in blocks]
    found = [_diffused(options, shares, blocks), _diffused(options, shares, blocks[::-1])]
    found.append([of_block[int(np.argmax(share))] for of_block, share in zip(options, shares, strict=True)])
    return [tuple(replace(d, prefetch_distance=distance) for d in row) for row in found for distance in distances]


def supported_choices(problem: Problem, shares: Sequence[NDArray[np.float64]]) -> list[list[BlockDecision]]:
    """Of every block the choices that have a share in any block, and the one that moves nothing."""
    options = [choices(problem, block) for block in range(len(problem.costs))]
    pairs = [
        pair for of_block, share in zip(options, shares, strict=True) for pair in zip(of_block, share, strict=True)
    ]
    anywhere = {option for option, share in pairs if share > _LEAST_SHARE}
    return [[option for k, option in enumerate(of_block) if not k or option in anywhere] for of_block in options]


def _diffused(
    options: Sequence[Sequence[BlockDecision]], shares: Sequence[NDArray[np.float64]], order: Iterable[int]
) -> list[BlockDecision]:
    behind: dict[BlockDecision, float] = {}
    chosen: dict[int, BlockDecision] = {}
    for block in order:
        here = [option for option, share in zip(options[block], shares[block], strict=True) if share > _LEAST_SHARE]
        for option, share in zip(options[block], shares[block], strict=True):
            behind[option] = behind.get(option, 0.0) + share
        chosen[block] = max(here, key=lambda option: behind[option])
        behind[chosen[block]] -= 1.0
    return [chosen[block] for block in range(len(options))]
