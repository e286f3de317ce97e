"""Solve a problem: in comes a `Problem`, out comes the best `Plan` found, with a proven bound and replayed predictions.

    nothing moves, fits, and its time is within OPTIMAL_GAP of the work that every plan does -> that is the plan
    patterns that fit (`starts`), improved (`improve`)                                       -> a first plan
    the program that bounds (`formulation`), and its decisions improved                      -> the lower bound
    the program that decides, and its decisions improved
    random changes to the best, improved                                                     -> the plan
    nothing fits                                                                -> InfeasiblePlanError (`infeasible`)

The search ends early where the best plan has reached the bound. Whatever found it, a plan is replayed by `simulate`, which
knows nothing of the above, before it is returned. A plan that moves nothing, where it fits, gives way only to one that is
faster by more than OPTIMAL_GAP. On a CUDA device there can be one without any budget: host and device can share the
updates, so keeping everything is not a lower bound on time, and is not said to be.
"""

import time
from dataclasses import replace

import numpy as np

from autohete_fx.ir import BlockDecision, Plan, Problem
from autohete_fx.planner.baselines import evaluate
from autohete_fx.planner.choices import MAX_PREFETCH_DISTANCE, choices, fetches_ahead
from autohete_fx.planner.formulation import RELATIVE_GAP, Program
from autohete_fx.planner.improve import Search
from autohete_fx.planner.infeasible import infeasible, least_peak
from autohete_fx.planner.relaxation import relaxed_bound_s
from autohete_fx.planner.replays import Replays, Rows
from autohete_fx.planner.simulate import Simulation, simulate
from autohete_fx.planner.starts import starts

OPTIMAL_GAP = 0.005
"""A plan whose gap is at most this has status ``optimal``; for less, nothing is moved."""
BOUND_SHARE, DECIDE_SHARE = 0.15, 0.1
"""Of the time limit, what work is counted out for, for each integer program."""
STARTS_SHARE, PROGRAMS_SHARE, ESCAPE_SHARE = 0.2, 0.05, 0.15
"""Likewise for local search from patterns, from each program's decisions, and at the end. All shares together leave a slow
or busy machine half as much again, so that the clock, which would make plans depend on the load, seldom ends the search."""
RELAXATION_SHARE = 0.15
"""Of the time limit, by the clock: it takes a tenth of this, or never ends; no decision is made of it."""
REPLAYED_BLOCKS_PER_SECOND = 1_500_000
"""Of local search on a usual core."""
PROGRAM_BLOCKS = 48
"""For more blocks the integer programs are not tried: in seconds they get no further than their relaxation."""
_STARTS = 4


def solve(problem: Problem, *, time_limit_s: float = 10.0) -> Plan:
    """The fastest plan found that keeps the budgets.

    Equal problems get equal decisions: work is counted, not timed, unless the machine is so slow that ``time_limit_s``
    (seconds of the clock, for all of it but tables and patterns) comes first. ``Plan.status`` is ``optimal`` where
    ``Plan.gap`` is at most ``OPTIMAL_GAP``, else ``feasible``.

    Raises InfeasiblePlanError where no plan keeps the budgets.
    """
    began = time.monotonic()
    decisions, bound_s = _solved(problem, time_limit_s, began + time_limit_s)
    plan = evaluate(problem, decisions, "feasible")
    assert fits(problem, plan), "the search's memory and the replay's disagree"
    bound_s = min(bound_s, plan.step_s)
    gap = (plan.step_s - bound_s) / plan.step_s if plan.step_s else 0.0
    status = "optimal" if gap <= OPTIMAL_GAP else "feasible"
    return replace(plan, lower_bound_s=bound_s, gap=gap, status=status, solve_s=time.monotonic() - began)


def fits(problem: Problem, replayed: Simulation | Plan) -> bool:
    """Whether a replay keeps both budgets."""
    device, host = problem.device_budget_bytes, problem.host_budget_bytes
    return (device is None or replayed.peak_bytes <= device) and (host is None or replayed.host_bytes <= host)


def work_bound_s(problem: Problem) -> float:
    """What no plan can be faster than: all blocks computed, all parameters updated where that is fastest.

    On a CPU device host and device updates take the same cores; on a CUDA device they overlap, at best perfectly.
    """
    forward_s = sum(cost.forward_s for cost in problem.costs)
    if not problem.training:
        return forward_s
    machine = problem.machine
    rates = machine.device_update_params_per_s, machine.host_update_params_per_s
    rate = max(rates) if machine.device_type == "cpu" else sum(rates)
    passes_s = problem.micro_batches * (forward_s + sum(cost.backward_s for cost in problem.costs))
    return passes_s + sum(cost.num_params for cost in problem.costs) / rate


def _solved(problem: Problem, time_limit_s: float, deadline: float) -> tuple[tuple[BlockDecision, ...], float]:
    """Decisions that keep the budgets and a lower bound in seconds."""
    stay = tuple(choices(problem, block)[0] for block in range(len(problem.costs)))
    replayed = simulate(problem, stay, events=False)
    bound_s = work_bound_s(problem)
    stays = fits(problem, replayed) and not any(fetches_ahead(decision) for decision in stay)
    if stays and replayed.step_s - bound_s <= OPTIMAL_GAP * replayed.step_s:
        return stay, bound_s
    if not problem.costs:
        raise infeasible(problem, deadline=deadline)
    found = _Found(problem, time_limit_s, deadline)
    found.look(bound_s)
    if stays and replayed.step_s <= found.best_s * (1 + OPTIMAL_GAP):
        return stay, found.bound_s
    return found.replays.decisions(found.best), found.bound_s


class _Found:
    """The best assignment and the best bound so far."""

    def __init__(self, problem: Problem, time_limit_s: float, deadline: float) -> None:
        self.problem, self.time_limit_s, self.deadline = problem, time_limit_s, deadline
        self.replays = Replays(problem)
        self.search = Search(self.replays, deadline=deadline)
        self.best = np.zeros(0, dtype=np.int64)
        self.best_s = self.best_score = float("inf")
        self.bound_s = 0.0

    def look(self, bound_s: float) -> None:
        """Search, with a bound to begin with. Raises InfeasiblePlanError."""
        self.bound_s = bound_s
        begin = starts(self.replays, self.search, _STARTS) or [self._anything()]
        self._allow(STARTS_SHARE)
        for start in begin:
            self._keep(self.search.improve(start))
        bounding = Program(self.problem)
        bounding.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
        relaxation_ends = min(self.deadline, time.monotonic() + RELAXATION_SHARE * self.time_limit_s)
        self.bound_s = max(self.bound_s, relaxed_bound_s(bounding, deadline=relaxation_ends))
        if not self._is_done and self.replays.num_blocks <= PROGRAM_BLOCKS:
            self.bound_s = max(self.bound_s, self._solve_program(bounding, BOUND_SHARE))
        if not self._is_done and self.replays.num_blocks <= PROGRAM_BLOCKS:
            deciding = Program(self.problem)
            deciding.minimize_step(ahead=1)
            self._solve_program(deciding, DECIDE_SHARE)
        if not self._is_done:
            self._allow(ESCAPE_SHARE)
            self._keep(self.search.escape(self.best))

    @property
    def _is_done(self) -> bool:
        return self.best_s - self.bound_s <= RELATIVE_GAP * self.best_s or time.monotonic() > self.deadline

    def _anything(self) -> Rows:
        decisions = least_peak(self.problem, deadline=self.deadline)
        if decisions is None or not fits(self.problem, simulate(self.problem, decisions, events=False)):
            raise infeasible(self.problem, deadline=self.deadline)
        return self.replays.row(decisions)

    def _allow(self, share: float) -> None:
        self.search.work_left = int(share * self.time_limit_s * REPLAYED_BLOCKS_PER_SECOND)

    def _solve_program(self, program: Program, share: float) -> float:
        """Improve what a program decides; returns the bound that it proves, in seconds."""
        hint = self.replays.decisions(self.best)
        limit_s = share * self.time_limit_s
        answer = program.solve(limit_s=limit_s, deadline=self.deadline, hint=hint, in_seconds=True)
        if answer.decisions is not None:
            self._allow(PROGRAMS_SHARE)
            self._keep(self.search.improve(self.replays.row(answer.decisions)))
        return answer.bound

    def _keep(self, row: Rows) -> None:
        score = float(self.search.score(row[None])[0])
        if score < self.best_score:
            self.best, self.best_score = row, score
            self.best_s = float(self.replays.seconds(row[None])[0])
