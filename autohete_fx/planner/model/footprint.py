"""Device bytes of a plan: always, between forward and backward, until the step, and at its traced peak."""

from collections.abc import Sequence
from dataclasses import dataclass

from autohete_fx.ir import (
    BlockDecision,
    Optimizer,
    Params,
    Plan,
    Problem,
)
from autohete_fx.planner.model.device_use import streaming_peak_bytes
from autohete_fx.planner.model.figures import kept_bytes, replicated_bytes, waiting_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Device bytes of a graph that other graphs of the same model must leave alone.

    Attributes:
        resident_bytes: parameters, replicated ones included, and optimizer states on the device, always there.
        held_bytes: activations between the graph's forward and backward.
        gradient_bytes: gradients on the device after its backward.
    """

    resident_bytes: int = 0
    held_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that a later graph of the same step finds taken."""
        return self.resident_bytes + self.held_bytes + self.gradient_bytes


def footprint_of(problem: Problem, decisions: Sequence[BlockDecision]) -> Footprint:
    """The footprint of blocks under decisions, without what no decision changes."""
    plan = Plan(labels=problem.labels, decisions=tuple(decisions))
    return Footprint(
        resident_bytes=resident_bytes(problem, plan),
        held_bytes=held_bytes(problem, plan),
        gradient_bytes=device_gradient_bytes(problem, plan),
    )


def resident_bytes(problem: Problem, plan: Plan) -> int:
    """Parameters, replicated ones included, and optimizer states on the device."""
    pairs = list(zip(problem.costs, plan.decisions, strict=True))
    params = sum(cost.param_bytes for cost, decision in pairs if decision.params is Params.DEVICE)
    if not problem.training:
        return params
    params += sum(replicated_bytes(problem, block, decision) for block, decision in enumerate(plan.decisions))
    return params + sum(cost.states_at(d, Optimizer.DEVICE) for cost, d in pairs)


def device_gradient_bytes(problem: Problem, plan: Plan) -> int:
    """Gradients that stay on the device until the step."""
    pairs = zip(problem.costs, plan.decisions, strict=True)
    return sum(cost.part_at(cost.grad_bytes, d, Optimizer.DEVICE, Optimizer.STREAMED) for cost, d in pairs)


def held_bytes(problem: Problem, plan: Plan) -> int:
    """Activations, and copies of parameters that stay, on the device between forward and backward, for all micro-batches
    in flight."""
    total = 0
    for block, (cost, decision) in enumerate(zip(problem.costs, plan.decisions, strict=True)):
        total += kept_bytes(problem, block, decision) + cost.activations(decision).staying_bytes
        total += waiting_bytes(problem, block, decision)
    return total


def traced_peak_bytes(problem: Problem, plan: Plan, intermediate_bytes: int) -> int:
    """Peak device memory of a step, given the traced peak of the rewritten graphs' intermediates.

    The trace knows fusion and the order of nodes, which the per-block model does not. With several micro-batches the
    gradients of the earlier ones are there all along, and with several in flight what the others hold. Only the model knows the
    bytes that streamed states need until their update.
    """
    resident = problem.fixed_bytes + resident_bytes(problem, plan)
    if not problem.training:
        return resident + intermediate_bytes
    gradients = device_gradient_bytes(problem, plan)
    accumulated = gradients if problem.accumulates else 0
    accumulated += sum(waiting_bytes(problem, block, decision) for block, decision in enumerate(plan.decisions))
    streaming = streaming_peak_bytes(problem, plan.decisions)
    stepping = gradients + problem.update_workspace_bytes
    return max(resident + max(accumulated + intermediate_bytes, stepping), streaming)
