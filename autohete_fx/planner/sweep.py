"""Step time over the device budget: in comes a problem, out come plans for budgets from the smallest that any plan keeps.

No plan of the sweep is slower than one of a smaller budget. The search is not exhaustive: where it found none as fast, the plan
of the smaller budget stands for the larger one too.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Plan, Problem
from autohete_fx.planner.baselines import evaluate, fits, keep_all
from autohete_fx.planner.infeasible import least_peak
from autohete_fx.planner.sharing import leanest
from autohete_fx.planner.solve import solve


def plans_by_budget(
    problem: Problem, *, largest_bytes: int, num_points: int, time_limit_s: float, work_s: float | None = None
) -> Iterator[tuple[Problem, Plan]]:
    """Problems with evenly spaced device budgets, the smallest feasible one first, ``largest_bytes`` last, each with its plan.

    ``time_limit_s`` and ``work_s`` are those of each `solve`.


    Raises InfeasiblePlanError where nothing fits the device, or the host budget.
    """
    known = smallest_plan(problem, time_limit_s)
    smallest_bytes = known.peak_bytes
    for place in range(num_points):
        room = max(0, largest_bytes - smallest_bytes)
        budget_bytes = smallest_bytes + room * place // max(1, num_points - 1)
        here = replace(problem, device_budget_bytes=budget_bytes)
        known = no_worse(here, known, time_limit_s, work_s)
        yield here, known
        if budget_bytes >= largest_bytes:
            return


def undecided_peak_bytes(problem: Problem) -> int:
    """The peak of the plan that decides nothing: from this budget on, more memory gains nothing."""
    return keep_all(problem).peak_bytes


def no_worse(problem: Problem, known: Plan, time_limit_s: float, work_s: float | None = None) -> Plan:
    """The solver's plan, or a known plan that fits too where the search, which is not exhaustive, found none as fast; neither says
    why."""
    replayed = evaluate(problem, known.decisions, known.status)
    if not fits(problem, replayed):
        return solve(problem, time_limit_s=time_limit_s, work_s=work_s, explains=False)
    try:
        found = solve(problem, time_limit_s=time_limit_s, work_s=work_s, explains=False)
    except InfeasiblePlanError:  # the search ended before it came to what is known to fit
        return replayed
    if replayed.step_s >= found.step_s:
        return found
    gap = (replayed.step_s - found.lower_bound_s) / replayed.step_s
    return replace(replayed, status=found.status, lower_bound_s=found.lower_bound_s, gap=gap, solve_s=found.solve_s)


def smallest_plan(problem: Problem, time_limit_s: float) -> Plan:
    """The plan of least peak within the host budget; where the time is too short to find it, one that takes little. Raises
    InfeasiblePlanError where nothing fits the device."""
    whole_device = replace(problem, device_budget_bytes=problem.machine.device_bytes)
    deadline = time.monotonic() + time_limit_s
    for find in (least_peak, leanest):
        decisions = find(whole_device, deadline=deadline)
        plan = None if decisions is None else evaluate(whole_device, decisions, "least peak")
        if plan is not None and fits(whole_device, plan):
            return plan
    return solve(whole_device, time_limit_s=time_limit_s)  # or it says what holds it up
