"""The integer program: in comes a problem, out come decisions and a proven bound. OR-Tools' CP-SAT solves it.

Numbers are integers: bytes as they are, seconds in ticks of one 2**20th of the blocks' total work, rounded down. A
memory constraint is therefore exact, and a bound on the rounded times is a bound on the true ones.

Choice (`Program._add_choices`). For block b = 0..n-1 and each of its options k (activations keep, recompute or offload;
parameters device or host; optimizer device or host; `choices.choices` leaves out what is not allowed, what is pinned,
and what could gain nothing)

    x[b,k] in {0,1},   sum over k of x[b,k] = 1.

A quantity that depends on the option, written q[b], stands for the sum over k of q(b,k) x[b,k].

Memory (`Program._add_device_memory`, `Program._add_host_memory`). What block b holds on the device while another block
runs does not depend on other blocks' options. With m(b,k,s) from `choices.device_bytes`, for every span s (the forward
and, in training, the backward of every block; the optimizer step holds no more than the backward of block 0, which holds
all gradients too) and with h(b,k) from `simulate.host_bytes`

    fixed_bytes + sum over b of m[b,s] <= device budget,        sum over b of h[b] <= host budget.

m is taken for prefetch distance 1, the smallest there is, and for the last micro-batch, whose gradients come on top of
the accumulated ones. The left side is the simulator's own figure at distance 1. From one span to the next the m of only a
few blocks change, so the device rows are written as a running sum, which keeps them short:

    M[s] >= M[s-1] + sum over b of (m[b,s] - m[b,s-1]),  M[s] <= device budget,  with fixed_bytes for M[-1].

Time of one pass (`Program._add_pass`; the forward takes blocks in order, the backward in reverse order; i is the
position). w[i] is the work on compute, u[i] the copies up that it needs (parameters, in backward also the reload), d[i]
the copy down that it makes (offloaded activations, in backward gradients); a copy costs latency_s + bytes / bandwidth.
E[i] is when compute is done with i, waits at its end included, U[i] when the up lane is done with i, D[i] the down lane.
The program is built for copies that are issued at most a blocks ahead.

    E[i] >= E[i-1] + w[i]            blocks run in order
    E[i] >= U[i] + w[i]              a block starts once it has what it needs
    U[i] >= U[i-1] + u[i]            the up lane works in order
    U[i] >= E[i-1-a] + u[i]          i's copies are issued at the start of i-a at the earliest
    D[i] >= D[i-1] + d[i]            the down lane works in order
    D[i] >= E[i-1] + w[i] + d[i],  D[i] >= U[i] + w[i] + d[i]      a copy down follows the work that makes it
    E[i] >= D[i-1],  E[n-1] >= D[n-1]                              the source is freed one block later

Time of the optimizer step (`Program._add_optimizer_step`), over trained blocks in order: V the device's updates (one
sum), H[b] the update lane, L[b] the uploads, T the whole.

    T >= V;   H[b] >= H[b-1] + host update[b]   (on a CPU device H starts at V: the same cores);   T >= H[b]
    L[b] >= H[b] + upload[b],  L[b] >= L[b-1] + upload[b],  T >= L[b]

On a CPU device w and the host updates include what the block's copies take from the cores (`choices.durations`).

Objective (`Program.minimize_step`): micro_batches (E[n-1] of forward + E[n-1] of backward) + T. For a = 1 the program
decides, and adds COPY_WEIGHT times the seconds of all copies; for the farthest distance it bounds, and does not.

For a = 1 the program is the simulator. At prefetch distance 1 copies are queued in the order in which blocks need them,
so for fixed x the simulated times are the least solution of the inequalities above: each time is the largest of the
right sides. Where a block has no copy, its U and D add no wait: U[i] is then the larger of U[i-1], for which i-1 waited
already, and E[i-2]; and D[i] the larger of D[i-1], for which the wait at the end of i comes first, and the end of work.
Forward, backward and optimizer step each begin with idle lanes, because each ends by waiting for all copies it made,
and used all copies that it fetched; so their times add up.

For any a it is a lower bound on all plans with prefetch distances up to a. Take such a plan and a block i of a pass.
For every j <= i the copies that the blocks j..i need are issued after the work of block j-1-a, take one lane, and are
complete before i starts, in whatever order: i starts no sooner than E[j-1-a] + u[j] + ... + u[i] (E = 0 before the pass),
and the largest of these is the least U[i]. All other rows hold in every replay. Memory at distance 1 is at most the
memory at any distance, since an earlier issue only lengthens the life of a buffer. So the plan's x is feasible here, at
an objective no larger than its simulated time.

Identical blocks are interchangeable in the sums of work but not in memory or in the chain of waits, so no order is
imposed on them. Their symmetry is met outside: `starts` tries patterns, of which there are few however many blocks there
are, and `relaxation` bounds what symmetry does not weaken.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.planner.choices import COPY_WEIGHT, Durations, choices, device_bytes, durations
from autohete_fx.planner.simulate import host_bytes

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
Work = Callable[[Durations], float]


class Program:
    """One integer program over a problem with at least one block; build, set one objective, solve."""

    def __init__(self, problem: Problem) -> None:
        assert problem.costs
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
        self.durations = [
            [durations(problem, block, option) for option in options] for block, options in enumerate(self.options)
        ]
        self.chosen: list[list[cp_model.IntVar]] = []
        self._add_choices()
        self._add_host_memory()

    def _add_choices(self) -> None:
        for block, options in enumerate(self.options):
            self.chosen.append([self.model.new_bool_var(f"x[{block},{k}]") for k in range(len(options))])
            self.model.add_exactly_one(self.chosen[block])

    def _add_device_memory(self, limit: Linear) -> None:
        changes: dict[int, list[Linear]] = {}
        for block, options in enumerate(self.options):
            for option, variable in zip(options, self.chosen[block], strict=True):
                change = np.diff(device_bytes(self.problem, block, option), prepend=0)
                for span in np.flatnonzero(change):
                    changes.setdefault(int(span), []).append(int(change[span]) * variable)
        in_use: Linear = self.problem.fixed_bytes
        for span in range(self.num_blocks * (2 if self.problem.training else 1)):
            in_use_before, in_use = in_use, self._number(f"M[{span}]", self.bytes_unit)
            self.model.add(in_use >= in_use_before + sum(changes.get(span, [])))
            self.model.add(in_use <= limit)

    def _host_bytes(self) -> Linear:
        return sum(
            host_bytes(self.problem, block, option) * variable
            for block in range(self.num_blocks)
            for option, variable in zip(self.options[block], self.chosen[block], strict=True)
        )

    def _add_host_memory(self) -> None:
        if self.problem.host_budget_bytes is not None:
            self.model.add(self._host_bytes() <= self.problem.host_budget_bytes)

    def _number(self, name: str, unit: int) -> cp_model.IntVar:
        variable = self.model.new_int_var(0, self.horizon, name)
        self.units[variable.index] = unit
        return variable

    def _time(self, name: str) -> cp_model.IntVar:
        return self._number(name, TICKS)

    def _ticks(self, block: int, work: Work) -> Linear:
        """A block's seconds under its chosen option, in whole ticks."""
        seconds = [work(each) for each in self.durations[block]]
        return sum(
            math.floor(s / self.tick_s) * variable for s, variable in zip(seconds, self.chosen[block], strict=True) if s
        )

    def _add_pass(self, order: Sequence[int], work: Work, up: Work, down: Work, ahead: int) -> cp_model.IntVar:
        """Rows of one forward or backward; returns when it ends."""
        add = self.model.add
        ends, ups, downs = ([self._time(f"{name}[{i}]") for i in range(len(order))] for name in ("E", "U", "D"))
        for i, block in enumerate(order):
            w, u, d = self._ticks(block, work), self._ticks(block, up), self._ticks(block, down)
            previous_end = ends[i - 1] if i else 0
            add(ends[i] >= previous_end + w)
            add(ends[i] >= ups[i] + w)
            add(ups[i] >= (ups[i - 1] if i else 0) + u)
            if i > ahead:
                add(ups[i] >= ends[i - 1 - ahead] + u)
            add(downs[i] >= (downs[i - 1] if i else 0) + d)
            add(downs[i] >= previous_end + w + d)
            add(downs[i] >= ups[i] + w + d)
            if i:
                add(ends[i] >= downs[i - 1])
        add(ends[-1] >= downs[-1])
        return ends[-1]

    def _add_forward(self, ahead: int) -> cp_model.IntVar:
        return self._add_pass(
            range(self.num_blocks),
            lambda each: each.forward_work,
            lambda each: each.forward_up,
            lambda each: each.forward_down,
            ahead,
        )

    def _add_backward(self, ahead: int) -> cp_model.IntVar:
        return self._add_pass(
            range(self.num_blocks - 1, -1, -1),
            lambda each: each.backward_work,
            lambda each: each.backward_up,
            lambda each: each.backward_down,
            ahead,
        )

    def _add_optimizer_step(self) -> cp_model.IntVar:
        problem, add = self.problem, self.model.add
        trained = [block for block in range(self.num_blocks) if problem.costs[block].num_params]
        end, device_end = self._time("T"), self._time("V")
        add(device_end >= sum(self._ticks(block, lambda each: each.device_update) for block in trained))
        add(end >= device_end)
        updated = device_end if problem.machine.device_type == "cpu" else 0
        uploaded = 0
        for block in trained:
            previous_updated, previous_uploaded = updated, uploaded
            updated, uploaded = self._time(f"H[{block}]"), self._time(f"L[{block}]")
            upload = self._ticks(block, lambda each: each.upload)
            add(updated >= previous_updated + self._ticks(block, lambda each: each.host_update))
            add(uploaded >= updated + upload)
            add(uploaded >= previous_uploaded + upload)
        add(end >= uploaded)
        return end

    def minimize_step(self, *, ahead: int) -> None:
        """Ask for the least seconds of an optimizer step within the budgets; ``Answer.bound`` is in seconds.

        ``ahead`` is how many blocks ahead copies may be issued: 1 to decide, more to bound.
        """
        if self.problem.device_budget_bytes is not None:
            self._add_device_memory(self.problem.device_budget_bytes)
        step = self._add_forward(ahead)
        if self.problem.training:
            step = (step + self._add_backward(ahead)) * self.problem.micro_batches + self._add_optimizer_step()
        # Of plans that are as fast, the one that copies least. A bound must not have this term.
        self.model.minimize(step + self._ticks_of_copies() if ahead == 1 else step)

    def _ticks_of_copies(self) -> Linear:
        passes = self.problem.micro_batches if self.problem.training else 1
        return sum(
            self._ticks(block, lambda each: COPY_WEIGHT * each.copies(passes)) for block in range(self.num_blocks)
        )

    def minimize_peak(self) -> None:
        """Ask for the least device peak, whatever the device budget; ``Answer.bound`` is in bytes."""
        peak = self._number("peak", self.bytes_unit)
        self._add_device_memory(peak)
        self.model.minimize(peak)

    def minimize_host(self) -> None:
        """Ask for the least host memory within the device budget; ``Answer.bound`` is in bytes."""
        if self.problem.device_budget_bytes is not None:
            self._add_device_memory(self.problem.device_budget_bytes)
        self.model.minimize(self._host_bytes())

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
