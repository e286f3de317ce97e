"""Passes with collectives, for many assignments side by side: `passes` where ranks share blocks, and what that adds to it.

Net is one more lane in order. A gather is issued a block ahead of its use and waited for there. A reduce follows its block's
work and is waited for a block later. Copies up that gathers read are *ahead*: needed a block before the others. Copies down of
what reduces make are *late*: issued a block after the others. All is by position, as in `passes`, so that a forward and a
backward run side by side. Work that is ahead in one of them may not be in the other, and takes no time there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autohete_fx.planner.search.passes import NEVER, Copies, Home, Passes, Seconds, SharedUp, rows_of

GATHERING_KINDS = 6


class Gathering(NamedTuple):
    """The figures of every setting of every block that only passes with collectives have.

    Attributes:
        figures: seconds by pass, kind, block and setting. Kinds: copies up ahead; copies down that are late; work before the
            block's gather; that before the next block's where it has none; gather; reduce.
        leads: by block, whether its forward gathers.
        reduces: by block, whether its gradients are reduced.
        forwards: by pass, whether it waits for what blocks copy up before it issues the next one's gather. None where no block
            that gathers nothing copies anything up.
    """

    figures: Seconds
    leads: NDArray[np.bool_]
    reduces: NDArray[np.bool_]
    forwards: NDArray[np.bool_] | None


class Collectives(NamedTuple):
    """The same of some assignments, by position and column; ``ahead`` also by distance.

    Attributes:
        ahead, ahead_never, late, late_never: as those of `Copies`, but ``ahead_never`` is looked at whatever the distances are.
        work_ahead, work_first, gather, reduce: see `Gathering`.
    """

    ahead: Seconds
    ahead_never: Seconds
    late: Seconds
    late_never: Seconds
    work_ahead: Seconds
    work_first: Seconds
    gather: Seconds
    reduce: Seconds


def issues_ahead(blocks: int, distances: Sequence[int]) -> list[list[tuple[bool, int, int]]]:
    """By position, what copies up may be issued there, in order: whether they are ahead, numbers of distances, and positions."""
    found: list[list[tuple[bool, int, int]]] = [[] for _ in range(blocks)]
    for at in range(blocks):
        for is_ahead in (True, False):
            for k, far in enumerate(distances):
                found[max(0, at - far - is_ahead)].append((is_ahead, k, at))
    return found


class GatheringPasses(Passes):
    """Passes side by side, some of whose blocks gather or reduce.

    Attributes:
        arrived_ahead: by position and column, when its copy up that is ahead is done.
        landed_late: by position and column, when its late copy down is done.
    """

    def __init__(
        self,
        work: Seconds,
        lanes: Sequence[Copies],
        distances: Sequence[int],
        collectives: Collectives,
        first: Seconds | None,
        leads: NDArray[np.bool_],
    ) -> None:
        """``leads``: as that of `Gathering`. ``first``: 0 in columns that wait for what a block copies up before they issue the
        next one's gather, else NEVER."""
        super().__init__(work, lanes, distances)
        self._leads = leads.tolist()
        self._collectives = Collectives(*map(rows_of, collectives))
        self._all_issues, self._first = issues_ahead(len(work), distances), first
        self.arrived_ahead, self.landed_late = np.empty_like(self.ends), np.empty_like(self.ends)
        self._ahead, self._late = list(self.arrived_ahead), list(self.landed_late)
        self._gathered, self._reduced = list(np.empty_like(self.ends)), list(np.empty_like(self.ends))
        self._queues = list(np.empty((3, work.shape[1]), work.dtype))

    def run(
        self,
        start: Seconds,
        until: Seconds | None = None,
        home: Home | None = None,
        until_ahead: Seconds | None = None,
    ) -> None:
        """Run them; ``until_ahead`` as ``until``, of copies up that are ahead."""
        waiting = (None, None) if until is None or until_ahead is None else (_each(until), _each(until_ahead))
        parts, own, last = self._collectives, self._arrived[0], len(self._ends) - 1
        up, down, net = self._queues
        self.arrived[0].fill(NEVER)
        self.arrived_ahead.fill(NEVER)
        for queue in self._queues:
            queue.fill(0.0)
        clock = start
        for i, end in enumerate(self._ends):
            self._issue_all(i, up, clock, waiting)
            np.copyto(end, clock)
            if self._first is not None:
                np.add(own[i], self._first, out=self._spare)
                np.maximum(end, self._spare, out=end)
                if home is not None and not self._leads[i]:
                    home.hold(i, end)
                np.add(end, parts.work_first[i], out=end)
            for at in range(i + (i > 0), min(last, i + 1) + 1):
                np.maximum(end, self._ahead[at], out=end)
                if home is not None and self._leads[at]:
                    home.hold(at, end)
                np.add(end, parts.work_ahead[at], out=end)
                np.maximum(net, end, out=net)
                np.add(net, parts.gather[at], out=net)
                np.copyto(self._gathered[at], net)
            np.maximum(end, own[i], out=end)
            np.maximum(end, self._gathered[i], out=end)
            np.add(end, self._work[i], out=end)
            np.maximum(net, end, out=net)
            np.add(net, parts.reduce[i], out=net)
            np.copyto(self._reduced[i], net)
            if i:
                self._end_reduce(i - 1, end, down)
            np.maximum(down, end, out=down)
            if home is not None:
                home.leave(i, down)
            np.add(down, self._lanes[1].down[i], out=down)
            np.copyto(self._landed[1][i], down)
            if i == last:
                self._end_reduce(i, end, down)
                np.maximum(end, down, out=end)
            else:
                self._await_due(i, end)
            clock = end

    def _issue_all(
        self,
        i: int,
        free: Seconds,
        clock: Seconds,
        waiting: tuple[list[list[Seconds]] | None, list[list[Seconds]] | None],
    ) -> None:
        """Copies up that are issued at a position; ``free`` is when their lane is."""
        lane, parts, apart, spare = self._lanes[0], self._collectives, len(self.distances) > 1, self._spare
        np.maximum(free, clock, out=free)
        for is_ahead, k, at in self._all_issues[i]:
            if (until := waiting[is_ahead]) is not None:
                ready = until[k][at]
                np.maximum(free[: len(ready)], ready, out=free[: len(ready)])
            np.add(free, (parts.ahead if is_ahead else lane.up)[k][at], out=free)
            here = (self._ahead if is_ahead else self._arrived[0])[at]
            if is_ahead or apart:
                np.add(free, (parts.ahead_never if is_ahead else lane.up_never)[k][at], out=spare)
                np.maximum(here, spare, out=here)
            else:
                np.copyto(here, free)

    def _end_reduce(self, at: int, end: Seconds, down: Seconds) -> None:
        """Wait for a reduce, and issue late copies down."""
        np.maximum(end, self._reduced[at], out=end)
        np.maximum(down, end, out=down)
        np.add(down, self._collectives.late[at], out=down)
        np.copyto(self._late[at], down)

    def _await_due(self, i: int, end: Seconds) -> None:
        """Wait for the copies down that are due at a position. Where there is one distance, those that are not late follow the late
        ones that are due with them."""
        apart = len(self.distances) > 1
        for k, far in enumerate(self.distances):
            if i >= far:
                landed = self._landed[1][i - far]
                if apart:
                    landed = np.add(landed, self._lanes[1].down_never[k][i - far], out=self._spare)
                np.maximum(end, landed, out=end)
            if apart and i > far:
                landed = np.add(self._late[i - 1 - far], self._collectives.late_never[k][i - 1 - far], out=self._spare)
                np.maximum(end, landed, out=end)


def _each(figures: Seconds) -> list[list[Seconds]]:
    return list(map(list, figures))


def run_shared_gathering(
    figures: tuple[Seconds, Seconds, Seconds],
    issued_s: Seconds,
    collectives: Collectives,
    leads: NDArray[np.bool_],
    distances: Sequence[int],
    *,
    start: Seconds,
    shared: SharedUp,
    home: Home | None = None,
) -> Seconds:
    """`passes.run_shared` of a forward with gathers; ``leads`` says of which blocks."""
    work, down, down_never = figures
    positions = len(work)
    net, clock = np.zeros_like(start), start
    ends, landed, gathered = np.empty_like(work), np.empty_like(work), np.empty_like(work)
    needed: list[list[int]] = [[] for _ in range(positions)]
    for at in range(positions):
        needed[max(0, at - bool(leads[at]))].append(at)
    issued = (issued_s > 0, collectives.ahead > 0)
    for i, coming in enumerate(issues_ahead(positions, distances)):
        for is_ahead, k, at in coming:
            shared.issue(at, clock, issued[is_ahead][k, at])
        end = ends[i]
        np.copyto(end, clock)
        for at in needed[i]:
            np.maximum(end, shared.copied(at), out=end)
            if home is not None:
                home.hold(at, end)
            end += collectives.work_ahead[at] + collectives.work_first[at]
            if leads[at]:
                np.maximum(net, end, out=net)
                net += collectives.gather[at]
                gathered[at] = net
        if leads[i]:
            np.maximum(end, gathered[i], out=end)
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
