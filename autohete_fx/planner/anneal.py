"""Annealing: in comes an assignment that keeps the budgets, out comes one that keeps them and scores no worse.

Local search (`improve`) looks at every change before it makes one: for many blocks that is too many. Here many assignments walk
side by side, each by a change at random that is taken where it helps, and where it does not with a chance that shrinks as
work runs out. A change is of what a block does with its activations, of its places or of its prefetch distance alone, in one
block or in two, which may also exchange what they do. A walk may leave the budgets, at a price; what is returned does not.

The random numbers are the same on every run.
"""

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import BlockDecision
from autohete_fx.planner.choices import copies
from autohete_fx.planner.improve import Search
from autohete_fx.planner.replays import Replays, Rows, Seconds

_WALKS = 256
_HOTTEST, _COLDEST = 1e-3, 1e-4
"""What a change may cost and still be taken with a chance of 1/e, as a share of the step, first and last."""
_PRICE = 2.0
"""Of memory above a budget, as shares of the step for a share of the budget."""
_NEAR = 4
_EXCHANGES, _CHANGES_OF_TWO = 0.2, 0.45
_ROUNDS = 100
"""After so many changes the worst quarter of the walks goes on from where the best quarter is."""


def anneal(search: Search, start: Rows) -> Rows:
    """Walk until the search's work is used up. ``start`` keeps the budgets."""
    walks = _Walks(search, start)
    best, best_score = start, float(search.score(start[None])[0])
    work = max(1, search.work_left)
    rounds = 0
    while not search.over:
        heat = _HOTTEST * (_COLDEST / _HOTTEST) ** (1 - search.work_left / work)
        row, score = walks.change(heat * best_score)
        if score < best_score:
            best, best_score = row, score
        rounds += 1
        if rounds % _ROUNDS == 0:
            walks.follow_the_best()
    return best


class _Walks:
    """Assignments side by side, each as the parts of every block's setting, as a row of settings, and as what it takes."""

    def __init__(self, search: Search, start: Rows) -> None:
        self.search, self.replays = search, search.replays
        self.random = np.random.default_rng(0)
        self.settings, self.counts, parts = _parts(search.replays, start)
        self.at = np.arange(_WALKS)
        self.rows = np.repeat(start[None], _WALKS, axis=0)
        self.parts = np.repeat(parts[None], _WALKS, axis=0)
        self.use = np.repeat(search.replays.device_use(start)[None], _WALKS, axis=0)
        self.scores = search.score(self.rows)
        self.price = _PRICE * float(self.scores[0])

    def change(self, heat: float) -> tuple[Rows, float]:
        """One change of every walk; returns the best of those that keep the budgets, its score infinite if none does."""
        random, blocks = self.random, self.replays.num_blocks
        first = random.integers(0, blocks, _WALKS)
        near = (first + random.integers(1, _NEAR + 1, _WALKS) * random.choice([-1, 1], _WALKS)) % blocks
        second = np.where(random.random(_WALKS) < 1 / 2, near, random.integers(0, blocks, _WALKS))
        kind = random.random(_WALKS)
        exchanges, both = kind < _EXCHANGES, kind < _EXCHANGES + _CHANGES_OF_TWO
        parts, rows, use = self.parts.copy(), self.rows.copy(), self.use
        for block, other, changes in ((first, second, np.ones(_WALKS, dtype=bool)), (second, first, both)):
            new = parts[self.at, block]
            part = random.integers(0, new.shape[1], _WALKS)
            changed = new.copy()
            changed[self.at, part] = (random.random(_WALKS) * self.counts[block, part]).astype(np.int64)
            theirs = np.minimum(self.parts[self.at, other], self.counts[block] - 1)
            new = np.where(exchanges[:, None], theirs, np.where(changes[:, None], changed, new))
            to = self.settings[block, new[:, 0], new[:, 1], new[:, 2]]
            use = use + self.replays.use[block, to] - self.replays.use[block, rows[self.at, block]]
            parts[self.at, block], rows[self.at, block] = new, to
        scores, over = self.search.score(rows), self._over(rows, use)
        self.search.work_left -= rows.size  # so few rows at once take twice as long each as many
        priced = scores + self.price * over
        taken = random.random(_WALKS) < np.exp(np.minimum(0.0, (self.scores - priced) / heat))
        self.parts[taken], self.rows[taken] = parts[taken], rows[taken]
        self.use, self.scores = np.where(taken[:, None], use, self.use), np.where(taken, priced, self.scores)
        best = int(np.argmin(np.where(over > 0, np.inf, scores)))
        return rows[best], float(scores[best]) if over[best] == 0 else float("inf")

    def follow_the_best(self) -> None:
        """The worst quarter of the walks goes on from where the best quarter is."""
        order = np.argsort(self.scores, kind="stable")
        best, worst = order[: _WALKS // 4], order[-(_WALKS // 4) :]
        for each in (self.parts, self.rows, self.use, self.scores):
            each[worst] = each[best]

    def _over(self, rows: Rows, use: NDArray[np.int64]) -> Seconds:
        """Memory above the budgets, of every tier as a share of its budget."""
        problem, over = self.replays.problem, np.zeros(len(rows))
        limits = problem.device_budget_bytes, problem.host_budget_bytes, problem.machine.disk_bytes
        for used, limit in zip((use.max(axis=1), *self.replays.use_elsewhere(rows)), limits, strict=True):
            if limit is not None:
                over += np.maximum(used - limit, 0) / max(limit, 1)
        return over


def _parts(replays: Replays, row: Rows) -> tuple[Rows, Rows, Rows]:
    """The parts of settings: what is done with activations, places, distance.

    Returns which setting has which parts, by block and parts (the one that moves nothing where none has them), how many there
    are of each part, by block, and those of ``row``.
    """
    found = [_parts_of(settings) for settings in replays.settings]
    counts = np.array([table.shape for table, _ in found])
    settings = np.zeros((len(found), *counts.max(axis=0)), dtype=np.int64)
    for block, (table, _) in enumerate(found):
        settings[block][tuple(slice(count) for count in table.shape)] = table
    return settings, counts, np.array([of_block[index] for (_, of_block), index in zip(found, row, strict=True)])


def _parts_of(settings: list[BlockDecision]) -> tuple[Rows, Rows]:
    """Of one block: which setting has which parts, and the parts of every setting."""
    numbers: tuple[dict[object, int], ...] = ({}, {}, {})
    parts = []
    for s in settings:
        place = s.params, s.keeps_fetched, s.optimizer, s.num_moved_states
        values = (s.activations, s.num_offloaded), place, s.prefetch_distance
        parts.append([number.setdefault(value, len(number)) for number, value in zip(numbers, values, strict=True)])
    table = np.zeros([len(number) for number in numbers], dtype=np.int64)
    for index, (setting, (activations, place, distance)) in enumerate(zip(settings, parts, strict=True)):
        table[activations, place, distance if copies(setting) else slice(None)] = index
    return table, np.array(parts)
