"""Passes over all blocks for many assignments side by side: in come figures of what blocks do, out comes when passes are done.

Every number is an array over *columns*. An assignment has one in each pass, and passes that do not depend on each other run
side by side, as more columns. How often NumPy is asked counts as much as for how many columns, so nothing is compared or masked
on the way. Work that an assignment does not do takes no time, or is there at ``NEVER``. Blocks are by *position*, in the order
of their pass.

Copies are told apart by prefetch distance, of which a search allows few (`Tables.distances`); where it allows one, they need
not be. A lane is a table here, `Copies`: a new one is one more in the list that `run` gets.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.floating[Any]]
NEVER = -np.inf
"""When that is there which nobody waits for."""


class Copies(NamedTuple):
    """Copies of a lane: before blocks need them, and after their work. Either may be empty, on a lane that copies no such thing.

    Attributes:
        up: seconds by distance, position and column; 0 at all distances but a block's own.
        up_never: likewise, 0 where there is a copy, else NEVER; not looked at where there is one distance.
        down: seconds by position and column.
        down_never: as ``up_never``, of these.
    """

    up: Seconds
    up_never: Seconds
    down: Seconds
    down_never: Seconds


def issues(blocks: int, distances: Sequence[int]) -> list[list[tuple[int, int]]]:
    """By position, what copies up may be issued there, in order: numbers of distances, and the positions that need them."""
    at_first = [(k, i) for i in range(min(blocks, max(distances) + 1)) for k, far in enumerate(distances) if far >= i]
    later = [[(k, i + far) for k, far in enumerate(distances) if i + far < blocks] for i in range(1, blocks)]
    return [at_first, *later]


class Passes:
    """Passes side by side, which may run again whenever their figures have changed. Looking up a row takes as long as a row of
    additions, so all are looked up before.

    Attributes:
        ends: by position and column, after `run`, when compute is done with a block and with what it waits for at its end.
        arrived: by lane, when its copy up is done. Where it has none: NEVER with several distances, with one when it would have
            begun. Empty on a lane without.
        landed: by lane, when its work and its copy down are done. Empty on a lane without.
    """

    def __init__(self, work: Seconds, lanes: Sequence[Copies], distances: Sequence[int]) -> None:
        """``work``: seconds on compute by position and column. ``distances``: the prefetch distances of blocks, ascending."""
        self.distances, self.issues = distances, issues(len(work), distances)
        self.ends = np.empty(work.shape, work.dtype)
        self.arrived = [np.empty_like(self.ends if len(lane.up) else self.ends[:0]) for lane in lanes]
        self.landed = [np.empty_like(self.ends if len(lane.down) else self.ends[:0]) for lane in lanes]
        self._work, self._lanes = list(work), [Copies(*map(rows_of, lane)) for lane in lanes]
        self._ends, self._arrived, self._landed = list(self.ends), *map(rows_of, (self.arrived, self.landed))
        self._busy, self._spare = list(np.empty((len(lanes), work.shape[1]), work.dtype)), np.empty_like(self.ends[0])

    def run(self, start: Seconds, until: Seconds | None = None, home: "Home | None" = None) -> None:
        """Run them.

        Args:
            start: when each column's pass begins.
            until: by distance, position and column, before when copies up of the first lane do not begin: of first columns only.
            home: streamed states on their way, of all columns; None where there are none.
        """
        waiting = () if until is None else (list(map(list, until)),)
        apart = len(self.distances) > 1
        for arrived in self.arrived if apart else ():
            arrived.fill(NEVER)
        free, clock = [np.zeros_like(start) for _ in self._lanes], start
        for i, end in enumerate(self._ends):
            before = clock
            for number, here in enumerate(self._arrived):
                if not here:
                    continue
                free[number] = self._issue(i, number, free[number], clock, waiting if not number else ())
                before = np.maximum(before, here[i], out=end)
            if home is not None:
                home.hold(i, before)
            np.add(before, self._work[i], out=end)
            for number, (lane, there) in enumerate(zip(self._lanes, self._landed, strict=True)):
                if not there:
                    continue
                free[number] = np.maximum(free[number], end, out=there[i])
                if home is not None:
                    home.leave(i, there[i])
                np.add(there[i], lane.down[i], out=there[i])
                self._await(i, lane, there, end)
            clock = end

    def _issue(
        self, i: int, number: int, free: Seconds, clock: Seconds, waiting: tuple[list[list[Seconds]], ...]
    ) -> Seconds:
        """Copies up that are issued at a position; returns when their lane is free again."""
        lane, here, spare = self._lanes[number], self._arrived[number], self._spare
        apart, busy = len(self.distances) > 1, self._busy[number]
        free = np.maximum(free, clock, out=busy)
        for k, at in self.issues[i]:
            for until in waiting:
                ready = until[k][at]
                np.maximum(free[: len(ready)], ready, out=free[: len(ready)])
            if apart:
                np.add(free, lane.up[k][at], out=busy)
                np.add(free, lane.up_never[k][at], out=spare)
                np.maximum(here[at], spare, out=here[at])
            else:
                np.add(free, lane.up[k][at], out=busy)
                np.copyto(here[at], busy)
        return free

    def _await(self, i: int, lane: Copies, there: list[Seconds], end: Seconds) -> None:
        """Wait for the copies down that are due at a position. A lane works in order: of several it is the last that counts."""
        if i == len(there) - 1:
            np.maximum(end, there[i], out=end)
            return
        for k, far in enumerate(self.distances):
            if i < far:
                break
            landed = there[i - far]
            if len(self.distances) > 1:
                landed = np.add(landed, lane.down_never[k][i - far], out=self._spare)
            np.maximum(end, landed, out=end)


class Home:
    """Streamed states on their way home, which the first pass waits for. Its columns come first; the others wait for nothing."""

    def __init__(self, positions: int, count: int, dtype: np.dtype[Any]) -> None:
        """``count``: columns of the first pass."""
        self._count = count
        self._all = tuple(np.empty((positions, count), dtype) for _ in range(2))
        self._blocks, self._down = map(list, self._all)

    def update(self, up: Seconds, took: Seconds, down: Seconds, slot_s: Seconds, begin: Seconds) -> "Home | None":
        """Returns itself, or None where no states are on their way.

        Args:
            up: seconds that states take on their way up, by position and column of the first pass. They go one after another.
            took: likewise home. The last slot of a block's leaves when all are up.
            down: those that other copies down take; these begin when all states are home.
            slot_s: by column, those of a slot of states.
            begin: by column, when the first begin.
        """
        if not took.any():
            return None
        blocks, leaves = self._all
        np.add.accumulate(took, axis=0, out=blocks)
        late = np.add.accumulate(up, axis=0) + np.minimum(took, slot_s) - blocks
        blocks += np.maximum(np.maximum.accumulate(late, axis=0), 0.0) + begin
        leaves[:] = np.where(down > 0, blocks[-1], NEVER)
        return self

    def hold(self, i: int, begin: Seconds) -> None:
        """Put off, in place, when a block begins until its states are home."""
        begin = begin[: self._count]
        np.maximum(begin, self._blocks[i], out=begin)

    def leave(self, i: int, begin: Seconds) -> None:
        """Put off, in place, when other copies down of a block begin."""
        begin = begin[: self._count]
        np.maximum(begin, self._down[i], out=begin)


def rows_of(figures: Any) -> Any:
    """An array, or several, as lists of rows."""
    if figures is None or (isinstance(figures, np.ndarray) and figures.ndim == 1):
        return figures
    return [rows_of(each) for each in figures]


def run_shared(
    figures: tuple[Seconds, Seconds, Seconds],
    issued_s: Seconds,
    distances: Sequence[int],
    *,
    start: Seconds,
    shared: "SharedUp",
    home: Home | None = None,
) -> Seconds:
    """Run a forward whose copies up share their lane with those of updates, the lower block always first; returns when blocks are
    done.

    Args:
        figures: seconds of work and of copies down by block and column, and by distance 0 where there is a copy down, else NEVER.
        issued_s: by distance, block and column what the forward itself copies up.
        distances: the prefetch distances of blocks, ascending.
        start: when it begins.
        shared: the copies up.
        home: streamed states on their way; None where there are none.
    """
    work, down, down_never = figures
    positions = len(work)
    ends, landed, clock = np.empty_like(work), np.empty_like(work), start
    is_issued = issued_s > 0
    for i, issued in enumerate(issues(positions, distances)):
        for k, at in issued:
            shared.issue(at, clock, is_issued[k, at])
        end = np.maximum(clock, shared.copied(i), out=ends[i])
        if home is not None:
            home.hold(i, end)
        end += work[i]
        np.maximum(end, landed[i - 1] if i else 0.0, out=landed[i])
        if home is not None:
            home.leave(i, landed[i])
        landed[i] += down[i]
        for k, far in enumerate(distances if i < positions - 1 else (0,)):
            if i >= far:
                due = landed[i - far]
                np.maximum(end, due + down_never[k, i - far] if far and len(distances) > 1 else due, out=end)
        clock = end
    return ends


class SharedUp:
    """When copies up are done that share their lane with those of updates, the lower block always first, block after block.

    Blocks 0..b have all they need when some of their copies are done. They are the first to come of those that keep the lane
    busy from then on, and all after it. That is the largest over copies k of when k comes plus the seconds of those that do not
    come before.
    """

    def __init__(
        self,
        issued_s: Seconds,
        ready: Seconds,
        updates_s: tuple[Seconds, Seconds],
        begin: Seconds,
        dtype: np.dtype[Any],
    ) -> None:
        """
        Args:
            issued_s: by block and column what the forward itself copies up.
            ready: by block and column when an update on the host is done, NEVER for none. Time counts when the lane is idle but
                for what it is given here.
            updates_s: what updates copy up: uploads, which come when they are ready, and streamed states, which come first of all
                that comes after backward.
            begin: by column, when they do, and nothing else comes before.
            dtype: of all times.
        """
        uploads_s, self._states_s = updates_s
        self._copies_s = uploads_s + issued_s
        shape = ready.shape
        self._comes = np.where(self._copies_s > 0, ready, NEVER).astype(dtype)
        self._through, self._spare = np.empty(shape, dtype), np.empty(shape, dtype)
        self._later = np.empty(shape, dtype=bool)
        self._since, self._all_states_s, self._all_s = np.zeros((3, shape[1]), dtype)
        self._begin = begin.astype(dtype)
        self._streams = bool(self._states_s.any())

    def issue(self, at: int, clock: Seconds, is_issued: NDArray[np.bool_]) -> None:
        """Let copies of a block come now in some columns, if they did not come later."""
        np.maximum(self._comes[at], clock, out=self._comes[at], where=is_issued)

    def copied(self, i: int) -> Seconds:
        """When blocks 0..i have all they need; asked once, block after block."""
        comes, copies_s, through, later, spare = self._comes, self._copies_s, self._through, self._later, self._spare
        states_s = self._states_s
        self._all_states_s += states_s[i]
        self._since += np.where(comes[i] >= self._begin, copies_s[i], 0.0)
        np.less_equal(comes[:i], comes[i], out=later[:i])
        np.multiply(later[:i], copies_s[i], out=spare[:i])
        np.add(through[:i], spare[:i], out=through[:i])
        np.multiply(later[:i], copies_s[:i], out=spare[:i])
        np.add(comes[i], copies_s[i], out=through[i])
        through[i] += self._all_s - spare[:i].sum(axis=0)
        self._all_s += copies_s[i]
        if self._streams:
            np.less_equal(comes[: i + 1], self._begin, out=later[: i + 1])
            np.multiply(later[:i], states_s[i], out=spare[:i])
            np.add(through[:i], spare[:i], out=through[:i])
            through[i] += later[i] * self._all_states_s
        return np.maximum(through[: i + 1].max(axis=0), self._begin + self._all_states_s + self._since)
