"""Why a plan decides as it does: in come a problem and decisions that keep its budgets, out come `Reasons`.

Every other choice of every block is tried, at every prefetch distance, with all other blocks as they are. It is replayed and
ranked as the search ranks (`improve`), by its score: seconds, and a little for copies. The best that fits is recorded, and the
fastest of those that would be taken if they fitted. Where blocks times choices are very many, only choices that differ in one
of activations, parameters and optimizer are tried.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import (
    Alternative,
    BlockDecision,
    BlockReasons,
    Lane,
    LaneTime,
    Memory,
    MemoryUse,
    Problem,
    Reasons,
)
from autohete_fx.ir.reasons import NO_TIME
from autohete_fx.planner.model.choices import choices, params_of, states_of, treatment_of
from autohete_fx.planner.model.figures import limits_of
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.simulation import BACKWARD, FORWARD, OPTIMIZER_STEP, Simulation
from autohete_fx.planner.model.work import COPY_WEIGHT
from autohete_fx.planner.search.arrays import Rows
from autohete_fx.planner.search.improve import LEAST_GAIN
from autohete_fx.planner.search.lengthening import lengthening
from autohete_fx.planner.search.passes import Seconds
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.slots import way_of

_MORE_BYTES = 2**30
_MORE_SHARE = 8
"""More device memory is tried: this many bytes, or of a small budget this part."""
_MOST_CHOICES = 80_000
"""Where blocks times all their choices are more, fewer choices are tried."""


def reasons_of(problem: Problem, decisions: Sequence[BlockDecision]) -> Reasons:
    """Why these decisions. Prefetch distances are at most `choices.MAX_PREFETCH_DISTANCE`."""
    problem = way_of(problem, decisions)
    replayed = simulate(problem, decisions)
    waits_s, meanwhile = _waits(replayed)
    blocks, more_bytes, more_step_s = (), 0, replayed.step_s
    if decisions:
        changes = _Changes(problem, decisions, replayed.step_s)
        blocks = tuple(changes.reasons(block) for block in range(len(decisions)))
        if problem.device_budget_bytes is not None:
            more_bytes = min(_MORE_BYTES, problem.device_budget_bytes // _MORE_SHARE)
            more_step_s = min(replayed.step_s, changes.step_with_more(more_bytes))
    elsewhere = [(Memory.HOST, replayed.host_bytes, problem.host_budget_bytes)]
    if replayed.disk_bytes:
        elsewhere.append((Memory.DISK, replayed.disk_bytes, problem.machine.disk_bytes))
    device = MemoryUse(
        memory=Memory.DEVICE,
        used_bytes=replayed.peak_bytes,
        limit_bytes=problem.device_budget_bytes,
        block=replayed.peak_block if decisions else None,
        phase=replayed.peak_phase if decisions else "",
    )
    return Reasons(
        blocks=blocks,
        memory=(device, *(MemoryUse(memory=m, used_bytes=used, limit_bytes=limit) for m, used, limit in elsewhere)),
        waits_s=waits_s,
        meanwhile=meanwhile,
        more_bytes=more_bytes,
        more_step_s=more_step_s,
    )


class _Changes:
    """All changes of one block's choice in one assignment: by change, its block, its setting and what the step then takes."""

    def __init__(self, problem: Problem, decisions: Sequence[BlockDecision], step_s: float) -> None:
        """``step_s``: of the decisions, by the simulator."""
        self.problem = problem
        self.replays = replays = Replays(problem, _options(problem, decisions)).beside(
            lengthening(problem, [decisions])
        )
        self.row = replays.row(decisions)
        chosen = [_choice(settings[i]) for settings, i in zip(replays.settings, self.row, strict=True)]
        others = [
            (block, i)
            for block, settings in enumerate(replays.settings)
            for i, setting in enumerate(settings)
            if _choice(setting) != chosen[block]
        ]
        self.blocks, self.to = np.array(others, dtype=np.int64).reshape(-1, 2).T
        rows = np.repeat(self.row[None], len(others), axis=0)
        rows[np.arange(len(others)), self.blocks] = self.to
        self.beside_s = self._beside_s(step_s)
        self.step_s = replays.seconds(rows) + self.beside_s
        self.copied_s = replays.copied_seconds(rows)
        self.scores = self.step_s + COPY_WEIGHT * self.copied_s
        self.own_copied_s = float(replays.copied_seconds(self.row[None])[0])
        self.own_score = float(self._score(self.row[None])[0]) + self.beside_s
        self.use = replays.device_use(self.row)
        self.elsewhere = replays.use_elsewhere(self.row)
        peaks = np.array([(self.use + of - of[i]).max(axis=1) for of, i in zip(replays.use, self.row, strict=True)])
        self.peaks = peaks[self.blocks, self.to]
        self.used_elsewhere = self.elsewhere[:, None] + self._elsewhere_change(np.arange(len(others)))
        self.fitting = replays.fit(self.peaks, self.used_elsewhere)
        # Of what differs by rounding only, the first choice comes first.
        self.best_first = np.argsort(np.round(self.scores / (LEAST_GAIN * self.own_score)), kind="stable")
        self.fastest_first = np.lexsort((self._lacking(), np.round(self.step_s / (NO_TIME * self.own_score))))

    def _beside_s(self, step_s: float) -> float:
        """By how much replays of arrays estimate contention too low or too high: taken for the same after all changes."""
        return step_s - float(self.replays.seconds(self.row[None])[0]) if self.problem.machine.contention else 0.0

    def reasons(self, block: int) -> BlockReasons:
        """The reasons of one block."""
        settings = self.replays.settings[block]
        here = self.blocks == block
        barred = here & ~self.fitting & self._is_better()
        return BlockReasons(
            num_others=len({_choice(settings[i]) for i in self.to[here]}),
            next_best=self._first(self.best_first, here & self.fitting),
            barred=self._first(self.fastest_first, barred),
        )

    def _first(self, order: Rows, among: NDArray[np.bool_]) -> Alternative | None:
        found = order[among[order]]
        return self._alternative(int(found[0])) if len(found) else None

    def step_with_more(self, more_bytes: int) -> float:
        """Seconds that a step takes at most with so much more device memory.

        Changes that are better are made one after the other while they fit, those first that gain most for what they lack.
        """
        assert self.problem.device_budget_bytes is not None
        budget = self.problem.device_budget_bytes + more_bytes
        roomy = replace(self.problem, device_budget_bytes=budget)
        better = np.flatnonzero(self._is_better() & (self.peaks <= budget))
        gains = self.own_score - self.scores[better]
        lacking = np.maximum(self.peaks[better] - self.problem.device_budget_bytes, 1)
        found = [self.row]
        for ranks in (gains / lacking, gains):
            row, use, elsewhere, changed = self.row, self.use, self.elsewhere, set()
            for change in better[np.argsort(-ranks, kind="stable")]:
                block = int(self.blocks[change])
                if block in changed:
                    continue
                then = use + self._device_change(change), elsewhere + self._elsewhere_change(change)
                if not _fit(roomy, *then):
                    continue
                row = row.copy()
                row[block] = self.to[change]
                use, elsewhere = then
                changed.add(block)
                found.append(row)
        rows = np.array(found)
        return float(self.replays.seconds(rows)[np.argmin(self._score(rows))]) + self.beside_s

    def _alternative(self, change: int) -> Alternative:
        block, to = self.blocks[change], self.to[change]
        use, elsewhere = self.use + self._device_change(change), self.elsewhere + self._elsewhere_change(change)
        moments = (_peak_moment(self.problem, use), (None, ""), (None, ""))
        used = zip(Memory, (use.max(), *elsewhere), limits_of(self.problem), moments, strict=True)
        uses = [
            MemoryUse(memory=memory, used_bytes=int(num_bytes), limit_bytes=limit, block=block, phase=phase)
            for memory, num_bytes, limit, (block, phase) in used
        ]
        return Alternative(
            decision=self.replays.settings[block][to],
            step_s=float(self.step_s[change]),
            more_copies_s=float(self.copied_s[change]) - self.own_copied_s,
            exceeded=tuple(use for use in uses if use.lacking_bytes),
        )

    def _is_better(self) -> NDArray[np.bool_]:
        return self.scores < self.own_score * (1 - LEAST_GAIN)

    def _lacking(self) -> NDArray[np.int64]:
        """Bytes above the limits, over all of them, after each change."""
        lacking = np.zeros_like(self.peaks)
        for used, limit in zip((self.peaks, *self.used_elsewhere), limits_of(self.problem), strict=True):
            lacking += np.maximum(used - limit, 0) if limit is not None else 0
        return lacking

    def _score(self, rows: Rows) -> Seconds:
        return self.replays.seconds(rows) + COPY_WEIGHT * self.replays.copied_seconds(rows)

    def _device_change(self, change: int) -> NDArray[np.int64]:
        block = self.blocks[change]
        return self.replays.use[block, self.to[change]] - self.replays.use[block, self.row[block]]

    def _elsewhere_change(self, change: int | Rows) -> NDArray[np.int64]:
        block, table = self.blocks[change], self.replays.elsewhere
        return table[:, block, self.to[change]] - table[:, block, self.row[block]]


def _options(problem: Problem, decisions: Sequence[BlockDecision]) -> list[list[BlockDecision]]:
    """Of every block its own choice and the others that are tried."""
    every = [
        list(dict.fromkeys((*choices(problem, block), replace(own, prefetch_distance=1))))
        for block, own in enumerate(decisions)
    ]
    if sum(map(len, every)) * len(every) <= _MOST_CHOICES:
        return every
    return [
        [o for o in of_block if sum(one != other for one, other in zip(_choice(o), _choice(own), strict=True)) < 2]
        for of_block, own in zip(every, decisions, strict=True)
    ]


def _choice(decision: BlockDecision) -> tuple[tuple[object, ...], ...]:
    """What is decided of activations, parameters and optimizer, whatever the prefetch distance."""
    return treatment_of(decision), params_of(decision), states_of(decision)


def _fit(problem: Problem, use: NDArray[np.int64], elsewhere: NDArray[np.int64]) -> bool:
    used = zip((use.max(), *elsewhere), limits_of(problem), strict=True)
    return all(limit is None or num_bytes <= limit for num_bytes, limit in used)


def _peak_moment(problem: Problem, use: NDArray[np.int64]) -> tuple[int, str]:
    """The block and the phase in which the spans of `device_use.device_bytes` are first as full as they get."""
    phases, count = [FORWARD], len(problem.costs)
    in_order = np.arange(len(use))
    if problem.training:
        phases += [BACKWARD, FORWARD, OPTIMIZER_STEP] if problem.micro_batches > 1 else [BACKWARD, OPTIMIZER_STEP]
        in_order[count : 2 * count] = np.arange(count, 2 * count)[::-1]
    turn, block = divmod(int(in_order[np.argmax(use[in_order])]), count)
    return block, phases[turn]


def _waits(replayed: Simulation) -> tuple[float, tuple[LaneTime, ...]]:
    """How long the compute lane waits, and what each other lane works meanwhile."""
    working = sorted((e.start_s, e.end_s) for e in replayed.events if e.lane is Lane.COMPUTE)
    times, waited = [0.0], [0.0]
    for start, end in [*working, (replayed.step_s, replayed.step_s)]:
        waited += [waited[-1] + max(0.0, start - times[-1])] * 2
        times += [max(start, times[-1]), max(end, times[-1])]
    meanwhile = dict.fromkeys((lane for lane in Lane if lane is not Lane.COMPUTE), 0.0)
    for event in replayed.events:
        if event.lane is not Lane.COMPUTE:
            begin, end = np.interp((event.start_s, event.end_s), times, waited)
            meanwhile[event.lane] += float(end - begin)
    return waited[-1], tuple(LaneTime(lane=lane, busy_s=busy_s) for lane, busy_s in meanwhile.items() if busy_s > 0)
