"""The integer program: in comes a problem, out come decisions and a proven bound. OR-Tools' CP-SAT solves it.

Numbers are integers: bytes as they are, seconds in ticks of one 2**20th of the blocks' total work, rounded down. A
memory constraint is therefore exact, and a bound on the rounded times is a bound on the true ones.

Choice (`Program._add_choices`). For block b = 0..n-1 and each of its options k (activations keep, recompute or offload;
parameters device or host; optimizer device or host; `choices` leaves out what is not allowed, what is pinned, and what
could gain nothing)

    x[b,k] in {0,1},   sum over k of x[b,k] = 1.

A quantity that depends on the option, written q[b], stands for the sum over k of q(b,k) x[b,k].

Memory (`Program._add_device_memory`, `Program._add_host_memory`). What block b holds on the device while another block
runs does not depend on other blocks' options. With m(b,k,s) from `device_bytes`, for every span s (the forward and, in
training, the backward of every block; the optimizer step holds no more than the backward of block 0, which holds all
gradients too) and with h(b,k) from `simulate.host_bytes`

    fixed_bytes + sum over b of m[b,s] <= device budget,        sum over b of h[b] <= host budget.

m is taken for prefetch distance 1, the smallest there is, and for the last micro-batch, whose gradients come on top of
the accumulated ones. The left side is the simulator's own figure at distance 1.

Time of one pass (`Program._add_pass`; the forward takes blocks in order, the backward in reverse order; i is the
position). w[i] is the work on compute, u[i] the copies up that it needs (parameters, in backward also the reload), d[i]
the copy down that it makes (offloaded activations, in backward gradients); a copy costs latency_s + bytes / bandwidth.
E[i] is when compute is done with i, waits at its end included, U[i] when the up lane is done with i, D[i] the down lane.

    E[i] >= E[i-1] + w[i]            blocks run in order
    E[i] >= U[i] + w[i]              a block starts once it has what it needs
    U[i] >= U[i-1] + u[i]            the up lane works in order
    U[i] >= E[i-2] + u[i]            one-ahead program only: i's copies are issued at the start of i-1
    D[i] >= D[i-1] + d[i]            the down lane works in order
    D[i] >= E[i-1] + w[i] + d[i],  D[i] >= U[i] + w[i] + d[i]      a copy down follows the work that makes it
    E[i] >= D[i-1],  E[n-1] >= D[n-1]                              the source is freed one block later

Time of the optimizer step (`Program._add_optimizer_step`), over trained blocks in order: V the device's updates (one
sum), H[b] the update lane, L[b] the uploads, T the whole.

    T >= V;   H[b] >= H[b-1] + host update[b]   (on a CPU device H starts at V: the same cores);   T >= H[b]
    L[b] >= H[b] + upload[b],  L[b] >= L[b-1] + upload[b],  T >= L[b]

Objective (`Program.minimize_step`): micro_batches (E[n-1] of forward + E[n-1] of backward) + T; the program that decides
adds COPY_WEIGHT times the seconds of all copies, the program that bounds does not.

The one-ahead program is the simulator. At prefetch distance 1 copies are queued in the order in which blocks need them,
so for fixed x the simulated times are the least solution of the inequalities above: each time is the largest of the
right sides. Where a block has no copy, its U and D add no wait: U[i] is then the larger of U[i-1], for which i-1 waited
already, and E[i-2]; and D[i] the larger of D[i-1], for which the wait at the end of i comes first, and the end of work.
Forward, backward and optimizer step each begin with idle lanes, because each ends by waiting for all copies it made,
and used all copies that it fetched; so their times add up.

The free program is a lower bound for every prefetch distance. It leaves out the one-ahead row. In a plan with any
distances, let a pass start at 0. All copies that block i or an earlier one needs take one lane and are complete before i
starts, whatever their order, so i starts no sooner than the sum of their times: the least U[i]. All other rows hold
in every replay. Memory at distance 1 is at most the memory at any distance, since an earlier issue only lengthens the
life of a buffer. So the plan's x is feasible here, at an objective no larger than its simulated time.

Identical consecutive blocks are interchangeable in the lane sums but not in memory or in the chain of waits, so no
order is imposed on them; the incumbent that is given as a hint, and the limits, keep the search short.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ortools.sat.python import cp_model

from autohete_fx.ir import Activations, BlockDecision, Optimizer, Params, Problem
from autohete_fx.planner.simulate import device_update_s, host_bytes

TICKS = 2**20
RELATIVE_GAP = 1e-3
COPY_WEIGHT = 0.25
"""What a second of copying counts against a second of the step, where both are equal otherwise."""
DETERMINISTIC_PER_SECOND = 0.15
"""CP-SAT's deterministic seconds per wall-clock second, measured on these programs and rounded down."""
WALL_CLOCK_SLACK = 4.0
"""The wall clock ends a search only where a machine is this much slower; until then the same input gives the same plan."""


def choices(problem: Problem, block: int) -> tuple[BlockDecision, ...]:
    """Every decision that a block may get, at prefetch distance 1; the one that moves nothing comes first."""
    cost = problem.costs[block]
    activations, params, optimizer = [Activations.KEEP], [Params.DEVICE], [Optimizer.DEVICE]
    if problem.training and problem.allow_recompute and cost.boundary_bytes < cost.saved_bytes:
        activations.append(Activations.RECOMPUTE)
    if problem.training and problem.allow_offload_activations and cost.offloadable_bytes:
        activations.append(Activations.OFFLOAD)
    if problem.allow_host_params and cost.param_bytes:
        params.append(Params.HOST)
    if problem.training and problem.allow_host_optimizer and cost.optimizer_bytes + cost.grad_bytes:
        optimizer.append(Optimizer.HOST)
    pinned = problem.fixed_decisions[block] if problem.fixed_decisions else None
    if pinned is not None:
        params, optimizer = [pinned.params], [pinned.optimizer]
    return tuple(
        BlockDecision(activations=a, params=p, optimizer=o) for a in activations for p in params for o in optimizer
    )


def device_bytes(problem: Problem, block: int, decision: BlockDecision) -> list[int]:
    """What a block holds on the device in every span: the forwards of blocks 0..n-1, then their backwards 0..n-1.

    In the last micro-batch, at the decision's own prefetch distance. Without training there are forwards only.
    """
    cost, n = problem.costs[block], len(problem.costs)
    first, last = max(0, block - decision.prefetch_distance), min(n - 1, block + decision.prefetch_distance)
    fetched = cost.param_bytes if decision.params is Params.HOST else 0
    always = cost.param_bytes - fetched + (cost.optimizer_bytes if decision.optimizer is Optimizer.DEVICE else 0)
    if not problem.training:
        reader = max((edge.consumer for edge in problem.edges if edge.producer == block), default=n)
        return [
            always
            + (fetched if first <= at <= block else 0)
            + (cost.saved_bytes + cost.forward_workspace_bytes if at == block else 0)
            + (cost.boundary_bytes if block < at <= reader else 0)
            for at in range(n)
        ]
    held = leaving = arriving = cost.saved_bytes
    if decision.activations is Activations.RECOMPUTE:
        held = leaving = arriving = cost.boundary_bytes
    elif decision.activations is Activations.OFFLOAD:
        held -= cost.offloadable_bytes
    staying = cost.grad_bytes if decision.optimizer is Optimizer.DEVICE else 0
    sent = cost.grad_bytes - staying
    always += staying if problem.micro_batches > 1 else 0
    forward = [
        always
        + (fetched if first <= at <= block else 0)
        + (cost.saved_bytes + cost.forward_workspace_bytes if at == block else 0)
        + (leaving if at == block + 1 else held if at > block else 0)
        for at in range(n)
    ]
    backward = [
        always
        + (fetched if block <= at <= last else 0)
        + (cost.saved_bytes + cost.backward_workspace_bytes if at == block else 0)
        + (arriving if block < at <= last else held if at > block else 0)
        + (staying if at <= block else 0)
        + (sent if block - 1 <= at <= block else 0)
        for at in range(n)
    ]
    return forward + backward


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
Work = Callable[[int, BlockDecision], float]


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
        self.options = [choices(problem, block) for block in range(self.num_blocks)]
        self.chosen: list[list[cp_model.IntVar]] = []
        self._add_choices()
        self._add_host_memory()

    def _add_choices(self) -> None:
        for block, options in enumerate(self.options):
            self.chosen.append([self.model.new_bool_var(f"x[{block},{k}]") for k in range(len(options))])
            self.model.add_exactly_one(self.chosen[block])

    def _add_device_memory(self, limit: Linear) -> None:
        held = [
            [device_bytes(self.problem, block, option) for option in options]
            for block, options in enumerate(self.options)
        ]
        for span in range(len(held[0][0])):
            in_use = [
                of_option[span] * variable
                for of_block, variables in zip(held, self.chosen, strict=True)
                for of_option, variable in zip(of_block, variables, strict=True)
            ]
            self.model.add(sum(in_use) + self.problem.fixed_bytes <= limit)

    def _host_bytes(self) -> Linear:
        return sum(
            host_bytes(self.problem, block, option) * variable
            for block in range(self.num_blocks)
            for option, variable in zip(self.options[block], self.chosen[block], strict=True)
        )

    def _add_host_memory(self) -> None:
        if self.problem.host_budget_bytes is not None:
            self.model.add(self._host_bytes() <= self.problem.host_budget_bytes)

    def _time(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self.horizon, name)

    def _ticks(self, block: int, work: Work) -> Linear:
        """A block's seconds under its chosen option, in whole ticks."""
        seconds = [work(block, option) for option in self.options[block]]
        return sum(
            math.floor(s / self.tick_s) * variable for s, variable in zip(seconds, self.chosen[block], strict=True) if s
        )

    def _up_s(self, num_bytes: int) -> float:
        machine = self.problem.machine
        return machine.latency_s + num_bytes / machine.h2d_bytes_per_s if num_bytes else 0.0

    def _down_s(self, num_bytes: int) -> float:
        machine = self.problem.machine
        return machine.latency_s + num_bytes / machine.d2h_bytes_per_s if num_bytes else 0.0

    def _add_pass(self, order: Sequence[int], work: Work, up: Work, down: Work, one_ahead: bool) -> cp_model.IntVar:
        """Rows of one forward or backward; returns when it ends."""
        add = self.model.add
        ends, ups, downs = ([self._time(f"{name}[{i}]") for i in range(len(order))] for name in ("E", "U", "D"))
        for i, block in enumerate(order):
            w, u, d = self._ticks(block, work), self._ticks(block, up), self._ticks(block, down)
            previous_end = ends[i - 1] if i else 0
            add(ends[i] >= previous_end + w)
            add(ends[i] >= ups[i] + w)
            add(ups[i] >= (ups[i - 1] if i else 0) + u)
            if one_ahead and i >= 2:
                add(ups[i] >= ends[i - 2] + u)
            add(downs[i] >= (downs[i - 1] if i else 0) + d)
            add(downs[i] >= previous_end + w + d)
            add(downs[i] >= ups[i] + w + d)
            if i:
                add(ends[i] >= downs[i - 1])
        add(ends[-1] >= downs[-1])
        return ends[-1]

    def _add_forward(self, one_ahead: bool) -> cp_model.IntVar:
        costs = self.problem.costs

        def up(block: int, option: BlockDecision) -> float:
            return self._up_s(costs[block].param_bytes) if option.params is Params.HOST else 0.0

        def down(block: int, option: BlockDecision) -> float:
            return self._down_s(costs[block].offloadable_bytes) if option.activations is Activations.OFFLOAD else 0.0

        return self._add_pass(range(self.num_blocks), lambda block, _: costs[block].forward_s, up, down, one_ahead)

    def _add_backward(self, one_ahead: bool) -> cp_model.IntVar:
        costs = self.problem.costs

        def work(block: int, option: BlockDecision) -> float:
            recomputes = option.activations is Activations.RECOMPUTE
            return costs[block].backward_s + (costs[block].recompute_s if recomputes else 0.0)

        def up(block: int, option: BlockDecision) -> float:
            fetch_s = self._up_s(costs[block].param_bytes) if option.params is Params.HOST else 0.0
            offloads = option.activations is Activations.OFFLOAD
            return fetch_s + (self._up_s(costs[block].offloadable_bytes) if offloads else 0.0)

        def down(block: int, option: BlockDecision) -> float:
            return self._down_s(costs[block].grad_bytes) if option.optimizer is Optimizer.HOST else 0.0

        return self._add_pass(range(self.num_blocks - 1, -1, -1), work, up, down, one_ahead)

    def _add_optimizer_step(self) -> cp_model.IntVar:
        problem, machine, add = self.problem, self.problem.machine, self.model.add
        trained = [block for block in range(self.num_blocks) if problem.costs[block].num_params]

        def on_device(block: int, option: BlockDecision) -> float:
            return device_update_s(problem, block, option) if option.optimizer is Optimizer.DEVICE else 0.0

        def on_host(block: int, option: BlockDecision) -> float:
            seconds = problem.costs[block].num_params / machine.host_update_params_per_s
            return seconds if option.optimizer is Optimizer.HOST else 0.0

        def upload(block: int, option: BlockDecision) -> float:
            uploads = option.optimizer is Optimizer.HOST and option.params is Params.DEVICE
            return self._up_s(problem.costs[block].param_bytes) if uploads else 0.0

        end, device_end = self._time("T"), self._time("V")
        add(device_end >= sum(self._ticks(block, on_device) for block in trained))
        add(end >= device_end)
        updated = device_end if machine.device_type == "cpu" else 0
        uploaded = 0
        for block in trained:
            previous_updated, previous_uploaded = updated, uploaded
            updated, uploaded = self._time(f"H[{block}]"), self._time(f"L[{block}]")
            add(updated >= previous_updated + self._ticks(block, on_host))
            add(uploaded >= updated + self._ticks(block, upload))
            add(uploaded >= previous_uploaded + self._ticks(block, upload))
        add(end >= uploaded)
        return end

    def minimize_step(self, *, one_ahead: bool) -> None:
        """Ask for the least seconds of an optimizer step within the budgets; ``Answer.bound`` is in seconds."""
        if self.problem.device_budget_bytes is not None:
            self._add_device_memory(self.problem.device_budget_bytes)
        step = self._add_forward(one_ahead)
        if self.problem.training:
            step = (step + self._add_backward(one_ahead)) * self.problem.micro_batches + self._add_optimizer_step()
        # A hidden copy is free in the model and not quite in truth, so plans that are as fast copy as little as they can.
        # A bound must not have this term.
        self.model.minimize(step + self._ticks_of_copies() if one_ahead else step)

    def _ticks_of_copies(self) -> Linear:
        def work(block: int, option: BlockDecision) -> float:
            return COPY_WEIGHT * self._copies_s(block, option)

        return sum(self._ticks(block, work) for block in range(self.num_blocks))

    def _copies_s(self, block: int, option: BlockDecision) -> float:
        """Seconds of all copies that a block's option makes in a step."""
        cost, training = self.problem.costs[block], self.problem.training
        seconds = 0.0
        if option.params is Params.HOST:
            seconds += (2 if training else 1) * self._up_s(cost.param_bytes)
        if training and option.activations is Activations.OFFLOAD:
            seconds += self._down_s(cost.offloadable_bytes) + self._up_s(cost.offloadable_bytes)
        if training and option.optimizer is Optimizer.HOST:
            seconds += self._down_s(cost.grad_bytes)
            seconds += self._up_s(cost.param_bytes) if option.params is Params.DEVICE else 0.0
        return seconds

    def minimize_peak(self) -> None:
        """Ask for the least device peak, whatever the device budget; ``Answer.bound`` is in bytes."""
        peak = self.model.new_int_var(0, 2**60, "peak")
        self._add_device_memory(peak)
        self.model.minimize(peak)

    def minimize_host(self) -> None:
        """Ask for the least host memory within the device budget; ``Answer.bound`` is in bytes."""
        if self.problem.device_budget_bytes is not None:
            self._add_device_memory(self.problem.device_budget_bytes)
        self.model.minimize(self._host_bytes())

    def solve(self, *, limit_s: float, hint: Sequence[BlockDecision] | None = None, in_seconds: bool = False) -> Answer:
        """Search for about ``limit_s`` seconds of this kind of machine, counted so that every run does the same."""
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 2
        solver.parameters.relative_gap_limit = RELATIVE_GAP if in_seconds else 0.0
        solver.parameters.max_deterministic_time = DETERMINISTIC_PER_SECOND * limit_s
        solver.parameters.max_time_in_seconds = WALL_CLOCK_SLACK * limit_s
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
