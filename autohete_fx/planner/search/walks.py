"""Walks of annealing: in come assignments, out come others, each a few changes at random further. `anneal` says why.

Walks are columns that are replayed side by side. In a round each is offered several changes, and tries the first that might be
taken. The relaxation knows what a change wastes without a replay, and most changes waste too much.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autohete_fx.planner.search.arrays import Assignments, Rows, Tables
from autohete_fx.planner.search.passes import Seconds

Memory = NDArray[np.float32]
"""In units of which so few are all memory that every sum is exact: half as long as bytes, and as much faster."""


class Terms(NamedTuple):
    """The figures that annealing looks at. Settings are told by numbers that count through all blocks.

    Attributes:
        tables: of seconds.
        distances: the prefetch distances that walks give.
        use: device memory by setting and span, in units of which so many can be added up exactly, rounded up.
        elsewhere: likewise on the host and on disk, by tier and setting.
        limits: of device memory less what is always there, of host memory and of disk, in these units, infinite for none.
        paid, wasted: by setting, what is added to seconds of a step; the latter counts for walks only.
        bound_s: no step takes less than this and what its settings waste.
        parts: by kind and setting: what is done with activations, places, distance.
        counts: how many there are of each part, by kind and block.
        settings: the setting that has such parts, by block and parts.
    """

    tables: Tables
    distances: list[int]
    use: Memory
    elsewhere: Memory
    limits: Seconds
    paid: Seconds
    wasted: Seconds
    bound_s: float
    parts: Rows
    counts: Rows
    settings: Rows


class Heat(NamedTuple):
    """How walks walk.

    Attributes:
        hottest, coldest: what a change may cost and still be taken with a chance of 1/e. The first is a share of a block's part
            in the best score, and the last a share of all of it.
        first_price, last_price: of memory above a limit, as shares of the best score for a share of the limit.
        near: how far the second of two blocks is half of the time, at most.
        exchanges, changes_of_two: shares of changes where two blocks exchange what they do, or where two change.
        given: share of changes to what some block of some walk does.
        far: share of changes that also change the prefetch distance.
        mating: every so many rounds walks mate.
        offers: changes that a walk is offered in a round.
        lateness: seconds that walks pay at first for a second by which blocks of the first pass are done later on average;
            nothing at last. One walk pays this, the next that.
    """

    hottest: float
    coldest: float
    first_price: float
    last_price: float
    near: int
    exchanges: float
    changes_of_two: float
    given: float
    far: float
    mating: int
    offers: int
    lateness: tuple[float, ...]


class Prices(NamedTuple):
    """The prices of a round.

    One is what a change may cost, in seconds, to be taken with a chance of 1/e. Others are seconds for a share of a limit by
    which memory is above it, and by walk for a second of lateness.
    """

    degrees: float
    memory: float
    lateness: Seconds


class Takes(NamedTuple):
    """The bytes and seconds that walks take, all blocks together.

    Attributes:
        use: device memory by walk and span.
        elsewhere: by tier and walk.
        paid, wasted: see `Terms`.
    """

    use: Memory
    elsewhere: Memory
    paid: Seconds
    wasted: Seconds


class Walks:
    """Assignments that change, and what was best so far.

    Attributes:
        rows: settings by block and walk.
        prices: by walk, what was paid when its last change was taken, though lateness and memory may be priced otherwise since.
        best, best_score: settings by block of one that keeps the limits, and its score.
    """

    def __init__(self, terms: Terms, starts: Rows, best: int, best_score: float, count: int) -> None:
        """``count`` walks that begin at ``starts``, settings by block and start, of which one is the best."""
        self.terms, self.count, self.blocks = terms, count, len(starts)
        self.each = np.arange(count)
        self.assignments = Assignments(terms.tables, count, terms.distances, np.float32)
        self.best, self.best_score = starts[:, best].copy(), best_score
        self.prices = np.full(count, np.inf)
        self.begin_at(np.ascontiguousarray(starts[:, self.each % starts.shape[1]]))

    def begin_at(self, rows: Rows) -> None:
        """Let all go on from other assignments."""
        self.rows, self.takes = rows, self._takes(rows)
        self.assignments.fill(rows)

    def change(self, heat: Heat, prices: Prices, random: np.random.Generator) -> None:
        """A change of every walk, at random."""
        least = self.prices + prices.degrees * random.standard_exponential((heat.offers, self.count), np.float32)
        blocks, old, new = self._offers(heat, random)
        wasted, of_walks = self.terms.wasted, self.takes
        promised = self.terms.bound_s + 2 * (
            of_walks.wasted + wasted.take(new).sum(axis=0) - wasted.take(old).sum(axis=0)
        )
        promising = (promised + of_walks.paid <= least) & (old != new).any(axis=0)
        offer = promising.argmax(axis=0)
        tried = promising[offer, self.each]
        blocks, old, new = (part[:, offer, self.each] for part in (blocks, old, new))
        new = np.where(tried, new, old)
        takes = Takes(
            *(each + more - less for each, more, less in zip(of_walks, self._takes(new), self._takes(old), strict=True))
        )
        which, walks = np.nonzero(old != new)
        self._give(walks, blocks[which, walks], new[which, walks])
        pays = self._pays(takes, prices)
        taken = tried & (pays <= least[offer, self.each])
        self._take(taken, takes, pays)
        back = ~taken[walks]
        which, walks = which[back], walks[back]
        self._give(walks, blocks[which, walks], old[which, walks])

    def mate(self, prices: Prices, random: np.random.Generator) -> None:
        """Every walk tries what the blocks from one to another do in some other walk."""
        at, rows, before = np.arange(self.blocks)[:, None], self.rows, self.takes
        begin, end = np.sort(random.integers(0, self.blocks + 1, (2, self.count)), axis=0)
        mates = random.integers(0, self.count, self.count)
        self.begin_at(np.where((at >= begin) & (at < end), rows[:, mates], rows))
        takes, self.takes = self.takes, before
        pays = self._pays(takes, prices)
        taken = pays <= self.prices + prices.degrees * random.standard_exponential(self.count)
        self._take(taken, takes, pays)
        self.rows = np.where(taken, self.rows, rows)
        self.assignments.fill(self.rows)

    def follow_the_best(self) -> None:
        """The worst quarter of the walks goes on from where the best quarter is."""
        order = np.argsort(self.prices, kind="stable")
        quarter = len(order) // 4
        goes_on = self.each.copy()
        goes_on[order[::-1][:quarter]] = order[:quarter]
        self.prices = self.prices[goes_on]
        self.begin_at(self.rows[:, goes_on])

    def _takes(self, rows: Rows) -> "Takes":
        """What settings take, by some blocks and walk, all together."""
        terms, use = self.terms, np.zeros((rows.shape[1], self.terms.use.shape[1]), self.terms.use.dtype)
        for of_block in rows:
            use += terms.use.take(of_block, axis=0)
        return Takes(
            use, *(each.take(rows, axis=-1).sum(axis=-2) for each in (terms.elsewhere, terms.paid, terms.wasted))
        )

    def _take(self, taken: NDArray[np.bool_], takes: "Takes", pays: Seconds) -> None:
        """Let some walks go on with what they tried."""
        self.prices = np.where(taken, pays, self.prices)
        for each, new in zip(self.takes, takes, strict=True):
            if len(each) == self.count and each.ndim > 1:
                each[taken] = new[taken]
            else:
                each[..., taken] = new[..., taken]

    def _pays(self, takes: "Takes", prices: Prices) -> Seconds:
        """What walks pay for where they are; the best that keeps the limits is noted."""
        scores, over = self.assignments.step() + takes.paid, np.zeros(self.count)
        for used, limit in zip((takes.use.max(axis=1), *takes.elsewhere), self.terms.limits, strict=True):
            if np.isfinite(limit):
                over += np.maximum(used - limit, 0.0) / max(limit, 1.0)
        keep = np.where(over > 0, np.inf, scores)
        best = int(np.argmin(keep))
        if keep[best] < self.best_score:
            self.best, self.best_score = self.rows[:, best].copy(), float(keep[best])
        return scores + takes.wasted + prices.memory * over + prices.lateness * self.assignments.lateness

    def _give(self, walks: Rows, blocks: Rows, settings: Rows) -> None:
        """Give blocks of some walks other settings."""
        self.rows[blocks, walks] = settings
        self.assignments.put(walks, blocks, settings)

    def _offers(self, heat: Heat, random: np.random.Generator) -> tuple[Rows, Rows, Rows]:
        """What one or two blocks of every walk may do instead: blocks, their settings and others, by block, offer and walk. What is
        not changed keeps its setting."""
        shape = heat.offers, self.count
        chance = random.random((5, *shape), np.float32)
        first, anywhere = self._any(random, 2, self.blocks, shape)
        far = 1 + (chance[0] * heat.near).astype(np.int64)
        near = (first + np.where(chance[1] < 1 / 2, far, -far)) % self.blocks
        second = np.where(chance[2] < 1 / 2, near, anywhere)
        exchanges = (chance[3] < heat.exchanges) & (first != second)
        both = (chance[3] < heat.exchanges + heat.changes_of_two) & (first != second)
        blocks = np.stack([first, second])
        old = self.rows[blocks, self.each]
        new = self._other(heat, random, blocks, old)
        theirs = self._with_parts(blocks, [kind.take(old[::-1]) for kind in self.terms.parts])
        new = np.where(exchanges, theirs, new)
        new[1] = np.where(both, new[1], old[1])
        return blocks, old, new

    def _other(self, heat: Heat, random: np.random.Generator, blocks: Rows, old: Rows) -> Rows:
        """Settings that differ in one part, which is what some block of some walk has, or any; and some in their distance, too."""
        terms, shape = self.terms, blocks.shape
        part, donor, walk = (self._any(random, 1, most, shape)[0] for most in (3, self.blocks, self.count))
        chance = random.random((3, *shape), np.float32)
        given = terms.parts[part, self.rows[donor, walk]]
        anything = (chance[0] * terms.counts[part, blocks]).astype(np.int64)
        new = np.where(chance[1] < heat.given, given, anything)
        return self._with_parts(
            blocks, [np.where(part == i, new, kind.take(old)) for i, kind in enumerate(terms.parts)]
        )

    def _with_parts(self, blocks: Rows, parts: list[Rows]) -> Rows:
        """The settings that have such parts, or the last that there are."""
        known = [np.minimum(part, count.take(blocks) - 1) for part, count in zip(parts, self.terms.counts, strict=True)]
        return self.terms.settings[blocks, *known]

    @staticmethod
    def _any(random: np.random.Generator, many: int, count: int, shape: tuple[int, ...]) -> Rows:
        return (random.random((many, *shape), np.float32) * count).astype(np.int64)
