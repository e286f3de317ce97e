"""Tables of what settings take, and the figures of assignments that are replayed side by side: in come settings, out come seconds
of steps. `passes` and `updates` count."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from autohete_fx.ir.decision import STAGING_SLOTS
from autohete_fx.planner.model.work import COPY_LANES, GRADIENTS_LANE, UPDATES_LANE
from autohete_fx.planner.search.gathering import Collectives, Gathering, GatheringPasses, run_shared_gathering
from autohete_fx.planner.search.passes import NEVER, Copies, Home, Passes, Seconds, SharedUp, run_shared
from autohete_fx.planner.search.updates import all_updated, each_updated, idle_time

Rows = NDArray[np.int64]
"""Assignments as indices into each block's settings; or any other indices."""

_FIRST, _BACKWARD = range(2)
_WORK = 0
_UP, _DOWN = map(COPY_LANES.index, (UPDATES_LANE, GRADIENTS_LANE))
_DEVICE, _HOST, _UPLOADS, _STATES, _WAITS, _AVERAGE, _UP_FIRST, _HOME, _STAGED, _OVER_LINK = range(10)


class Rules(NamedTuple):
    """The rules of a problem's replays.

    Attributes:
        training: else a step is one forward.
        synchronous: all updates are done before the next step begins.
        early: updates begin when gradients land, not when backward ends.
        sends_at_once: see `figures.sends_at_once`.
        priority: of updates, by the order of the next forward.
        one_memory: updates on the host begin after those on the device.
        passes: how many there are in a step of each pass but the first.
        most_staging_s: see `figures.most_staging_s`.
    """

    training: bool
    synchronous: bool
    early: bool
    sends_at_once: bool
    priority: bool
    one_memory: bool
    passes: tuple[int, ...]
    most_staging_s: float


class Tables(NamedTuple):
    """The figures of every setting of every block.

    Attributes:
        rules: of the problem.
        lanes: seconds by pass, kind, block and setting. Kinds: work, then the sides of `work.COPY_LANES`. The first pass waits
            for updates. The second is a backward, the last block first; others are forwards that wait for none.
        distance: prefetch distances by block and setting, 0 where nothing is copied.
        updates: by kind, block and setting, seconds of updates on the device and on the host, and of uploads and streamed
            states outside of passes. It has 0 where the first pass's copies up wait for an update on the host, else NEVER. It
            also has the seconds of the mean over replicas, before which no update begins. Then come those of streamed states on
            their way up and home beside the first pass, and of their staging. The last are those in which the device's updates
            have the link.
        gathering: what passes with collectives have besides; None where there are none.
    """

    rules: Rules
    lanes: Seconds
    distance: Rows
    updates: Seconds
    gathering: Gathering | None

    @property
    def settings(self) -> int:
        """The settings of every block: an assignment is told by their numbers, which count through all blocks."""
        return self.distance.shape[1]

    def distances(self, numbers: Rows) -> list[int]:
        """The prefetch distances of settings, ascending; at least one."""
        return [far for far in np.unique(self.distance.take(numbers)).tolist() if far] or [1]


class Assignments:
    """Assignments whose steps are replayed side by side.

    Attributes:
        lateness: after `step`, when blocks of each one's first pass are done on average.
    """

    def __init__(self, tables: Tables, count: int, distances: Sequence[int], dtype: DTypeLike = np.float64) -> None:
        """``distances``: all that the assignments may have, ascending. ``dtype``: float32 takes half as long, and 1e-6 is wrong."""
        self.rules, self.count, self.distances = tables.rules, count, distances
        self.num_passes, _, self.blocks, _ = tables.lanes.shape
        self._of_passes = [kinds.astype(dtype) for kinds in _tables_of_kinds(tables, distances)]
        self._of_updates = tables.updates.reshape(len(tables.updates), -1).astype(dtype)
        self._figures = np.empty((len(self._of_passes[0]), self.blocks, self.num_passes * count), dtype)
        self._updates = np.empty((len(tables.updates), self.blocks, count), dtype)
        self._begin = np.zeros(self.num_passes * count, dtype)
        self.lateness = self._begin[:count]
        first, others = slice(0, count), slice(count, None)
        self._first, self._others = self._lanes_of(first), self._lanes_of(others)
        self._gathering = tables.gathering
        together = others if self.rules.sends_at_once else slice(None)
        self._passes = self._passes_of(together)
        self._home = Home(self.blocks, count, self._begin.dtype)

    def _passes_of(self, together: slice) -> Passes:
        """The passes that run side by side."""
        work, lanes = self._figures[_WORK][:, together], self._lanes_of(together)
        if self._gathering is None:
            return Passes(work, lanes, self.distances)
        first = None
        if (forwards := self._gathering.forwards) is not None:
            waits = np.where(forwards, 0.0, NEVER).astype(work.dtype)
            first = np.repeat(waits, self.count)[together]
        return GatheringPasses(
            work, lanes, self.distances, self._collectives_of(together), first, self._gathering.leads
        )

    def _lanes_of(self, columns: slice) -> list[Copies]:
        """Views of what lanes copy in some columns; the order of figures is that of `_tables_of_kinds`."""
        figures, slots, at, lanes = self._figures[..., columns], len(self.distances), 1, []
        many = slots if slots > 1 else 0
        for lane in COPY_LANES:
            found = Copies(figures[:0], figures[:0], figures[0, :0], figures[:0])
            if lane.before:
                found = found._replace(up=figures[at : at + slots], up_never=figures[at + slots : at + slots + many])
                at += slots + many
            if lane.after:
                found = found._replace(down=figures[at], down_never=figures[at + 1 : at + 1 + many])
                at += 1 + many
            lanes.append(found)
        return lanes

    def _collectives_of(self, columns: slice) -> Collectives:
        """Likewise of what passes with collectives have besides, which comes last."""
        figures, slots = self._figures[..., columns], len(self.distances)
        many = slots if slots > 1 else 0
        at = np.cumsum([0, slots, slots, 1, many, 1, 1, 1, 1])
        at += len(figures) - at[-1]
        parts = [figures[begin:end] for begin, end in pairwise(at)]
        return Collectives(parts[0], parts[1], parts[2][0], parts[3], *(part[0] for part in parts[4:]))

    def put(self, columns: Rows, blocks: Rows, settings: Rows) -> None:
        """Give blocks of some assignments other settings."""
        for i, kinds in enumerate(self._of_passes):
            position = self.blocks - 1 - blocks if i == _BACKWARD else blocks
            at = position * (self.num_passes * self.count) + (i * self.count + columns)
            for figure, kind in zip(self._figures, kinds, strict=True):
                figure.reshape(-1)[at] = kind.take(settings)
        at = blocks * self.count + columns
        for figure, kind in zip(self._updates, self._of_updates, strict=True):
            figure.reshape(-1)[at] = kind.take(settings)

    def fill(self, rows: Rows) -> None:
        """Let all be these, given by block and column."""
        for i, kinds in enumerate(self._of_passes):
            of_pass = rows[::-1] if i == _BACKWARD else rows
            for figure, kind in zip(self._figures, kinds, strict=True):
                figure[:, i * self.count : (i + 1) * self.count] = kind.take(of_pass)
        for figure, kind in zip(self._updates, self._of_updates, strict=True):
            figure[:] = kind.take(rows)

    def step(self) -> Seconds:
        """Seconds of a step of each. Work after the last backward is timed from its end on, or from that of the mean over replicas,
        while which nothing else runs."""
        rules, updates, passes = self.rules, self._updates, self._passes
        start = updates[_DEVICE].sum(axis=0)
        all_updated_at = NEVER
        if rules.sends_at_once:
            passes.run(self._begin[self.count :])
            first, others = self._shared(start), passes.ends[-1]
        else:
            self._begin[: self.count] = start
            self._run_with_first(start)
            first, others = passes.ends[:, : self.count], passes.ends[-1, self.count :]
            if rules.synchronous:
                all_updated_at = updates[_HOST].sum(axis=0) + (start if rules.one_memory else 0.0)
        self.lateness = first.mean(axis=0)
        step = np.maximum(first[-1], all_updated_at)
        for i in range(1, self.num_passes):
            step += rules.passes[i - 1] * others[(i - 1) * self.count : i * self.count]
        return step + updates[_AVERAGE].sum(axis=0)

    def _run_with_first(self, start: Seconds) -> None:
        """Run all passes, the first of which waits for updates in training."""
        if not self.rules.training:
            self._passes.run(self._begin)
            return
        until, passes, home = self._until(start), self._passes, self._home_now()
        never = self._first[_UP].up_never if len(self.distances) > 1 else np.zeros_like(until[None])
        if not isinstance(passes, GatheringPasses) or self._gathering is None:
            passes.run(self._begin, until + never, home)
            return
        leads = self._gathering.leads[:, None] & (not self.rules.synchronous)
        ahead = until + self._collectives_of(slice(0, self.count)).ahead_never
        passes.run(self._begin, np.where(leads, NEVER, until + never), home, np.where(leads, ahead, NEVER))

    def _home_now(self) -> Home | None:
        """Streamed states on their way home; None where there are none."""
        slot_s = np.minimum(self._updates[_STAGED].sum(axis=0), self.rules.most_staging_s) / STAGING_SLOTS
        up, took, down = self._updates[_UP_FIRST], self._updates[_HOME], self._first[_DOWN].down
        return self._home.update(up, took, down, slot_s, self._copies_from())

    def _copies_from(self) -> Seconds:
        """When copies go on, which the device's updates have stopped."""
        return self._updates[_OVER_LINK].sum(axis=0)

    def _until(self, start: Seconds) -> Seconds:
        """When what the first pass copies up is updated, where all updates begin together; NEVER for what waits for no update."""
        begin = start if self.rules.one_memory else np.zeros_like(start)
        until = all_updated(begin, self._updates[_HOST], priority=self.rules.priority)
        until += self._updates[_WAITS]
        return until

    def _shared(self, start: Seconds) -> Seconds:
        """When blocks of the first pass are done, whose copies up share their lane with those of updates. The others have run."""
        rules, updates, passes, own = self.rules, self._updates, self._passes, slice(0, self.count)
        up, down, arrived, landed = self._first[_UP], self._first[_DOWN], passes.arrived[_UP], passes.landed[_DOWN]
        ended, of_others = passes.ends[-1, own], self._others[_UP]
        busy = zip(arrived[:, own] - ended, of_others.up[..., own].sum(axis=0), strict=True)
        issued_s, gathering = up.up.sum(axis=0), self._gathering
        if isinstance(passes, GatheringPasses) and gathering is not None:
            of_first, of_others = self._collectives_of(own), self._collectives_of(slice(self.count, 2 * self.count))
            ahead = zip(passes.arrived_ahead[:, own] - ended, of_others.ahead.sum(axis=0), strict=True)
            busy = (piece for at_position in zip(ahead, busy, strict=True) for piece in at_position)
            landed = np.where(gathering.reduces[::-1, None], passes.landed_late, landed)
            issued_s = issued_s + of_first.ahead.sum(axis=0)
        begins = landed[::-1, own] - ended if rules.early else np.zeros_like(updates[_HOST])
        ready = each_updated(begins, updates[_HOST], priority=rules.priority)
        copies_from = self._copies_from()
        ready = idle_time(ready, [*busy, (copies_from, copies_from)])
        figures = self._figures[_WORK][:, own], down.down, down.down_never
        shared = SharedUp(issued_s, ready, (updates[_UPLOADS], updates[_STATES]), copies_from, figures[0].dtype)
        if gathering is None:
            return run_shared(figures, up.up, self.distances, start=start, shared=shared, home=self._home_now())
        return run_shared_gathering(
            figures,
            up.up,
            self._collectives_of(own),
            gathering.leads,
            self.distances,
            start=start,
            shared=shared,
            home=self._home_now(),
        )


def _tables_of_kinds(tables: Tables, distances: Sequence[int]) -> list[Seconds]:
    """By pass and number of settings, in the order of `Assignments`: work; lane by lane copies before blocks' work, by distance,
    and where there are several distances, 0 where there is such a copy, else NEVER; copies after it; likewise; and where there are
    collectives, what `Collectives` has."""
    apart, found = len(distances) > 1, []
    is_at = [tables.distance == far for far in distances] if apart else [np.ones(tables.distance.shape, dtype=bool)]

    def never(copied: Seconds) -> list[Seconds]:
        return [np.where(here & (copied > 0), 0.0, NEVER) for here in is_at]

    for i, (work, *copied) in enumerate(tables.lanes):
        kinds, sides = [work], iter(copied)
        for lane in COPY_LANES:
            if lane.before:
                up = next(sides)
                kinds += [*(np.where(here, up, 0.0) for here in is_at), *never(up) * apart]
            if lane.after:
                down = next(sides)
                kinds += [down, *never(down) * apart]
        if tables.gathering is not None:
            ahead, late, *others = tables.gathering.figures[i]
            kinds += [
                *(np.where(here, ahead, 0.0) for here in is_at),
                *never(ahead),
                late,
                *never(late) * apart,
                *others,
            ]
        found.append(np.stack(kinds).reshape(len(kinds), -1))
    return found
