"""Local search: in comes an assignment that keeps the budgets, out comes one that keeps them and scores no worse.

The integer program is exact at prefetch distance 1 only, and may end before it is done. The search knows all distances. It
changes the setting of one block, and where that no longer helps, of two: one that gives up memory and one that uses it.
AutoHete's safe prefetch is the special case that changes a distance alone. A *score* is the seconds of a step plus
``COPY_WEIGHT`` times the seconds of all its copies. Plans that are as fast therefore copy as little as they can.

Work is counted in replayed blocks and not in seconds: the same input gives the same result. Only ``deadline`` depends on
the clock.
"""

import time

import numpy as np
from numpy.typing import NDArray

from autohete_fx.planner.model.figures import limits_of
from autohete_fx.planner.model.work import COPY_WEIGHT
from autohete_fx.planner.search.arrays import Rows
from autohete_fx.planner.search.passes import Seconds
from autohete_fx.planner.search.replays import Replays

LEAST_GAIN = 1e-9
"""A smaller share of a score is none."""
_MOST_PAIRS = 1 << 15
_LEADERS = 32
_PROMISING = 64
_CHECKS_PER_REPLAYED_BLOCK = 8


class Search:
    """Local search over one problem, until a deadline at most.

    Attributes:
        work_left: blocks (rows times blocks of each) that may still be replayed; whoever asks for a search sets it.
    """

    def __init__(self, replays: Replays, *, deadline: float) -> None:
        self.replays = replays
        self.work_left = 0
        self.deadline = deadline
        changes = [(block, i) for block, settings in enumerate(replays.settings) for i in range(len(settings))]
        self.blocks, self.to = np.array(changes).T

    @property
    def over(self) -> bool:
        """Whether its work is used up, or its time."""
        return self.work_left <= 0 or time.monotonic() > self.deadline

    def score(self, rows: Rows) -> Seconds:
        """The score of every row; smaller is better."""
        self.work_left -= rows.size
        return self.replays.seconds(rows) + COPY_WEIGHT * self.replays.copied_seconds(rows)

    def fitting(self, rows: Rows) -> NDArray[np.bool_]:
        """Which rows keep the budgets."""
        use = np.full((len(rows), self.replays.use.shape[2]), self.replays.problem.fixed_bytes)
        for block, column in enumerate(rows.T):
            use += self.replays.use[block, column]
        return self.replays.fit(use.max(axis=1), self.replays.use_elsewhere(rows))

    def improve(self, start: Rows) -> Rows:
        """Change settings while a change helps and work is left. ``start`` keeps the budgets."""
        best, best_score = start, float(self.score(start[None])[0])
        while not self.over:
            for changed in (self._change_one, self._change_two):
                row, score = changed(best, best_score)
                if score < best_score * (1 - LEAST_GAIN):
                    best, best_score = row, score
                    break
            else:
                return best
        return best

    def repair(self, row: Rows) -> Rows | None:
        """Change one block after the other until the budgets are kept, or the work is used up.

        Each time it is the one that costs least time for what it frees, to what holds least, which is at distance 1. None where
        no change frees anything.
        """
        while self.work_left > 0:
            blocks, to = self._changes_from(row)
            nearest = self.replays.distance[blocks, to] == 1
            blocks, to = blocks[nearest], to[nearest]
            over = self._overflow(row, np.append(blocks, 0), np.append(to, row[0]))  # the last changes nothing
            if not over[-1]:
                return row
            freed = over[-1] - over[:-1]
            promising = np.argsort(-freed, kind="stable")[:_PROMISING]
            promising = promising[freed[promising] > 0]
            if not len(promising):
                return None
            rows = np.repeat(row[None], len(promising), axis=0)
            rows[np.arange(len(promising)), blocks[promising]] = to[promising]
            lost_s = np.maximum(self.score(rows) - self.score(row[None])[0], 0.0)
            row = rows[int(np.argmin(lost_s / freed[promising]))]
        return None

    def _change_one(self, row: Rows, score: float) -> tuple[Rows, float]:
        """The best change of one block, or of several that each help alone."""
        blocks, to = self._changes_from(row)
        fitting = self._changes_fit(row, (blocks, to))
        blocks, to = blocks[fitting], to[fitting]
        if not len(blocks):
            return row, score
        rows = np.repeat(row[None], len(blocks), axis=0)
        rows[np.arange(len(blocks)), blocks] = to
        scores = self.score(rows)
        order = np.argsort(scores, kind="stable")
        helping = [i for i in order if scores[i] < score * (1 - LEAST_GAIN)]
        _, first = np.unique(blocks[helping], return_index=True)
        leaders = [helping[i] for i in sorted(first)[:_LEADERS]]
        if len(leaders) < 2:
            return rows[order[0]], float(scores[order[0]])
        # The best change of every block, one after the other: all prefixes of that list at once.
        prefixes = np.repeat(row[None], len(leaders), axis=0)
        for i, leader in enumerate(leaders):
            prefixes[i:, blocks[leader]] = to[leader]
        prefixes = prefixes[self.fitting(prefixes)]
        return self._best(prefixes, self.score(prefixes))

    def _change_two(self, row: Rows, score: float) -> tuple[Rows, float]:
        """The best change of two blocks, among the most promising ones where there are many."""
        blocks, to = self._changes_from(row)
        rows = np.repeat(row[None], len(blocks), axis=0)
        rows[np.arange(len(blocks)), blocks] = to
        gains = score - self.score(rows)  # alone, and whether it fits alone or not
        order = np.argsort(-gains, kind="stable")
        fast, other = order, order
        if len(order) ** 2 > 2 * _MOST_PAIRS:
            fast = order[: max(1, _MOST_PAIRS // len(order))]
        first, second = (pairs.ravel() for pairs in np.meshgrid(fast, other, indexing="ij"))
        apart = (blocks[first] < blocks[second]) | ((blocks[first] != blocks[second]) & (len(fast) < len(other)))
        first, second = first[apart], second[apart]
        fitting = self._changes_fit(row, (blocks[first], to[first]), (blocks[second], to[second]))
        first, second = first[fitting], second[fitting]
        if len(first) > _MOST_PAIRS // 4:
            promising = np.argsort(-(gains[first] + gains[second]), kind="stable")[: _MOST_PAIRS // 4]
            first, second = first[promising], second[promising]
        if not len(first):
            return row, score
        rows = np.repeat(row[None], len(first), axis=0)
        rows[np.arange(len(first)), blocks[first]] = to[first]
        rows[np.arange(len(first)), blocks[second]] = to[second]
        return self._best(rows, self.score(rows))

    def _changes_from(self, row: Rows) -> tuple[Rows, Rows]:
        moving = row[self.blocks] != self.to
        return self.blocks[moving], self.to[moving]

    def _changes_fit(self, row: Rows, *changes: tuple[Rows, Rows]) -> NDArray[np.bool_]:
        """Which changes of ``row`` keep the budgets; each is given as blocks and their new settings."""
        use, elsewhere = self.replays.device_use(row), self.replays.use_elsewhere(row)
        count = len(changes[0][0])
        self.work_left -= count // _CHECKS_PER_REPLAYED_BLOCK
        fitting = np.zeros(count, dtype=bool)
        for start in range(0, count, 1 << 14):
            part = slice(start, start + (1 << 14))
            moved, moved_elsewhere = use[None], elsewhere[:, None]
            for blocks, to in ((blocks[part], to[part]) for blocks, to in changes):
                moved = moved + self.replays.use[blocks, to] - self.replays.use[blocks, row[blocks]]
                table = self.replays.elsewhere
                moved_elsewhere = moved_elsewhere + table[:, blocks, to] - table[:, blocks, row[blocks]]
            fitting[part] = self.replays.fit(moved.max(axis=1), moved_elsewhere)
        return fitting

    def _overflow(self, row: Rows, blocks: Rows, to: Rows) -> Seconds:
        """Bytes above the budgets, over all spans and tiers, after each change of ``row``."""
        problem, tables = self.replays.problem, self.replays
        use, elsewhere = tables.device_use(row), tables.use_elsewhere(row)
        over = np.zeros(len(blocks))
        self.work_left -= len(blocks) // _CHECKS_PER_REPLAYED_BLOCK
        if problem.device_budget_bytes is not None:
            moved = use[None] + tables.use[blocks, to] - tables.use[blocks, row[blocks]]
            over += np.maximum(moved - problem.device_budget_bytes, 0).sum(axis=1)
        for tier, limit in enumerate(limits_of(problem)[1:]):
            if limit is not None:
                table = tables.elsewhere[tier]
                over += np.maximum(elsewhere[tier] + table[blocks, to] - table[blocks, row[blocks]] - limit, 0)
        return over

    @staticmethod
    def _best(rows: Rows, scores: Seconds) -> tuple[Rows, float]:
        best = int(np.argmin(scores))
        return rows[best], float(scores[best])
