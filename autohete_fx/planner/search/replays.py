"""Thousands of replays at once: in come arrays of settings, out come their seconds and bytes, as `simulate` finds them.

A *setting* is a decision of one block with its prefetch distance. `Replays.settings` lists those of every block, and an
assignment is a row of indices into these lists, one a block. Seconds follow the program of `simulate` exactly, lane by lane,
but without events (`arrays`); memory is a sum of `device_use.device_bytes`. Tests hold both to `simulate`, which stays the
judge of what is returned. Contention is an estimate here (`lengthening`).
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import BlockCost, BlockDecision, Overlap, Problem
from autohete_fx.planner.model.choices import MAX_PREFETCH_DISTANCE, choices, copies
from autohete_fx.planner.model.device_use import device_bytes
from autohete_fx.planner.model.figures import (
    Whole,
    disk_bytes,
    host_bytes,
    host_computed_s,
    limits_of,
    most_staging_s,
    overlap_of,
    sends_at_once,
    staging_s,
    whole_of,
)
from autohete_fx.planner.model.work import (
    BACKWARD_PASS,
    BY_DEVICE,
    COPY_LANES,
    FORWARD_PASS,
    SENT,
    PassKind,
    Work,
    added_up,
    copies_of_updated,
    durations,
    forward_passes,
    slots_of,
    updating_pass,
)
from autohete_fx.planner.search.arrays import Assignments, Rows, Rules, Tables
from autohete_fx.planner.search.gathering import GATHERING_KINDS, Gathering
from autohete_fx.planner.search.lengthening import Lengthening
from autohete_fx.planner.search.passes import NEVER, Seconds

_SIDE_BY_SIDE = 1024


class Replays:
    """One problem's settings and what each of them takes.

    Attributes:
        settings: of every block, each of the ``options`` (by default all choices) at each prefetch distance; the one that
            moves nothing comes first.
        use: device bytes by block, setting and span, padded with copies of the first setting.
        elsewhere: bytes on the host and on disk, by tier, block and setting.
        first: by block the number of its first setting, where numbers count through all blocks.
        copies_s: seconds of a step's copies and collectives by block and setting, all micro-batches included.
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
        self.first = np.arange(n) * width
        self.use = device_bytes(problem, np.repeat(range(n), width).tolist(), list(chain(*padded))).reshape(
            n, width, -1
        )
        self.distance = np.array([[s.prefetch_distance for s in settings] for settings in padded])
        tables = np.array(self._figures_of_all(allowed, width)).transpose(2, 0, 1)
        self._alone = tables[: len(Work)]
        self.copies_s, *elsewhere, self._staged_s, self._computed_s = tables[len(Work) :]
        self.elsewhere = np.stack(elsewhere).astype(np.int64)
        self._lengthen({})

    def beside(self, lengthening: Lengthening) -> "Replays":
        """Those with work that takes so much longer than alone."""
        found = copy.copy(self)
        found._lengthen(lengthening)
        return found

    def _lengthen(self, lengthening: Lengthening) -> None:
        factors = np.array([lengthening.get(work, 1.0) for work in Work])
        self._took = self._alone * factors[:, None, None]
        # An update whose states are on disk waits for that, however long it computes.
        alone, computed = self._alone[Work.HOST_UPDATE.index], self._computed_s * factors[Work.HOST_UPDATE.index]
        self._took[Work.HOST_UPDATE.index] = np.maximum(alone, np.where(alone > 0, computed, 0.0))
        self.tables = self._pass_tables()

    def takes(self, works: Iterable[Work]) -> Seconds:
        """Seconds of some work, all together, by block and setting."""
        return _added(self._took, works)

    def _pass_tables(self) -> Tables:
        """Of the passes of a step: what waits for updates; the last backward; forwards, where the first is not that."""
        problem, overlap = self.problem, overlap_of(self.problem)
        synchronous, at_once = overlap is Overlap.NONE, sends_at_once(problem)
        kinds, passes = [FORWARD_PASS], ()
        if problem.training:
            forwards = forward_passes(problem)
            kinds = [updating_pass(problem), BACKWARD_PASS, *(kind for kind, _ in forwards)]
            passes = (self.micro_batches, *(count for _, count in forwards))
        sides = [side for lane in COPY_LANES for side in lane.sides]
        lanes = np.stack(
            [[self.takes(kind.computes), *(self.takes(kind.of(side)) for side in sides)] for kind in kinds]
        )
        host_update = self.takes((Work.HOST_UPDATE,))
        waits = (host_update > 0) & (self.takes(copies_of_updated(problem)) > 0)
        gathering = self._gathering(lanes, kinds)
        return Tables(
            rules=Rules(
                training=problem.training,
                synchronous=synchronous,
                early=overlap is Overlap.BACKWARD,
                sends_at_once=at_once,
                priority=problem.schedule.priority,
                one_memory=problem.machine.device_type == "cpu",
                passes=passes,
                most_staging_s=most_staging_s(problem.machine),
            ),
            lanes=lanes,
            distance=self.distance * _is_copied(lanes, gathering),
            updates=np.stack(
                [
                    self.takes(BY_DEVICE),
                    host_update,
                    *(self.takes((work,)) * at_once for work in SENT),
                    np.where(waits, 0.0, NEVER),
                    self.takes((Work.AVERAGE,)),
                    *(self.takes((work,)) * (not synchronous) for work in (Work.STATES, Work.STATES_BACK)),
                    self._staged_s,
                    self.takes((Work.OVER_LINK,)),
                ]
            ),
            gathering=gathering,
        )

    def _gathering(self, lanes: Seconds, kinds: Sequence[PassKind]) -> Gathering | None:
        """The figures of passes with collectives, which go from ``lanes``; None where nothing is gathered or reduced."""
        problem, blocks = self.problem, range(self.num_blocks)
        if all(whole_of(problem, block) == Whole() for block in blocks):
            return None
        sides = [side for lane in COPY_LANES for side in lane.sides]
        found = np.zeros((len(kinds), GATHERING_KINDS, *lanes.shape[2:]))
        for kind, own, of_all in zip(kinds, found, lanes, strict=True):
            for block in blocks:
                s = slots_of(problem, block, kind)
                copied = [[work for work in (*s.up, *s.down) if work in side] for side in sides]
                parts = s.ahead, s.late, s.work_ahead, s.work_first, s.gather, s.reduce, s.work, *copied
                for figures, works in zip((*own, *of_all), parts, strict=True):
                    figures[block] = _added(self._took[:, block], works)
        leads = np.array([slots_of(problem, block, FORWARD_PASS).gathers for block in blocks])
        forwards = np.array([not kind.reverse for kind in kinds])
        others_wait = (lanes[forwards, 1] > 0).any(axis=(0, 2)) | found[:, 3].any(axis=(0, 2))
        return Gathering(
            figures=found,
            leads=leads,
            reduces=np.array([slots_of(problem, block, BACKWARD_PASS).reduces for block in blocks]),
            forwards=forwards if (others_wait & ~leads).any() else None,
        )

    def _figures_of_all(self, allowed: Sequence[Sequence[BlockDecision]], width: int) -> list[NDArray[np.float64]]:
        """By block. Layers that are alike but for workspaces, which take no time, have them in common."""
        known: dict[tuple[BlockCost, tuple[BlockDecision, ...]], NDArray[np.float64]] = {}
        found = []
        for block, (cost, options) in enumerate(zip(self.problem.costs, allowed, strict=True)):
            key = replace(cost, forward_workspace_bytes=0, backward_workspace_bytes=0), tuple(options)
            if key not in known:
                known[key] = self._figures(block, options, width)
            found.append(known[key])
        return found

    def _figures(self, block: int, options: Sequence[BlockDecision], width: int) -> NDArray[np.float64]:
        """What each setting takes, which its distance does not change: durations, all its copies, bytes on the host and on
        disk, seconds of its staging, and what its update on the host computes."""
        rows = []
        for option in options:
            took = durations(self.problem, block, option)
            elsewhere = host_bytes(self.problem, block, option), disk_bytes(self.problem, block, option)
            seconds = staging_s(self.problem, block, option), host_computed_s(self.problem, block, option)
            rows.append((*took.seconds, took.moving_s(self.micro_batches), *elsewhere, *seconds))
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
        for used, limit in zip((peak_bytes, *elsewhere), limits_of(self.problem), strict=True):
            if limit is not None:
                fitting &= used <= limit
        return fitting

    def seconds(self, rows: Rows) -> Seconds:
        """Seconds of a step under each row."""
        numbers, found = self.numbers(rows), np.empty(len(rows))
        for first in range(0, len(rows), _SIDE_BY_SIDE):
            part = np.ascontiguousarray(numbers[:, first : first + _SIDE_BY_SIDE])
            assignments = Assignments(self.tables, part.shape[1], self.tables.distances(part))
            assignments.fill(part)
            found[first : first + _SIDE_BY_SIDE] = assignments.step()
        return found

    def numbers(self, rows: Rows) -> Rows:
        """Settings by block and row, by numbers that count through all blocks."""
        return (rows + self.first).T

    def copied_seconds(self, rows: Rows) -> Seconds:
        """Seconds of copies and collectives in a step under each row, hidden ones included."""
        return self.copies_s[np.arange(self.num_blocks), rows].sum(axis=1)


def _added(took: Seconds, works: Iterable[Work]) -> Seconds:
    """The seconds of some work, where the first axis is all kinds of work."""
    found = np.zeros(took.shape[1:])
    for together in added_up(works):
        found += took[[work.index for work in together]].sum(axis=0)
    return found


def _is_copied(lanes: Seconds, gathering: Gathering | None) -> NDArray[np.bool_]:
    """Whether a setting of a block copies anything in any pass."""
    copied = [lanes[:, 1:], *([gathering.figures[:, :2]] if gathering is not None else [])]
    return np.asarray((np.concatenate(copied, axis=1) > 0).any(axis=(0, 1)))
