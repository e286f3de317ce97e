"""The rows of contention: how long lanes that slow each other down take for their work, at least.

Cut a stretch of a step into windows. At every moment of window k some set S of lanes works. Let t[k,S] be how long that is, and
r[l,S] the rate that a lane l of S keeps beside the others, the product of `Machine.kept`. Work is done when its rate over time adds
up to its seconds alone. If a lane l does work of W seconds within some windows, and nowhere else, then

    length of window k >= sum over S of t[k,S],   sum over these k and S that have l of r[l,S] t[k,S] >= W.

The times of a plan are such t. They meet all other rows as well, which count work for its seconds alone. Where a row needs the most
that work may take, it counts that beside all other lanes.

A pass is one window. All that it waits for and all that it issues is done between its begin and its end, when lanes are idle.

The last backward and the pass that waits for updates are two windows: until backward ends, and afterwards. Some work may be done in
either: updates on the host that start in backward, and copies up that these send at once. It is asked for in both together.

The same stretch is cut in three as well. The first window ends when updates on the host may begin, the second when the last has
ended. All work of these updates is in the second. How long the first and the third are, other rows say.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import combinations
from math import ceil, prod

import numpy as np

from autohete_fx.ir import Lane
from autohete_fx.planner.bound.updates import UpdateRows
from autohete_fx.planner.bound.variables import TICKS, Linear
from autohete_fx.planner.model.figures import host_computed_s
from autohete_fx.planner.model.work import BACKWARD_PASS, BY_DEVICE, SENT, PassKind, Work, updating_pass

_RATES = 2**10
"""Rates are in parts of so many, rounded up."""
_LONGEST = 2**45
"""In ticks, so that sums of products with rates have 64 bits. Without the rows where work could take longer."""

Within = Mapping[tuple[int, ...], Collection[Work]]
"""By windows, the work that is done in these alone."""


class ContentionRows(UpdateRows):
    """Rows of contention, beside the choices of a problem."""

    def _add_contention(self, kind: PassKind, end: Linear) -> None:
        """Rows of a pass that begins at 0."""
        self._add_windows([end], {(0,): kind.works})

    def _add_contention_of_updates(self, backward_end: Linear, begin: Linear, updated: Linear, end: Linear) -> None:
        """Rows of the last backward, from 0 on, and the pass that waits for updates.

        ``begin`` is when the first update on the host may begin, ``updated`` when the last has ended.
        """
        before = set(BACKWARD_PASS.works)
        after = {*updating_pass(self.problem).works, *SENT, Work.STATES_BACK, *BY_DEVICE, Work.AVERAGE}
        either = set[Work]() if self.updates_begin_together else {Work.UPLOAD}
        every = {*before, *after, Work.HOST_UPDATE}
        self._add_windows([backward_end, end - backward_end], {(0,): before, (1,): after - either, (0, 1): every})
        if self.problem.num_replicas > 1:
            return  # the rows have their mean at the end
        within: dict[tuple[int, ...], Collection[Work]] = {(1,): {Work.HOST_UPDATE}, (0, 1, 2): every}
        if self.updates_begin_together:
            within |= {(0,): before, (1, 2): after}
        self._add_windows([begin, updated - begin, end - updated], within)

    def _add_windows(self, lengths: Sequence[Linear], within: Within) -> None:
        lanes = self._contending
        sets = [of_set for size in range(1, len(lanes) + 1) for of_set in combinations(lanes, size)]
        times = [{of_set: self._number("t", TICKS, _LONGEST) for of_set in sets} for _ in lengths]
        for length, of_window in zip(lengths, times, strict=True):
            if of_window:
                self.model.add(length >= sum(of_window.values()))
        for windows, works in within.items():
            for lane in lanes:
                done = sum(self._rate(lane, s) * t for k in windows for s, t in times[k].items() if lane in s)
                self.model.add(done >= _RATES * self._work_of(lane, works))

    @cached_property
    def _contending(self) -> tuple[Lane, ...]:
        """The lanes that slow others down or are slowed down. None where all their work, one after the other and each beside all
        others, may take longer than the program counts."""
        names = {name for *lanes, _ in self.problem.machine.contention for name in lanes}
        found = tuple(lane for lane in Lane if lane.value in names)
        longest = 0.0
        for lane in found:
            works = [work for work in Work if work.lane is lane]
            longest += self._slowed(lane) * sum(self._ticks(block, works).max() for block in range(self.num_blocks))
        return found if longest <= _LONGEST else ()

    def _rate(self, lane: Lane, together: Iterable[Lane]) -> int:
        return ceil(_RATES * prod(self.problem.machine.kept(lane, beside) for beside in together if beside is not lane))

    def _work_of(self, lane: Lane, works: Collection[Work]) -> Linear:
        """The ticks of all work of a lane. Updates that wait for their disk work for what they compute."""
        own, blocks = [work for work in Work if work in works and work.lane is lane], range(self.num_blocks)
        if own != [Work.HOST_UPDATE]:
            return self._sum(blocks, own)
        seconds = [self._of_block(block, partial(host_computed_s, self.problem, block)) for block in blocks]
        return self._weighted([np.floor(each / self.tick_s).astype(np.int64) for each in seconds])
