"""Plan for a machine that one does not have: no GPU, no weights, no training script.

In: a traced step (`autohete_fx.whatif.trace`) and a problem of it. Out: predictions of training steps, each a `Problem` with
the `Plan` that solves it. Nothing is rewritten and no trace of rewritten graphs checks the plan. Its peak is that of the
planner's model, which training then holds to the budget.
"""

import dataclasses
from dataclasses import dataclass

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Overlap, Plan, Problem
from autohete_fx.planner.baselines import BASELINES, fits
from autohete_fx.planner.model.figures import overlap_of
from autohete_fx.planner.solve import solve
from autohete_fx.planner.sweep import no_worse, plans_by_budget, undecided_peak_bytes
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


def predict(
    step: TracedStep, problem: Problem, name: str, *, tokens: int, time_limit_s: float, work_s: float | None = None
) -> Prediction:
    """Solve one problem of a traced step; ``tokens`` of one micro-batch of one rank; limits as for `solve`. Raises
    InfeasiblePlanError."""
    return _prediction(step, problem, name, tokens, solve(problem, time_limit_s=time_limit_s, work_s=work_s))


def _prediction(step: TracedStep, problem: Problem, name: str, tokens: int, plan: Plan) -> Prediction:
    times = problem.micro_batches
    return Prediction(
        name=name,
        problem=problem,
        plan=plan,
        tokens=times * problem.num_ranks * problem.num_replicas * tokens,
        flops=times * sum(step.flops),
        num_params=step.num_params,
    )


def with_more(
    step: TracedStep, given: Prediction, *, time_limit_s: float, work_s: float | None = None
) -> list[Prediction]:
    """The gain from more of each resource; limits as for `solve`.

    That is a quarter more device memory, twice the host link, twice the CPU's updates, and of several ranks twice the link between
    them. Where updates begin at the step, it has the gain of letting them begin in backward, too.
    """
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
    more_memory, is_spare = None, False
    if budget is not None:
        more_memory = dataclasses.replace(problem, device_budget_bytes=budget + budget // 4)
        variants = {"+25% device memory": more_memory, **variants}
        is_spare = undecided_peak_bytes(problem) <= budget  # every plan fits already
    if overlap_of(problem) is Overlap.STEP and not problem.clips_gradients and problem.num_replicas == 1:
        early = dataclasses.replace(problem.schedule, overlap=Overlap.BACKWARD)
        variants['overlap="backward"'] = dataclasses.replace(problem, schedule=early)
    if problem.num_ranks * problem.num_replicas > 1:
        rates = {"net_bytes_per_s": machine.net_bytes_per_s, "replica_net_bytes_per_s": machine.replica_net_bytes_per_s}
        net = dataclasses.replace(machine, **{name: 2 * rate for name, rate in rates.items()})
        variants["2x link between ranks"] = dataclasses.replace(problem, machine=net)
    tokens = given.tokens // (problem.micro_batches * problem.num_ranks * problem.num_replicas)

    def plan_of(variant: Problem) -> Plan:
        return (
            given.plan if is_spare and variant is more_memory else no_worse(variant, given.plan, time_limit_s, work_s)
        )

    return [_prediction(step, variant, name, tokens, plan_of(variant)) for name, variant in variants.items()]


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


def predict_if_any(
    step: TracedStep, problem: Problem, *, tokens: int, time_limit_s: float, work_s: float | None = None
) -> Prediction | None:
    """The solved problem; None where no plan keeps its budgets."""
    try:
        return predict(step, problem, "planned", tokens=tokens, time_limit_s=time_limit_s, work_s=work_s)
    except InfeasiblePlanError:
        return None


def sweep_budgets(
    step: TracedStep,
    problem: Problem,
    *,
    tokens: int,
    num_points: int,
    time_limit_s: float,
    work_s: float | None = None,
) -> Sweep:
    """Solve for budgets from the smallest feasible to the least that needs no decision, or the device's capacity.

    Raises InfeasiblePlanError where nothing fits the device, or the host budget.
    """
    replayed = [_prediction(step, problem, name, tokens, baseline(problem)) for name, baseline in BASELINES.items()]
    within_host = (
        problem if problem.host_budget_bytes is None else dataclasses.replace(problem, device_budget_bytes=None)
    )
    capacity = problem.machine.device_bytes
    largest = min(capacity, undecided_peak_bytes(problem))
    solved = plans_by_budget(
        problem, largest_bytes=largest, num_points=num_points, time_limit_s=time_limit_s, work_s=work_s
    )
    points = [_prediction(step, here, "planned", tokens, plan) for here, plan in solved]
    baselines = tuple(p for p in replayed if fits(within_host, p.plan))
    return Sweep(points=tuple(points), baselines=baselines, capacity_bytes=capacity)
