"""Plans for a problem: solved for it, given by the user or the cache, or decided together with other graphs.

In: a `Problem` and what is to be decided. Out: a `Plan` with what is predicted of it. Raises `PlanError` where a plan does not fit,
`InfeasiblePlanError` where none does.
"""

import dataclasses
import time
from collections.abc import Sequence

from autohete_fx.errors import PlanError
from autohete_fx.ir import (
    Activations,
    BlockDecision,
    BlockGraph,
    Machine,
    Optimizer,
    Params,
    Plan,
    Problem,
)
from autohete_fx.ir.labels import labels_of
from autohete_fx.planner.baselines import fits
from autohete_fx.planner.infeasible import infeasible
from autohete_fx.planner.model.figures import whole_of
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.reasons import reasons_of
from autohete_fx.planner.sharing import leanest
from autohete_fx.planner.solve import solve


def fitted_plan(plan: Plan, graph: BlockGraph, problem: Problem, *, is_own: bool = False) -> Plan:
    """A given plan with this graph's predictions, and its reasons where it was solved for just this problem.

    ``is_own``: an earlier process has made it for this graph and these options. Its reasons hold, though the budget that the solver
    had left and what is free on the host are not quite those of now.

    Raises PlanError where it was made for another graph.
    """
    labels = labels_of(graph.blocks)
    digests = tuple(block.digest for block in graph.blocks)
    if plan.labels != labels:
        different = [pair for pair in zip(plan.labels, labels, strict=False) if pair[0] != pair[1]]
        what = f"its block {different[0][0]!r} is {different[0][1]!r} here" if different else "the counts differ"
        raise PlanError(
            f"the plan does not fit this graph: its number of blocks is {len(plan.labels)}, the graph's {len(labels)}; {what};"
            " make a plan for this model, or leave the option 'plan' out"
        )
    if plan.block_digests and plan.block_digests != digests:
        index = next(i for i, pair in enumerate(zip(plan.block_digests, digests, strict=True)) if pair[0] != pair[1])
        raise PlanError(
            f"the plan does not fit this graph: block {labels[index]!r} had other operators, shapes or dtypes when the plan"
            " was made; make a plan for this model and batch, or leave the option 'plan' out"
        )
    for block, (label, decision) in enumerate(zip(labels, plan.decisions, strict=True)):
        _refuse_unsupported(label, decision, problem.machine)
        _refuse_keeping_nothing(label, decision, problem, block)
    problem = dataclasses.replace(problem, schedule=plan.schedule)
    fitted = replayed(dataclasses.replace(plan, block_digests=digests), problem)
    return dataclasses.replace(fitted, reasons=plan.reasons) if is_own else fitted


def recomputing(plan: Plan, problem: Problem) -> Plan:
    """The plan with all activations recomputed that it keeps, be it in part."""
    decisions = tuple(
        d if d.activations is Activations.OFFLOAD else dataclasses.replace(d, activations=Activations.RECOMPUTE)
        for d in plan.decisions
    )
    made = replayed(dataclasses.replace(plan, decisions=decisions, status="feasible"), problem)
    return dataclasses.replace(made, reasons=reasons_of(problem, decisions))


def replayed(plan: Plan, problem: Problem) -> Plan:
    """The plan with what is predicted of it for a problem."""
    result = simulate(problem, plan.decisions)
    return dataclasses.replace(
        plan,
        step_s=result.step_s,
        peak_bytes=result.peak_bytes,
        host_bytes=result.host_bytes,
        busy_s=result.busy_s,
        reasons=plan.reasons if plan.problem_digest == problem.digest else None,
        gap=max(0.0, 1 - plan.lower_bound_s / result.step_s) if plan.lower_bound_s else plan.gap,
        problem_digest=problem.digest,
    )


def _refuse_unsupported(label: str, decision: BlockDecision, machine: Machine) -> None:
    """What the runtime cannot do here."""
    if Optimizer.DISK in (decision.optimizer, decision.other_states) and not machine.disk_bytes_per_s:
        raise PlanError(
            f"the plan decides optimizer 'disk' for block {label!r}, but when this machine was measured its disk had no room;"
            " free some there, or give another offload_dir"
        )


def _refuse_keeping_nothing(label: str, decision: BlockDecision, problem: Problem, block: int) -> None:
    """A plan for several ranks, and one that was damaged."""
    keeps = decision.replicates or (decision.keeps_fetched and decision.params is Params.DEVICE)
    if keeps and not whole_of(problem, block).gathered:
        word = "replicates" if decision.replicates else "keeps_fetched"
        raise PlanError(
            f"the plan decides {word} for block {label!r}, whose parameters are on the device and which gathers none from"
            " other ranks; expected it only where parameters are fetched or gathered; make a plan for this many ranks"
            f" ({problem.num_ranks}), or leave {word} out"
        )


def solved_plan(
    problem: Problem, graph: BlockGraph, *, time_limit_s: float, near: Sequence[tuple[BlockDecision, ...]] = ()
) -> Plan:
    """The solver's plan, which may be near others. Raises InfeasiblePlanError where none fits."""
    plan = solve(problem, time_limit_s=time_limit_s, near=near)
    return dataclasses.replace(plan, block_digests=tuple(block.digest for block in graph.blocks))


def lean_plan(problem: Problem, graph: BlockGraph) -> Plan:
    """A plan that leaves little on the device for other graphs. Raises InfeasiblePlanError where it does not fit."""
    deadline = time.monotonic()
    decisions = leanest(problem, deadline=deadline)
    if decisions is None or not fits(problem, simulate(problem, decisions, events=False)):
        raise infeasible(problem, deadline=deadline)
    return decided_plan(problem, graph, decisions)


def decided_plan(problem: Problem, graph: BlockGraph, decisions: tuple[BlockDecision, ...]) -> Plan:
    """The plan of these decisions, with what is predicted of it."""
    plan = Plan(
        labels=problem.labels,
        decisions=decisions,
        block_digests=tuple(block.digest for block in graph.blocks),
        schedule=problem.schedule,
        status="feasible",
    )
    return dataclasses.replace(replayed(plan, problem), reasons=reasons_of(problem, decisions))
