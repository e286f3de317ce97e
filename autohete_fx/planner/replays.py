"""Thousands of replays at once: in come arrays of settings, out come their seconds and bytes, as `simulate` finds them.

A *setting* is a decision of one block with its prefetch distance; `Replays.settings` lists those of every block, and an
assignment is a row of indices into these lists, one a block. Seconds follow the program of `simulate` exactly, lane by
lane, but for all rows together and without events; memory is a sum of `choices.device_bytes`. Tests hold both to
`simulate`, which stays the judge of what is returned.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import BlockDecision, Overlap, Problem
from autohete_fx.planner.choices import DURATIONS, MAX_PREFETCH_DISTANCE, choices, copies, device_bytes, durations
from autohete_fx.planner.figures import disk_bytes, host_bytes, overlap_of, updates_on_host

Rows = NDArray[np.int64]
Seconds = NDArray[np.float64]

_CHUNK = 4096
"""Rows that are replayed together: as many as stay in a cache."""


class Replays:
    """One problem's settings and what each of them takes.

    Attributes:
        settings: of every block, each of the ``options`` (by default all choices) at each prefetch distance; the one that
            moves nothing comes first.
        use: device bytes by block, setting and span, padded with copies of the first setting.
        elsewhere: bytes on the host and on disk, by tier, block and setting.
        copies_s: seconds of a step's copies by block and setting, all micro-batches included.
    """

    def __init__(self, problem: Problem, options: Sequence[Sequence[BlockDecision]] | None = None) -> None:
        self.problem = problem
        self.num_blocks = n = len(problem.costs)
        self.micro_batches = problem.micro_batches if problem.training else 1
        self.farthest = max(1, min(MAX_PREFETCH_DISTANCE, n - 1))
        allowed = options or [choices(problem, block) for block in range(n)]
        at_distances = {option: self._settings(option) for option in set().union(*allowed)}
        self.settings = [[s for option in of_block for s in at_distances[option]] for of_block in allowed]
        self.index = [{setting: i for i, setting in enumerate(settings)} for settings in self.settings]
        width = max(len(settings) for settings in self.settings)
        padded = [[*settings, *[settings[0]] * (width - len(settings))] for settings in self.settings]
        self.use = np.array([[device_bytes(problem, b, s) for s in settings] for b, settings in enumerate(padded)])
        self.distance = np.array([[s.prefetch_distance for s in settings] for settings in padded])
        tables = np.array([self._figures(b, of_block, width) for b, of_block in enumerate(allowed)]).transpose(2, 0, 1)
        self.forward, self.backward, self.update = tables[:3], tables[3:6], tables[6:9]
        self.device_update, self.host_update, self.copies_s = tables[9:12]
        self.elsewhere = tables[12:14].astype(np.int64)
        self.on_host = tables[14] > 0

    def _figures(self, block: int, options: Sequence[BlockDecision], width: int) -> NDArray[np.float64]:
        """What each setting takes, which its distance does not change: durations, all its copies, bytes on the host and on
        disk, and whether it updates on the host."""
        rows = []
        for option in options:
            took = durations(self.problem, block, option)
            elsewhere = host_bytes(self.problem, block, option), disk_bytes(self.problem, block, option)
            rows.append((*DURATIONS(took), took.copies(self.micro_batches), *elsewhere, updates_on_host(option)))
        figures = np.repeat(rows, [len(self._distances(option)) for option in options], axis=0)
        return np.concatenate([figures, np.repeat(figures[:1], width - len(figures), axis=0)])

    def _settings(self, option: BlockDecision) -> list[BlockDecision]:
        return [replace(option, prefetch_distance=distance) for distance in self._distances(option)]

    def _distances(self, option: BlockDecision) -> range:
        return range(1, self.farthest + 1 if copies(option) else 2)

    def row(self, decisions: Sequence[BlockDecision]) -> Rows:
        """Indices of decisions; a distance that means nothing is left out, one that is too far is shortened."""
        farthest = [self.farthest if copies(decision) else 1 for decision in decisions]
        return np.array(
            [
                self.index[b][replace(d, prefetch_distance=min(d.prefetch_distance, far))]
                for b, (d, far) in enumerate(zip(decisions, farthest, strict=True))
            ]
        )

    def decisions(self, row: Rows) -> tuple[BlockDecision, ...]:
        """The decisions that a row of indices stands for."""
        return tuple(self.settings[block][index] for block, index in enumerate(row))

    def device_use(self, row: Rows) -> NDArray[np.int64]:
        """Device bytes in every span under one row."""
        return self.use[np.arange(self.num_blocks), row].sum(axis=0) + self.problem.fixed_bytes

    def use_elsewhere(self, rows: Rows) -> NDArray[np.int64]:
        """Host and disk bytes under each row."""
        return self.elsewhere[:, np.arange(self.num_blocks), rows].sum(axis=-1)

    def fit(self, peak_bytes: NDArray[np.int64], elsewhere: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these keep all budgets."""
        fitting = np.ones(len(peak_bytes), dtype=bool)
        limits = (self.problem.device_budget_bytes, self.problem.host_budget_bytes, self.problem.machine.disk_bytes)
        for used, limit in zip((peak_bytes, *elsewhere), limits, strict=True):
            if limit is not None:
                fitting &= used <= limit
        return fitting

    def seconds(self, rows: Rows) -> Seconds:
        """Seconds of a step under each row."""
        chunks = [self._seconds(rows[start : start + _CHUNK]) for start in range(0, len(rows), _CHUNK)]
        return np.concatenate(chunks) if chunks else np.zeros(0)

    def copied_seconds(self, rows: Rows) -> Seconds:
        """Seconds of copies in a step under each row, hidden ones included."""
        return self.copies_s[np.arange(self.num_blocks), rows].sum(axis=1)

    def _seconds(self, rows: Rows) -> Seconds:
        blocks = np.arange(self.num_blocks)
        problem, distance = self.problem, self.distance[blocks, rows].T

        def table(tables: Seconds) -> Seconds:
            return np.ascontiguousarray(tables[:, blocks, rows].transpose(0, 2, 1))

        forward = table(self.forward)
        if not problem.training:
            return _Pass(forward, distance).run().end
        last = _Pass(table(self.backward)[:, ::-1], distance[::-1]).run()
        landed = last.landed[::-1]
        device_end = last.end + self.device_update[blocks, rows].sum(axis=1)
        overlap = overlap_of(problem)
        early = overlap is Overlap.BACKWARD and not problem.clips_gradients
        stepped = device_end if problem.machine.device_type == "cpu" else last.end
        updated = _updated(
            landed if early else np.broadcast_to(stepped, landed.shape),
            self.host_update[blocks, rows].T,
            priority=problem.schedule.priority,
        )
        on_host = self.on_host[blocks, rows].T & (self.host_update[blocks, rows].T > 0)
        ready = np.where(on_host, updated, 0.0)
        updates = table(self.update)
        if overlap is Overlap.NONE:
            alone = _Pass(updates, distance, start=device_end, ready=ready).run().end
            return (
                np.maximum(alone, ready.max(axis=0))
                + self.micro_batches * self._plain(forward, distance)
                + (self.micro_batches - 1) * last.end
            )
        joint = _Pass(forward + updates, distance, start=device_end, ready=ready).run().end
        later = self.micro_batches - 1
        return joint + (later * (self._plain(forward, distance) + last.end) if later else 0.0)

    @staticmethod
    def _plain(forward: Seconds, distance: NDArray[np.int64]) -> Seconds:
        return _Pass(forward, distance).run().end


class _Pass:
    """One pass over all blocks, for many rows: work, copies up and copies down by position and row.

    Attributes:
        end: when all is done, by row.
        landed: when each position's work and copy down are done, by position and row.
    """

    def __init__(
        self,
        lanes: Seconds,
        distance: NDArray[np.int64],
        *,
        start: Seconds | float = 0.0,
        ready: Seconds | None = None,
    ) -> None:
        self.work, self.up, self.down = lanes
        self.positions, self.rows = self.work.shape
        at = np.arange(self.positions)[:, None]
        self.issued, self.awaited = np.maximum(0, at - distance), np.minimum(self.positions - 1, at + distance)
        self.farthest = int(distance.max())
        self.start, self.ready = start, ready
        self.landed = np.zeros((self.positions, self.rows))
        self.end = np.zeros(self.rows)

    def run(self) -> "_Pass":
        up, down = self.up, self.down
        copies, sends = up.max(axis=1) > 0, down.max(axis=1) > 0
        clock = np.zeros(self.rows) + self.start
        up_free, down_free = np.zeros((2, self.rows))
        arrived_at, left_at = np.zeros((2, self.positions, self.rows))
        for i in range(self.positions):
            for j in range(i, min(self.positions, i + self.farthest + 1)):
                if not copies[j]:
                    continue
                due = (self.issued[j] == i) & (up[j] > 0)
                begin = np.maximum(up_free, clock)
                if self.ready is not None:
                    begin = np.maximum(begin, self.ready[j])
                up_free = np.where(due, begin + up[j], up_free)
                arrived_at[j] = np.where(due, up_free, arrived_at[j])
            clock = np.maximum(clock, arrived_at[i]) + self.work[i]
            self.landed[i] = clock
            if sends[i]:
                left_at[i] = np.where(down[i] > 0, np.maximum(down_free, clock) + down[i], 0.0)
                down_free = np.maximum(down_free, left_at[i])
                self.landed[i] = np.maximum(clock, left_at[i])
            for j in range(max(0, i - self.farthest), i + 1):
                if sends[j]:
                    clock = np.maximum(clock, np.where(self.awaited[j] == i, left_at[j], 0.0))
        self.end = clock
        return self


def _updated(ready: Seconds, host_s: Seconds, *, priority: bool) -> Seconds:
    """When the update lane is done with each block and all that the next forward needs before it, by block and row.

    By priority, blocks 0..b are done when the last of them to come, of those whose successors keep the lane busy from
    then on, has had its turn: the largest over c <= b of when c comes plus the updates of 0..c, since these come later and
    go first. Else in the order in which they come, the last block first.
    """
    if priority:
        return np.maximum.accumulate(ready + np.cumsum(host_s, axis=0), axis=0)
    updated, free = np.zeros_like(host_s), np.zeros(host_s.shape[1])
    for block in reversed(range(len(host_s))):
        free = np.where(host_s[block] > 0, np.maximum(free, ready[block]) + host_s[block], free)
        updated[block] = free
    return updated
