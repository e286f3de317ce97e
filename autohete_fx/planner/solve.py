"""Solve a problem: in comes a `Problem`, out comes the best `Plan` found, with a proven bound and replayed predictions.

`found` searches and bounds. Whatever it found, a plan is replayed by `simulate`, which knows nothing of that, before it is
returned, with its `reasons`.

A problem with slots for streamed parameters is two (`slots`). The better plan of the two is the plan, the lower bound the bound.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Plan, Problem
from autohete_fx.planner.baselines import evaluate, fits
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.bound.relaxation import branch
from autohete_fx.planner.bound.work_bound import work_bound_s
from autohete_fx.planner.found import OPTIMAL_GAP, found_of
from autohete_fx.planner.infeasible import without_frames
from autohete_fx.planner.model.choices import MAX_PREFETCH_DISTANCE
from autohete_fx.planner.reasons import reasons_of
from autohete_fx.planner.search import effort
from autohete_fx.planner.search.rounding import Decisions
from autohete_fx.planner.slots import ways

__all__ = ["OPTIMAL_GAP", "proven", "solve"]


def solve(
    problem: Problem,
    *,
    time_limit_s: float = 10.0,
    work_s: float | None = None,
    explains: bool = True,
    near: Sequence[Decisions] = (),
) -> Plan:
    """The fastest plan found that keeps the budgets. ``explains``: whether it says why, which takes a part of the time.

    ``near`` are decisions from which a good plan is near, though they may not keep the budgets.
    Equal problems get equal decisions, because work is counted, not timed. On a machine so slow that ``time_limit_s`` comes
    first (seconds of the clock, for all of it but tables and patterns), they may differ. Relaxations and dives have a share of it.
    ``work_s``: for as many seconds of a usual core work is counted out, if fewer than ``time_limit_s``.
    ``Plan.status`` is ``optimal`` where ``Plan.gap`` is at most ``OPTIMAL_GAP``, else ``feasible``.

    Raises InfeasiblePlanError where no plan keeps the budgets.
    """
    began = time.monotonic()
    plan, bound_s = _best(problem, time_limit_s, min(time_limit_s, work_s or time_limit_s), near)
    bound_s = min(bound_s, plan.step_s)
    gap = (plan.step_s - bound_s) / plan.step_s if plan.step_s else 0.0
    status = "optimal" if gap <= OPTIMAL_GAP else "feasible"
    reasons = reasons_of(problem, plan.decisions) if explains else None
    solve_s = time.monotonic() - began
    return replace(plan, lower_bound_s=bound_s, gap=gap, status=status, reasons=reasons, solve_s=solve_s)


def proven(problem: Problem, plan: Plan, *, time_limit_s: float) -> Plan:
    """The same plan with the bound that ``time_limit_s`` more seconds of branching prove, if that is a better one."""
    each_way, proved = ways(problem), []
    for way in each_way:
        program = Program(way)
        program.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
        deadline = time.monotonic() + time_limit_s / len(each_way)
        proved.append(branch(program, branches=effort.MOST_BRANCHES, deadline=deadline).bound_s)
    bound_s = min(plan.step_s, max(plan.lower_bound_s, min(proved)))
    gap = (plan.step_s - bound_s) / plan.step_s
    return replace(plan, lower_bound_s=bound_s, gap=gap, status="optimal" if gap <= OPTIMAL_GAP else plan.status)


def _best(problem: Problem, time_limit_s: float, work_s: float, near: Sequence[Decisions]) -> tuple[Plan, float]:
    """The best plan that is found, replayed, and the seconds that no plan is below.

    A way that is refused is taken to have no plan. Where both are, the error is the one that asks for less device memory.
    """
    each_way, least_s = ways(problem), work_bound_s(problem)
    plans, bounds, errors = list[Plan](), list[float](), list[InfeasiblePlanError]()
    for way in each_way:
        try:
            decisions, bound_s = found_of(way, time_limit_s / len(each_way), work_s / len(each_way), near)
        except InfeasiblePlanError as error:
            errors.append(without_frames(error))
            continue
        plans.append(evaluate(problem, decisions, "feasible"))
        assert fits(problem, plans[-1]), "the search's memory and the replay's disagree"
        if way is not each_way[-1] and plans[-1].step_s <= least_s / (1 - OPTIMAL_GAP):
            return plans[-1], least_s
        bounds.append(bound_s)
    if not plans:
        errors.sort(key=lambda error: -(error.smallest_budget_bytes or float("inf")))
        raise errors.pop()  # a name for it would keep it, and with it all frames
    return min(plans, key=lambda plan: plan.step_s), min(bounds)
