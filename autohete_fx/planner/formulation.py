"""The integer program: in comes a problem, out come decisions and a proven bound. OR-Tools' CP-SAT solves it.

Numbers are integers: bytes as they are, seconds in ticks of one 2**20th of the blocks' total work, rounded down. A
memory constraint is therefore exact, and a bound on the rounded times is a bound on the true ones.

Choice (`Program._add_choices`). For block b = 0..n-1 and each of its options k (`choices.choices` leaves out what is not
allowed, what is pinned, and what could gain nothing)

    x[b,k] in {0,1},   sum over k of x[b,k] = 1.

A quantity that depends on the option, written q[b], stands for the sum over k of q(b,k) x[b,k].

Memory (`Program._add_device_memory`, `Program._add_memory_elsewhere`). What block b holds on the device while another
block runs does not depend on other blocks' options. With m(b,k,s) from `choices.device_bytes` for every span s, and with
h(b,k) and o(b,k) what it holds on the host and on disk

    fixed_bytes + sum over b of m[b,s] <= device budget,   sum of h[b] <= host budget,   sum of o[b] <= size of the disk.

m is taken for prefetch distance 1, the smallest there is. The left side is the simulator's own figure at distance 1. From
one span to the next the m of only a few blocks change, so the device rows are written as a running sum, which keeps them
short:

    M[s] >= M[s-1] + sum over b of (m[b,s] - m[b,s-1]),  M[s] <= device budget,  with fixed_bytes for M[-1].

Time of one pass (`Program._add_pass`; the forward takes blocks in order, the backward in reverse order; i is the
position). w[i] is the work on compute, u[i] the copies up that it needs, d[i] the copies down that it makes, which cost
tensors * latency_s + bytes / bandwidth. E[i] is when compute is done with i, waits at its end included, U[i] when the up lane is
done with i, D[i] the down lane; E[-1] and before is when the pass begins. Copies are issued at most a blocks ahead.

    E[i] >= E[i-1] + w[i]            blocks run in order
    E[i] >= U[i] + w[i]              a block starts once it has what it needs
    U[i] >= U[i-1] + u[i]            the up lane works in order
    U[i] >= E[i-1-a] + u[i]          i's copies are issued at the start of i-a at the earliest
    D[i] >= D[i-1] + d[i]            the down lane works in order
    D[i] >= E[i-1] + w[i] + d[i],  D[i] >= U[i] + w[i] + d[i]      a copy down follows the work that makes it
    E[i] >= D[i-a],  E[n-1] >= D[n-1]                              the source is freed a blocks later at the latest

Time of the updates (`Program._add_updates`), from the end of the last backward on. V is when the device has done its own,
which is one sum; R[b] is when the update lane has done blocks 0..b, with h[b] its work, P[b] the sum of h[0..b], and g[b]
when it may begin: when the gradients are there, D of backward, or, where it waits for all of them, when backward ends (on
a CPU device V).

    V >= end of backward + sum over b of device update[b]
    R[b] >= R[b-1],   R[b] >= g[b] + P[b]                         the most urgent block first

The second is the last of 0..b to come and to find the lane busy with them from then on: later ones go first. Without
priority blocks are updated as gradients come: R[b] >= R[b+1] + h[b], R[b] >= g[b] + h[b].

A pass that waits for updates (`Program._add_pass` with R) begins at V: a forward, its w, u, d with those of the updates
added, or under a synchronous schedule a pass of these alone, at whose end R[n-1] has to be, too, and which a forward follows.

    U[i] >= R[i] + u[i]              what was updated on the host is copied afterwards (a = 1)

Objective (`Program.minimize_step`): micro_batches times a forward and a backward, where the first forward is the pass
that waits for updates or has that pass before it. For a = 1 the program decides, and adds COPY_WEIGHT times the seconds
of all copies; for the farthest distance it bounds, and does not.

For a = 1 the program is the simulator. At prefetch distance 1 copies are queued in the order in which blocks need them,
so for fixed x the simulated times are the least solution of the inequalities above: each time is the largest of the
right sides. Where a block has no copy, its U and D add no wait: U[i] is then the larger of U[i-1], for which i-1 waited
already, and E[i-2]; and D[i] the larger of D[i-1], for which the wait at the end of i comes first, and the end of work.
Where it is not updated on the host, R[i] is that of the last block before it that is, for whose copy i-1 waited already,
or no later than V. Lanes are idle where a pass begins that waits for no update, because each pass ends by waiting for
all copies it made, and used all copies that it fetched; so their times add up. Without priority R is not in that order:
then the program has the end of all updates only, and is a bound on the simulator.

For any a it is a lower bound on all plans with prefetch distances up to a. Take such a plan and a block i of a pass.
For every j <= i the copies that the blocks j..i need are issued after the work of block j-1-a, take one lane, and are
complete before i starts, in whatever order: i starts no sooner than E[j-1-a] + u[j] + ... + u[i], and the largest of these
is the least U[i]. Copies of what was updated on the host may be overtaken by others at larger distances, so for these

    E[i] >= Q[i] + w[i],   Q[i] >= R[i],   and where updates begin together Q[i] >= R[i] + v[i], Q[i] >= Q[i-1] + v[i]

with v[i] the seconds of such copies only: then blocks are updated in their order, and those updated after c are copied
after c is updated. All other rows hold in every replay. Memory at distance 1 is at most the memory at any distance, since
an earlier issue only lengthens the life of a buffer. So the plan's x is feasible here, at an objective no larger than its
simulated time.

Identical blocks are interchangeable in the sums of work but not in memory or in the chain of waits, so no order is
imposed on them. Their symmetry is met outside: `starts` tries patterns, of which there are few however many blocks there
are, and `relaxation` bounds what symmetry does not weaken.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from autohete_fx.ir import BlockDecision, Overlap, Problem
from autohete_fx.planner.choices import (
    BACKWARD_PASS,
    COPY_WEIGHT,
    FORWARD_AND_UPDATES_PASS,
    FORWARD_PASS,
    UPDATES_PASS,
    Durations,
    PassKind,
    choices,
    device_bytes,
    durations,
)
from autohete_fx.planner.figures import disk_bytes, host_bytes, overlap_of, updates_on_host

TICKS = 2**20
RELATIVE_GAP = 1e-3
DETERMINISTIC_PER_SECOND = 0.15
"""CP-SAT's deterministic seconds per wall-clock second, measured on these programs and rounded down."""
_LEAST_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the solver says.

    Attributes:
        decisions: the best that it found, at prefetch distance 1; None where it found none.
        bound: no solution has a smaller objective: seconds or bytes, as asked.
        exhausted: it ended by itself: ``decisions`` are best within the gap, or there are none at all.
    """

    decisions: tuple[BlockDecision, ...] | None
    bound: float
    exhausted: bool


Linear = Any  # sums of variables: cp_model's stubs do not type them


class Program:
    """One integer program over a problem with at least one block; build, set one objective, solve.

    ``segment`` is how many blocks are taken together: 1 to decide, more to bound many blocks quickly.
    """

    def __init__(self, problem: Problem, *, segment: int = 1) -> None:
        assert problem.costs and segment >= 1
        self.problem = problem
        self.num_blocks = len(problem.costs)
        self.model = cp_model.CpModel()
        total_s = sum(cost.forward_s + cost.backward_s + cost.recompute_s for cost in problem.costs)
        self.tick_s = (total_s or 1.0) / TICKS
        self.horizon = 2**50
        held = (c.saved_bytes + c.param_bytes + c.grad_bytes + c.optimizer_bytes for c in problem.costs)
        self.bytes_unit = sum(held) + problem.fixed_bytes or 1
        self.units: dict[int, int] = {}  # of the variables that are no choices, in which the relaxation counts
        self.options = [choices(problem, block) for block in range(self.num_blocks)]
        self.segments = [range(i, min(i + segment, self.num_blocks)) for i in range(0, self.num_blocks, segment)]
        self.ticks = [self._ticks_of(block) for block in range(self.num_blocks)]
        self.on_host = [np.array([updates_on_host(option) for option in options]) for options in self.options]
        self.overlap = overlap_of(problem)
        self.updates_begin_together = self.overlap is not Overlap.BACKWARD or problem.clips_gradients
        self.chosen: list[list[cp_model.IntVar]] = []
        self._add_choices()
        self._add_memory_elsewhere()

    def _add_choices(self) -> None:
        for block, options in enumerate(self.options):
            self.chosen.append([self.model.new_bool_var(f"x[{block},{k}]") for k in range(len(options))])
            self.model.add_exactly_one(self.chosen[block])

    def _ticks_of(self, block: int) -> dict[str, NDArray[np.int64]]:
        """By lane and pass, the ticks of every option of a block, rounded down."""
        took = [durations(self.problem, block, option) for option in self.options[block]]
        return {
            name: np.floor(np.array([getattr(each, name) for each in took]) / self.tick_s).astype(np.int64)
            for name in Durations.__dataclass_fields__
        }

    def _add_device_memory(self, limit: Linear) -> None:
        """Rows for the spans of the last block of each segment in each pass; all spans where blocks stand alone."""
        use = [np.array([device_bytes(self.problem, b, o) for o in options]) for b, options in enumerate(self.options)]
        num_passes = use[0].shape[1] // self.num_blocks
        spans = [k * self.num_blocks + segment[-1] for k in range(num_passes) for segment in self.segments]
        changes = [np.diff(table[:, spans], axis=1, prepend=0) for table in use]
        in_use: Linear = self.problem.fixed_bytes
        for place in range(len(spans)):
            in_use_before, in_use = in_use, self._number(f"M[{spans[place]}]", self.bytes_unit)
            self.model.add(in_use >= in_use_before + self._weighted([change[:, place] for change in changes]))
            self.model.add(in_use <= limit)

    def _bytes_of(self, used: Callable[[Problem, int, BlockDecision], int]) -> Linear:
        return self._weighted(
            [np.array([used(self.problem, b, option) for option in options]) for b, options in enumerate(self.options)]
        )

    def _weighted(self, by_block: Sequence[NDArray[np.int64]], blocks: Iterable[int] | None = None) -> Linear:
        """The sum over blocks of what the chosen option is worth; ``by_block`` in the order of ``blocks``, or all."""
        variables: list[cp_model.IntVar] = []
        weights: list[int] = []
        for block, values in zip(range(self.num_blocks) if blocks is None else blocks, by_block, strict=True):
            for option in np.flatnonzero(values):
                variables.append(self.chosen[block][option])
                weights.append(int(values[option]))
        return cp_model.LinearExpr.weighted_sum(variables, weights)

    def _sum(self, blocks: Iterable[int], names: tuple[str, ...], *, on_host: bool = False) -> Linear:
        """Ticks of some blocks; only of options that update on the host if asked."""
        listed = list(blocks)
        values = [sum(self.ticks[block][name] for name in names) for block in listed]
        if on_host:
            values = [ticks * self.on_host[block] for block, ticks in zip(listed, values, strict=True)]
        return self._weighted(values, listed)

    def _add_memory_elsewhere(self) -> None:
        if self.problem.host_budget_bytes is not None:
            self.model.add(self._bytes_of(host_bytes) <= self.problem.host_budget_bytes)
        if self.problem.allow_disk_optimizer:
            self.model.add(self._bytes_of(disk_bytes) <= self.problem.machine.disk_bytes)

    def _number(self, name: str, unit: int) -> cp_model.IntVar:
        variable = self.model.new_int_var(0, self.horizon, name)
        self.units[variable.index] = unit
        return variable

    def _time(self, name: str) -> cp_model.IntVar:
        return self._number(name, TICKS)

    def _add_pass(
        self, kind: PassKind, ahead: int, *, begin: Linear = 0, updated: Sequence[Linear] | None = None
    ) -> tuple[cp_model.IntVar, list[cp_model.IntVar]]:
        """Rows of one pass; returns when it ends, and when each segment has landed: its work and copies down are done.

        ``updated``: when the update lane has done each segment and those before it.
        """
        add = self.model.add
        segments = [segment[::-1] for segment in self.segments[::-1]] if kind.reverse else self.segments
        ends, ups, downs = ([self._time(f"{name}[{i}]") for i in range(len(segments))] for name in ("E", "U", "D"))
        copied: Linear = begin
        away = math.ceil(ahead / len(self.segments[0]))
        for i, blocks in enumerate(segments):
            w, u, d = (self._sum(blocks, names) for names in (kind.work, kind.up, kind.down))
            first, last = blocks[:1], blocks[-1:]
            first_w, last_w = self._sum(first, kind.work), self._sum(last, kind.work)
            before = ends[i - 1] if i else begin
            add(ends[i] >= before + w)
            add(ends[i] >= ups[i] + last_w)
            add(ups[i] >= (ups[i - 1] if i else begin) + u)
            if i - 1 - away >= 0:
                add(ups[i] >= ends[i - 1 - away] + u)
            add(downs[i] >= (downs[i - 1] if i else 0) + d)
            add(downs[i] >= before + first_w + d)
            add(downs[i] >= before + w + self._sum(last, kind.down))
            add(downs[i] >= ups[i] + last_w + self._sum(last, kind.down))
            if ahead == 1 and i:
                add(ends[i] >= downs[i - 1] + self._sum(blocks[:-1], kind.down))
            elif i - away >= 0:
                add(ends[i] >= downs[i - away])
            if updated is not None and ahead == 1:
                add(ups[i] >= updated[i] + self._sum(last, kind.up))
            elif updated is not None:
                copied = self._add_copies_of_updated(blocks, kind, updated[i], copied)
                add(ends[i] >= copied + last_w)
                if i and len(blocks) > 1:
                    add(ends[i] >= updated[i - 1] + w)
        add(ends[-1] >= downs[-1])
        return ends[-1], downs[::-1] if kind.reverse else downs

    def _add_copies_of_updated(
        self, blocks: Sequence[int], kind: PassKind, updated: Linear, previous: Linear
    ) -> cp_model.IntVar:
        """The chain Q, for distances above 1."""
        copied = self._time(f"Q[{blocks[-1]}]")
        self.model.add(copied >= updated)
        if self.updates_begin_together:
            self.model.add(copied >= updated + self._sum(blocks[-1:], kind.up, on_host=True))
            self.model.add(copied >= previous + self._sum(blocks, kind.up, on_host=True))
        return copied

    def _add_updates(
        self, backward_end: Linear, landed: Sequence[Linear]
    ) -> tuple[cp_model.IntVar, list[cp_model.IntVar]]:
        """Rows of the updates; returns V, and R by segment, which without priority is of no block before the last."""
        add, everything = self.model.add, range(self.num_blocks)
        device_end = self._time("V")
        add(device_end >= backward_end + self._sum(everything, ("device_update",)))
        start = device_end if self.problem.machine.device_type == "cpu" else backward_end
        updated = [self._time(f"R[{i}]") for i in range(len(self.segments))]
        if self.problem.schedule.priority:
            self._add_updates_by_priority(updated, start, landed)
        else:
            for i, blocks in reversed(list(enumerate(self.segments))):
                host = self._sum(blocks, ("host_update",))
                if self.updates_begin_together:
                    add(updated[i] >= start + host)
                else:
                    add(updated[i] >= landed[i] + self._sum(blocks[:1], ("host_update",)))
                if i + 1 < len(self.segments):
                    add(updated[i] >= updated[i + 1] + host)
        return device_end, updated

    def _add_updates_by_priority(self, updated: Sequence[Linear], start: Linear, landed: Sequence[Linear]) -> None:
        add, total = self.model.add, 0
        for i, blocks in enumerate(self.segments):
            before, total = total, self._time(f"P[{i}]")
            add(total >= before + self._sum(blocks, ("host_update",)))
            if i:
                add(updated[i] >= updated[i - 1])
            if self.updates_begin_together:
                add(updated[i] >= start + total)
                continue
            add(updated[i] >= landed[i] + before + self._sum(blocks[:1], ("host_update",)))
            if len(blocks) > 1 and i + 1 < len(landed):
                add(updated[i] >= landed[i + 1] + total)

    def _add_step(self, ahead: int) -> Linear:
        """Rows of a whole step; returns its ticks."""
        problem = self.problem
        overlaps = problem.training and self.overlap is not Overlap.NONE
        later = problem.micro_batches - (1 if overlaps else 0)
        forward = self._add_pass(FORWARD_PASS, ahead)[0] if later or not problem.training else 0
        if not problem.training:
            return forward
        backward, landed = self._add_pass(BACKWARD_PASS, ahead)
        device_end, updated = self._add_updates(backward, landed)
        ready = updated if problem.schedule.priority else None
        kind = FORWARD_AND_UPDATES_PASS if overlaps else UPDATES_PASS
        end = self._time("T")
        self.model.add(end >= self._add_pass(kind, ahead, begin=device_end, updated=ready)[0])
        # The last that the lane does: in its order without priority, block 0.
        self.model.add(end >= updated[-1 if problem.schedule.priority else 0])
        return later * forward + (problem.micro_batches - 1) * backward + end

    def minimize_step(self, *, ahead: int) -> None:
        """Ask for the least seconds of an optimizer step within the budgets; ``Answer.bound`` is in seconds.

        ``ahead`` is how many blocks ahead copies may be issued: 1 to decide, more to bound.
        """
        if self.problem.device_budget_bytes is not None:
            self._add_device_memory(self.problem.device_budget_bytes)
        step = self._add_step(ahead)
        # Of plans that are as fast, the one that copies least. A bound must not have this term.
        self.model.minimize(step + self._ticks_of_copies() if ahead == 1 else step)

    def _ticks_of_copies(self) -> Linear:
        passes = self.problem.micro_batches if self.problem.training else 1
        once = ("update_up", "update_down")
        often = ("forward_up", "forward_down", "backward_up", "backward_down")
        values = [
            COPY_WEIGHT * (passes * sum(ticks[name] for name in often) + sum(ticks[name] for name in once))
            for ticks in self.ticks
        ]
        return self._weighted([np.floor(each).astype(np.int64) for each in values])

    def minimize_peak(self) -> None:
        """Ask for the least device peak, whatever the device budget; ``Answer.bound`` is in bytes."""
        peak = self._number("peak", self.bytes_unit)
        self._add_device_memory(peak)
        self.model.minimize(peak)

    def minimize_host(self) -> None:
        """Ask for the least host memory within the device budget; ``Answer.bound`` is in bytes."""
        if self.problem.device_budget_bytes is not None:
            self._add_device_memory(self.problem.device_budget_bytes)
        self.model.minimize(self._bytes_of(host_bytes))

    def solve(
        self, *, limit_s: float, deadline: float, hint: Sequence[BlockDecision] | None = None, in_seconds: bool = False
    ) -> Answer:
        """Search for about ``limit_s`` seconds of a usual core, counted so that every run does the same.

        ``deadline``, a time of `time.monotonic`, ends it on a machine that is too slow for that.
        """
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 2
        solver.parameters.relative_gap_limit = RELATIVE_GAP if in_seconds else 0.0
        solver.parameters.max_deterministic_time = DETERMINISTIC_PER_SECOND * limit_s
        solver.parameters.max_time_in_seconds = max(_LEAST_S, deadline - time.monotonic())
        self.model.clear_hints()
        if hint is not None:
            for block, decision in enumerate(hint):
                wanted = self.options[block].index(replace(decision, prefetch_distance=1))
                for k, variable in enumerate(self.chosen[block]):
                    self.model.add_hint(variable, k == wanted)
        status = solver.solve(self.model)
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        decisions = None
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            decisions = tuple(
                next(option for option, variable in zip(*pair, strict=True) if solver.boolean_value(variable))
                for pair in zip(self.options, self.chosen, strict=True)
            )
        unit = self.tick_s if in_seconds else 1.0
        exhausted = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        bound = 0.0 if status == cp_model.INFEASIBLE else solver.best_objective_bound * unit
        return Answer(decisions=decisions, bound=bound, exhausted=exhausted)
