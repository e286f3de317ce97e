"""Thousands of replays at once: in come arrays of settings, out come their seconds and bytes, as `simulate` finds them.

A *setting* is a decision of one block with its prefetch distance; `Replays.settings` lists those of every block, and an
assignment is a row of indices into these lists, one a block. Seconds follow the program of `simulate` exactly, lane by
lane, but for all rows together and without events; memory is a sum of `choices.device_bytes`. Tests hold both to
`simulate`, which stays the judge of what is returned.
"""

from collections.abc import Sequence
from dataclasses import astuple, replace

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.planner.choices import MAX_PREFETCH_DISTANCE, choices, device_bytes, durations, fetches_ahead
from autohete_fx.planner.simulate import host_bytes

Rows = NDArray[np.int64]
Seconds = NDArray[np.float64]

_CHUNK = 4096
"""Rows that are replayed together: as many as stay in a cache."""


class Replays:
    """One problem's settings and what each of them takes.

    Attributes:
        settings: of every block, each decision at each prefetch distance; the one that moves nothing comes first.
        use: device bytes by block, setting and span, padded with copies of the first setting.
        host: host bytes by block and setting.
        copies_s: seconds of a step's copies by block and setting, all micro-batches included.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_blocks = n = len(problem.costs)
        self.micro_batches = problem.micro_batches if problem.training else 1
        self.farthest = max(1, min(MAX_PREFETCH_DISTANCE, n - 1))
        self.settings = [self._settings(block) for block in range(n)]
        self.index = [{setting: i for i, setting in enumerate(settings)} for settings in self.settings]
        width = max(len(settings) for settings in self.settings)
        padded = [[*settings, *[settings[0]] * (width - len(settings))] for settings in self.settings]
        self.use = np.array([[device_bytes(problem, b, s) for s in settings] for b, settings in enumerate(padded)])
        self.host = np.array([[host_bytes(problem, b, s) for s in settings] for b, settings in enumerate(padded)])
        self.distance = np.array([[s.prefetch_distance for s in settings] for settings in padded])
        each = [[durations(problem, b, s) for s in settings] for b, settings in enumerate(padded)]
        tables = np.array([[astuple(d) for d in row] for row in each]).transpose(2, 0, 1)
        self.forward, self.backward, self.optimizer = tables[:3], tables[3:6], tables[6:]
        self.copies_s = np.array([[d.copies(self.micro_batches) for d in row] for row in each])

    def _settings(self, block: int) -> list[BlockDecision]:
        options = choices(self.problem, block)
        distances = range(1, self.farthest + 1)
        return [replace(o, prefetch_distance=d) for o in options for d in (distances if fetches_ahead(o) else (1,))]

    def row(self, decisions: Sequence[BlockDecision]) -> Rows:
        """Indices of decisions; a distance that means nothing is left out, one that is too far is shortened."""
        return np.array(
            [
                self.index[b][
                    replace(d, prefetch_distance=min(d.prefetch_distance, self.farthest) if fetches_ahead(d) else 1)
                ]
                for b, d in enumerate(decisions)
            ]
        )

    def decisions(self, row: Rows) -> tuple[BlockDecision, ...]:
        """The decisions that a row of indices stands for."""
        return tuple(self.settings[block][index] for block, index in enumerate(row))

    def device_use(self, row: Rows) -> NDArray[np.int64]:
        """Device bytes in every span under one row."""
        return self.use[np.arange(self.num_blocks), row].sum(axis=0) + self.problem.fixed_bytes

    def host_use(self, rows: Rows) -> NDArray[np.int64]:
        """Host bytes under each row."""
        return self.host[np.arange(self.num_blocks), rows].sum(axis=-1)

    def fit(self, peak_bytes: NDArray[np.int64], host_use: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these keep both budgets."""
        device, host = self.problem.device_budget_bytes, self.problem.host_budget_bytes
        fitting = np.ones(len(peak_bytes), dtype=bool)
        if device is not None:
            fitting &= peak_bytes <= device
        if host is not None:
            fitting &= host_use <= host
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
        distance = self.distance[blocks, rows].T
        forward = np.ascontiguousarray(self.forward[:, blocks, rows].transpose(0, 2, 1))
        step_s = self.micro_batches * _pass_s(forward, distance)
        if self.problem.training:
            backward = np.ascontiguousarray(self.backward[:, blocks, rows].transpose(0, 2, 1)[:, ::-1])
            step_s += self.micro_batches * _pass_s(backward, distance[::-1])
            optimizer = self.optimizer[:, blocks, rows].transpose(0, 2, 1)
            step_s += _optimizer_s(optimizer, same_cores=self.problem.machine.device_type == "cpu")
        return step_s


def _pass_s(lanes: Seconds, distance: NDArray[np.int64]) -> Seconds:
    """Seconds of one forward or backward; ``lanes`` are work, copies up and copies down, by position and by row."""
    work, up, down = lanes
    positions, rows = work.shape
    issued = np.maximum(0, np.arange(positions)[:, None] - distance)
    farthest = int(distance.max())
    copies, sends = up.max(axis=1) > 0, down.max(axis=1) > 0
    clock, up_free, down_free, left_at = np.zeros((4, rows))
    arrived_at = np.zeros((positions, rows))
    for i in range(positions):
        for j in range(i, min(positions, i + farthest + 1)):
            if not copies[j]:
                continue
            due = (issued[j] == i) & (up[j] > 0)
            up_free = np.where(due, np.maximum(up_free, clock) + up[j], up_free)
            arrived_at[j] = np.where(due, up_free, arrived_at[j])
        clock = np.maximum(clock, arrived_at[i]) + work[i]
        left_before, left_at = left_at, np.zeros(rows)
        if sends[i]:
            left_at = np.where(down[i] > 0, np.maximum(down_free, clock) + down[i], 0.0)
            down_free = np.maximum(down_free, left_at)
        clock = np.maximum(clock, left_before)
    return np.maximum(clock, left_at)


def _optimizer_s(updates: Seconds, *, same_cores: bool) -> Seconds:
    """Seconds of the optimizer step; ``updates`` are those on the device, those on the host and uploads, by block and row."""
    on_device, on_host, upload = updates
    device_end = on_device.sum(axis=0)
    updated = device_end.copy() if same_cores else np.zeros_like(device_end)
    uploaded = np.zeros_like(device_end)
    for host_s, upload_s in zip(on_host, upload, strict=True):
        updated += host_s
        uploaded = np.where(upload_s > 0, np.maximum(uploaded, updated) + upload_s, uploaded)
    return np.maximum(np.maximum(device_end, updated), uploaded)
