"""Annealing: in come assignments that keep the budgets, out comes one that keeps them and scores no worse.

Local search (`improve`) looks at every change before it makes one: for many blocks that is too many. Here many assignments walk
side by side, each by a change at random that is taken where it helps, and where it does not with a chance that shrinks as
work runs out. A change is of what a block does with its activations, of its places or of its prefetch distance alone, in one
block or in two, which may also exchange what they do; what it changes to is more often than not what some block of some walk
does, since most choices are in no good plan. Now and then walks *mate*: blocks that follow each other are good together, so a
walk takes some from another. A walk may leave the budgets, at a price that rises; what is returned does not.

Most changes of a good plan change nothing: the step takes what its longest chain of work and waits takes, and whatever is
not on that chain is free. So walks also pay what settings *waste*: their reduced costs in the relaxation, which
has a price for every lane in every pass and for memory at every moment. That leads them to assignments which leave lanes and
memory to others, and from which a better step is not far.

The random numbers are those of ``seed``, the same on every run.
"""

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import BlockDecision
from autohete_fx.planner.array_passes import Figures, Rows, Seconds
from autohete_fx.planner.choices import copies, place_of, treatment_of
from autohete_fx.planner.figures import limits_of
from autohete_fx.planner.improve import Search
from autohete_fx.planner.replays import Replays

_WALKS = 64
_BLOCKS_OF_MORE_WALKS = 32
"""For so many blocks at most there are twice as many walks: what a round takes for any number of blocks is most of it then."""
_HOTTEST, _COLDEST = 0.2, 1e-4
"""What a change may cost and still be taken with a chance of 1/e, as a share of the step, first (of a block's part in it) and
last."""
_FIRST_PRICE, _LAST_PRICE = 0.5, 4.0
"""Of memory above a budget, as shares of the step for a share of the budget: at first about what memory is worth."""
_NEAR = 4
_EXCHANGES, _CHANGES_OF_TWO = 0.2, 0.45
_GIVEN = 0.6
"""How many changes are to what some block of some walk does."""
_MATING, _ROUNDS = 4, 100
"""Every so many rounds walks mate, and the worst quarter of them goes on from where the best quarter is."""
_ROUND_WORK = 1200
"""Replayed blocks that take as long as what a round takes for any number of blocks."""


def anneal(search: Search, starts: Rows, *, seed: int = 0, wasted_s: Seconds | None = None) -> Rows:
    """Walk from all ``starts`` until the search's work is used up. They keep the budgets.

    ``wasted_s``: by block and setting, what walks pay besides what their steps take; None for nothing.
    """
    walks = _Walks(search, starts, seed, wasted_s)
    scores = search.score(starts)
    best, best_score = starts[np.argmin(scores)], float(scores.min())
    work = max(1, search.work_left)
    hottest = max(_COLDEST, _HOTTEST / search.replays.num_blocks)
    rounds = 0
    while not search.over:
        done = 1 - search.work_left / work
        heat = best_score * hottest * (_COLDEST / hottest) ** done
        walks.price = best_score * _FIRST_PRICE * (_LAST_PRICE / _FIRST_PRICE) ** done
        rounds += 1
        row, score = walks.change(heat) if rounds % _MATING else walks.mate(heat)
        if score < best_score:
            best, best_score = row, score
        if rounds % _ROUNDS == 0:
            walks.follow_the_best()
    return best


class _Walks:
    """Assignments side by side, each as the parts of every block's setting, as a row of settings, and as what it takes."""

    def __init__(self, search: Search, starts: Rows, seed: int, wasted_s: Seconds | None) -> None:
        self.search, self.replays = search, search.replays
        self.wasted_s = np.zeros(search.replays.use.shape[:2]) if wasted_s is None else wasted_s
        self.random = np.random.default_rng(seed)
        self.count = _WALKS * (2 if search.replays.num_blocks <= _BLOCKS_OF_MORE_WALKS else 1)
        self.at = np.arange(self.count)
        self.settings, self.counts, self.all_parts = _parts(search.replays)
        self.rows = starts[self.at % len(starts)]
        self.use = self._use_of(self.rows)
        self._start_from_rows()
        self.scores = search.score_of(self.rows, self.figures) + self._wasted_by(self.rows)
        self.price = 0.0

    def change(self, heat: float) -> tuple[Rows, float]:
        """One change of every walk; returns the best of those that keep the budgets, its score infinite if none does."""
        rows, blocks, new = self._changes()
        old, of = self.parts[rows, blocks], self.rows[rows, blocks]
        to = self.settings[blocks, new[:, 0], new[:, 1], new[:, 2]]
        freed = self.replays.use[blocks, to] - self.replays.use[blocks, of]
        use = self.use + freed[: self.count]
        use[rows[self.count :]] += freed[self.count :]
        self._set(rows, blocks, new, to)
        scores, over = self._scores(self.rows, use, self.figures)
        priced = scores + self.price * over + self._wasted_by(self.rows)
        taken = self._taken(priced, heat)
        found = self._best(self.rows, scores, over)
        back = np.flatnonzero(~taken[rows])
        self._set(rows[back], blocks[back], old[back], of[back])
        self.use, self.scores = np.where(taken[:, None], use, self.use), np.where(taken, priced, self.scores)
        return found

    def _changes(self) -> tuple[Rows, Rows, Rows]:
        """Walks, a block of each, and its new parts: of every walk one in order, then of some a second one."""
        random, blocks, walks = self.random, self.replays.num_blocks, self.count
        first = random.integers(0, blocks, walks)
        near = (first + random.integers(1, _NEAR + 1, walks) * random.choice([-1, 1], walks)) % blocks
        second = np.where(random.random(walks) < 1 / 2, near, random.integers(0, blocks, walks))
        kind = random.random(walks)
        exchanges, both = kind < _EXCHANGES, (kind < _EXCHANGES + _CHANGES_OF_TWO) & (first != second)
        moves = np.append(np.ones(walks, dtype=bool), both)
        rows, exchanges = np.tile(self.at, 2)[moves], np.tile(exchanges, 2)[moves]
        changed, other = np.append(first, second)[moves], np.append(second, first)[moves]
        new, count = self.parts[rows, changed], len(rows)
        part, each = random.integers(0, new.shape[1], count), np.arange(count)
        anything = (random.random(count) * self.counts[changed, part]).astype(np.int64)
        given = self.parts[random.integers(0, walks, count), random.integers(0, blocks, count), part]
        given = np.minimum(given, self.counts[changed, part] - 1)
        new[each, part] = np.where(random.random(count) < _GIVEN, given, anything)
        theirs = np.minimum(self.parts[rows, other], self.counts[changed] - 1)
        return rows, changed, np.where(exchanges[:, None], theirs, new)

    def mate(self, heat: float) -> tuple[Rows, float]:
        """Every walk takes the blocks from one to another from some other walk; returns like `change`."""
        blocks = np.arange(self.replays.num_blocks)
        begin, end = np.sort(self.random.integers(0, len(blocks) + 1, (2, self.count, 1)), axis=0)
        mates = self.random.integers(0, self.count, self.count)
        rows = np.where((blocks >= begin) & (blocks < end), self.rows[mates], self.rows)
        use = self._use_of(rows)
        scores, over = self._scores(rows, use, self.replays.tables.of(rows))
        priced = scores + self.price * over + self._wasted_by(rows)
        taken = self._taken(priced, heat)
        self.rows, self.use = np.where(taken[:, None], rows, self.rows), np.where(taken[:, None], use, self.use)
        self.scores = np.where(taken, priced, self.scores)
        self._start_from_rows()
        return self._best(rows, scores, over)

    def follow_the_best(self) -> None:
        """The worst quarter of the walks goes on from where the best quarter is."""
        order = np.argsort(self.scores, kind="stable")
        best, worst = order[: self.count // 4], order[-(self.count // 4) :]
        for each in (self.rows, self.use, self.scores):
            each[worst] = each[best]
        self._start_from_rows()

    def _start_from_rows(self) -> None:
        self.parts = self.all_parts[np.arange(self.replays.num_blocks), self.rows]
        self.figures = self.replays.tables.of(self.rows)

    def _use_of(self, rows: Rows) -> NDArray[np.int64]:
        use = self.replays.use[np.arange(self.replays.num_blocks), rows].sum(axis=1)
        return use + self.replays.problem.fixed_bytes

    def _wasted_by(self, rows: Rows) -> Seconds:
        return self.wasted_s[np.arange(self.replays.num_blocks), rows].sum(axis=1)

    def _set(self, at: Rows, blocks: Rows, parts: Rows, settings: Rows) -> None:
        """Give one block of some walks another setting."""
        self.parts[at, blocks], self.rows[at, blocks] = parts, settings
        self.replays.tables.change(self.figures, at, blocks, settings)

    def _scores(self, rows: Rows, use: NDArray[np.int64], figures: Figures) -> tuple[Seconds, Seconds]:
        """Scores, and how far above the budgets."""
        self.search.work_left -= rows.size + _ROUND_WORK
        return self.search.score_of(rows, figures), self._over(rows, use)

    def _taken(self, priced: Seconds, heat: float) -> NDArray[np.bool_]:
        return self.random.random(self.count) < np.exp(np.minimum(0.0, (self.scores - priced) / heat))

    def _best(self, rows: Rows, scores: Seconds, over: Seconds) -> tuple[Rows, float]:
        fitting = np.where(over > 0, np.inf, scores)
        best = int(np.argmin(fitting))
        return rows[best].copy(), float(fitting[best])

    def _over(self, rows: Rows, use: NDArray[np.int64]) -> Seconds:
        """Memory above the budgets, of every tier as a share of its budget."""
        problem, over = self.replays.problem, np.zeros(len(rows))
        for used, limit in zip((use.max(axis=1), *self.replays.use_elsewhere(rows)), limits_of(problem), strict=True):
            if limit is not None:
                over += np.maximum(used - limit, 0) / max(limit, 1)
        return over


def _parts(replays: Replays) -> tuple[Rows, Rows, Rows]:
    """The parts of settings: what is done with activations, places, distance.

    Returns which setting has which parts, by block and parts (the one that moves nothing where none has them), how many there
    are of each part, by block, and the parts of every setting, by block and setting.
    """
    found = [_parts_of(settings) for settings in replays.settings]
    counts = np.array([table.shape for table, _ in found])
    settings = np.zeros((len(found), *counts.max(axis=0)), dtype=np.int64)
    parts = np.zeros((len(found), max(map(len, replays.settings)), counts.shape[1]), dtype=np.int64)
    for block, (table, of_block) in enumerate(found):
        settings[block][tuple(slice(count) for count in table.shape)] = table
        parts[block, : len(of_block)] = of_block
    return settings, counts, parts


def _parts_of(settings: list[BlockDecision]) -> tuple[Rows, Rows]:
    """Of one block: which setting has which parts, and the parts of every setting."""
    numbers: tuple[dict[object, int], ...] = ({}, {}, {})
    parts = []
    for s in settings:
        values = treatment_of(s), place_of(s), s.prefetch_distance
        parts.append([number.setdefault(value, len(number)) for number, value in zip(numbers, values, strict=True)])
    table = np.zeros([len(number) for number in numbers], dtype=np.int64)
    for index, (setting, (activations, place, distance)) in enumerate(zip(settings, parts, strict=True)):
        table[activations, place, distance if copies(setting) else slice(None)] = index
    return table, np.array(parts)
