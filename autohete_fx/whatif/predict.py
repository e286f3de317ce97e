"""Plan for a machine that one does not have: no GPU, no weights, no training script.

In: a traced step (`autohete_fx.whatif.trace`) and a problem of it. Out: predictions of training steps, each a `Problem` with the
`Plan` that solves it. Nothing is rewritten and no trace of rewritten graphs checks the plan: its peak is that of the planner's
model, which training then holds to the budget.
"""

import dataclasses
import time
from dataclasses import dataclass

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Overlap, Plan, Problem
from autohete_fx.planner.baselines import BASELINES, evaluate, fits
from autohete_fx.planner.infeasible import least_peak
from autohete_fx.planner.model.figures import overlap_of
from autohete_fx.planner.solve import solve
from autohete_fx.whatif.depth import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One solved problem.

    Attributes:
        name: what distinguishes it, such as ``2x host link``.
        problem, plan: see there.
        tokens: of one optimizer step, all its micro-batches and all ranks.
        flops: of one optimizer step on one rank, without recomputation.
        num_params: of the model.
    """

    name: str
    problem: Problem
    plan: Plan
    tokens: int
    flops: int
    num_params: int

    @property
    def tokens_per_s(self) -> float:
        """Predicted training throughput of all ranks."""
        return self.tokens / self.plan.step_s

    def utilization(self, peak_flops_per_s: float) -> float:
        """Model FLOPs utilization: the share of a peak rate that the step's own products make up."""
        return self.flops / self.plan.step_s / peak_flops_per_s


# -- from a model to a problem ---------------------------------------------------------------------------------------


def predict(step: TracedStep, problem: Problem, name: str, *, tokens: int, time_limit_s: float) -> Prediction:
    """Solve one problem of a traced step; ``tokens`` of one micro-batch of one rank. Raises InfeasiblePlanError."""
    return _prediction(step, problem, name, tokens, solve(problem, time_limit_s=time_limit_s))


def _prediction(step: TracedStep, problem: Problem, name: str, tokens: int, plan: Plan) -> Prediction:
    times = problem.micro_batches
    return Prediction(
        name=name,
        problem=problem,
        plan=plan,
        tokens=times * problem.num_ranks * tokens,
        flops=times * sum(step.flops),
        num_params=step.num_params,
    )


def with_more(step: TracedStep, given: Prediction, *, time_limit_s: float) -> list[Prediction]:
    """The gain from more of each resource: a quarter more device memory, twice the host link, twice the CPU's updates, of several
    ranks twice the link between them; and where updates begin at the step what it would to let them begin in backward."""
    problem, machine = given.problem, given.problem.machine
    budget = problem.device_budget_bytes
    link = dataclasses.replace(
        machine, h2d_bytes_per_s=2 * machine.h2d_bytes_per_s, d2h_bytes_per_s=2 * machine.d2h_bytes_per_s
    )
    updates = dataclasses.replace(machine, host_update_params_per_s=2 * machine.host_update_params_per_s)
    variants = {
        "2x host link": dataclasses.replace(problem, machine=link),
        "2x CPU update rate": dataclasses.replace(problem, machine=updates),
    }
    if budget is not None:
        more = dataclasses.replace(problem, device_budget_bytes=budget + budget // 4)
        variants = {"+25% device memory": more, **variants}
    if overlap_of(problem) is Overlap.STEP and not problem.clips_gradients:
        early = dataclasses.replace(problem.schedule, overlap=Overlap.BACKWARD)
        variants['overlap="backward"'] = dataclasses.replace(problem, schedule=early)
    if problem.num_ranks > 1:
        net = dataclasses.replace(machine, net_bytes_per_s=2 * machine.net_bytes_per_s)
        variants["2x link between ranks"] = dataclasses.replace(problem, machine=net)
    tokens = given.tokens // (problem.micro_batches * problem.num_ranks)
    return [
        _prediction(step, variant, name, tokens, _no_worse(variant, given.plan, time_limit_s))
        for name, variant in variants.items()
    ]


def _no_worse(problem: Problem, known: Plan, time_limit_s: float) -> Plan:
    """The solver's plan, or a known plan that fits too where the search, which is not exhaustive, found none as fast."""
    found = solve(problem, time_limit_s=time_limit_s)
    replayed = evaluate(problem, known.decisions, found.status)
    if replayed.step_s >= found.step_s or not fits(problem, replayed):
        return found
    gap = (replayed.step_s - found.lower_bound_s) / replayed.step_s
    return dataclasses.replace(replayed, lower_bound_s=found.lower_bound_s, gap=gap, solve_s=found.solve_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One model on rising numbers of ranks, each with the same batch.

    Attributes:
        num_ranks: of each point.
        points: None where no plan fits.
    """

    num_ranks: tuple[int, ...]
    points: tuple[Prediction | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Step time over the device budget.

    Attributes:
        points: by rising budget, from the smallest that any plan keeps.
        baselines: strategies of other systems, whatever memory they take, within the host budget.
        capacity_bytes: of the device.
    """

    points: tuple[Prediction, ...]
    baselines: tuple[Prediction, ...]
    capacity_bytes: int


def predict_if_any(step: TracedStep, problem: Problem, *, tokens: int, time_limit_s: float) -> Prediction | None:
    """The solved problem; None where no plan keeps its budgets."""
    try:
        return predict(step, problem, "planned", tokens=tokens, time_limit_s=time_limit_s)
    except InfeasiblePlanError:
        return None


def sweep_budgets(step: TracedStep, problem: Problem, *, tokens: int, num_points: int, time_limit_s: float) -> Sweep:
    """Solve for budgets from the smallest feasible to the least that needs no decision, or the device's capacity.

    Raises InfeasiblePlanError where nothing fits the device, or the host budget.
    """
    replayed = [_prediction(step, problem, name, tokens, baseline(problem)) for name, baseline in BASELINES.items()]
    within_host = (
        problem if problem.host_budget_bytes is None else dataclasses.replace(problem, device_budget_bytes=None)
    )
    capacity = problem.machine.device_bytes
    smallest = _smallest_budget(problem, time_limit_s)
    largest = min(capacity, max(p.plan.peak_bytes for p in replayed if p.name == "keep-all"))
    points: list[Prediction] = []
    for place in range(num_points):
        budget = smallest + max(0, largest - smallest) * place // max(1, num_points - 1)
        here = dataclasses.replace(problem, device_budget_bytes=budget)
        known = points[-1].plan if points else None
        plan = solve(here, time_limit_s=time_limit_s) if known is None else _no_worse(here, known, time_limit_s)
        points.append(_prediction(step, here, "planned", tokens, plan))
        if budget >= largest:
            break
    baselines = tuple(p for p in replayed if fits(within_host, p.plan))
    return Sweep(points=tuple(points), baselines=baselines, capacity_bytes=capacity)


def _smallest_budget(problem: Problem, time_limit_s: float) -> int:
    """The least peak that any plan has within the host budget."""
    whole_device = dataclasses.replace(problem, device_budget_bytes=problem.machine.device_bytes)
    decisions = least_peak(whole_device, deadline=time.monotonic() + time_limit_s)
    least = None if decisions is None else evaluate(whole_device, decisions, "least peak")
    if least is None or not fits(whole_device, least):
        solve(whole_device, time_limit_s=time_limit_s)  # raises, and says what holds it up
        raise AssertionError("the search fits what the program of least peak does not")
    return least.peak_bytes
