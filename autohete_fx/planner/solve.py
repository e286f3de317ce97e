"""Solve a problem: in comes a `Problem`, out comes the best `Plan` found, with a proven bound and replayed predictions.

The integer program (`formulation`) decides at prefetch distance 1, where it is the simulator exactly. Then fetches are
moved earlier, block by block, wherever the replay stays within the budget and gets faster: AutoHete's safe prefetch. The
bound comes from the free program, which holds for every distance.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from autohete_fx.ir import Activations, BlockDecision, Params, Plan, Problem
from autohete_fx.planner.formulation import Answer, Program, choices
from autohete_fx.planner.infeasible import infeasible
from autohete_fx.planner.simulate import Simulation, simulate

MAX_PREFETCH_DISTANCE = 4
_BOUND_SHARE = 0.3
"""Share of the time limit that goes into the lower bound."""


def solve(problem: Problem, *, time_limit_s: float = 10.0) -> Plan:
    """The fastest plan found that keeps the budgets; the same input gives the same decisions on every run.

    Raises InfeasiblePlanError where no plan keeps them.
    """
    begin = time.perf_counter()
    stay = tuple(choices(problem, block)[0] for block in range(len(problem.costs)))
    replayed = simulate(problem, stay, events=False)
    if fits(problem, replayed):
        # Nothing moves, nothing is computed twice: no plan does less work on any lane that it could overlap.
        return _plan(problem, stay, replayed, replayed.step_s, "optimal", begin)
    program = Program(problem)
    program.minimize_step(one_ahead=True)
    answer = program.solve(limit_s=time_limit_s * (1 - _BOUND_SHARE), in_seconds=True)
    if answer.decisions is None:
        if answer.exhausted:
            raise infeasible(problem)
        answer = _any_plan(problem, time_limit_s)
    assert answer.decisions is not None
    decisions = prefetch_earlier(problem, answer.decisions)
    free = Program(problem)
    free.minimize_step(one_ahead=False)
    bound = free.solve(limit_s=time_limit_s * _BOUND_SHARE, hint=answer.decisions, in_seconds=True).bound
    replayed = simulate(problem, decisions, events=False)
    assert fits(problem, replayed), "the program's memory rows and the replay disagree"
    return _plan(problem, decisions, replayed, bound, "optimal" if answer.exhausted else "feasible", begin)


def fits(problem: Problem, replayed: Simulation) -> bool:
    """Whether a replay keeps both budgets."""
    device, host = problem.device_budget_bytes, problem.host_budget_bytes
    return (device is None or replayed.peak_bytes <= device) and (host is None or replayed.host_bytes <= host)


def prefetch_earlier(problem: Problem, decisions: Sequence[BlockDecision]) -> tuple[BlockDecision, ...]:
    """Move fetches earlier, lowest block first, where the replay fits and becomes faster."""
    best = tuple(decisions)
    best_s = simulate(problem, best, events=False).step_s
    for block, decision in enumerate(best):
        if decision.params is Params.DEVICE and decision.activations is not Activations.OFFLOAD:
            continue
        for distance in range(2, MAX_PREFETCH_DISTANCE + 1):
            moved = (*best[:block], replace(decision, prefetch_distance=distance), *best[block + 1 :])
            replayed = simulate(problem, moved, events=False)
            if not fits(problem, replayed):
                break
            if replayed.step_s < best_s:
                best, best_s = moved, replayed.step_s
    return best


def _any_plan(problem: Problem, time_limit_s: float) -> Answer:
    """The plan of least peak, where the search for a fast one found none in its time."""
    program = Program(problem)
    program.minimize_peak()
    answer = program.solve(limit_s=time_limit_s)
    if answer.decisions is None or not fits(problem, simulate(problem, answer.decisions, events=False)):
        raise infeasible(problem)
    return replace(answer, exhausted=False)


def _plan(
    problem: Problem,
    decisions: tuple[BlockDecision, ...],
    replayed: Simulation,
    bound_s: float,
    status: str,
    begin: float,
) -> Plan:
    bound_s = min(bound_s, replayed.step_s)
    return Plan(
        labels=problem.labels,
        decisions=decisions,
        step_s=replayed.step_s,
        peak_bytes=replayed.peak_bytes,
        host_bytes=replayed.host_bytes,
        busy_s=replayed.busy_s,
        lower_bound_s=bound_s,
        gap=(replayed.step_s - bound_s) / replayed.step_s if replayed.step_s else 0.0,
        status=status,
        problem_digest=problem.digest,
        solve_s=time.perf_counter() - begin,
    )
