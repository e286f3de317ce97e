"""Why nothing fits: in comes a problem without a plan, out comes an error that says what would do.

The smallest device budget is found by minimising the peak under the host limit. Where the host limit itself is what
stands in the way, the error says so and by how much.
"""

from collections.abc import Sequence
from dataclasses import replace

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.planner.formulation import Program
from autohete_fx.planner.simulate import Simulation, host_bytes, simulate

LARGEST_SHOWN = 4


def human_bytes(num_bytes: int) -> str:
    """Such as ``3.20 GiB``, ``12.0 MiB`` or ``512 bytes``."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 2**20:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**10:.1f} KiB" if num_bytes >= 2**10 else f"{num_bytes} bytes"


def smallest_peak(problem: Problem, *, limit_s: float) -> tuple[BlockDecision, ...] | None:
    """Decisions with the smallest device peak under the host limit, or None where no decisions keep to that limit.

    Exact unless ``limit_s`` runs out, when they are the best found.
    """
    program = Program(problem)
    program.minimize_peak()
    return program.solve(limit_s=limit_s).decisions


def infeasible(problem: Problem, *, limit_s: float) -> InfeasiblePlanError:
    """The error for a problem that no plan satisfies."""
    smallest = smallest_peak(problem, limit_s=limit_s)
    unlimited_host = replace(problem, host_budget_bytes=None)
    if smallest is None:
        return _host_limit_error(problem, smallest_peak(unlimited_host, limit_s=limit_s), limit_s)
    replay = simulate(problem, smallest)
    if problem.host_budget_bytes is not None:
        without_limit = smallest_peak(unlimited_host, limit_s=limit_s)
        if without_limit is not None and simulate(problem, without_limit, events=False).peak_bytes < replay.peak_bytes:
            return _both_limits_error(problem, replay, limit_s)
    budget = problem.device_budget_bytes
    assert budget is not None, "without limits there is always a plan"
    message = (
        f"no plan fits memory_budget {human_bytes(budget)} ({budget} bytes): the smallest that would do is "
        f"{human_bytes(replay.peak_bytes)} ({replay.peak_bytes} bytes). {_held_up(problem, replay)} "
        f"Raise memory_budget to {replay.peak_bytes} bytes, or use a smaller batch{_allow(problem)}."
    )
    return InfeasiblePlanError(message, smallest_budget_bytes=replay.peak_bytes)


def _held_up(problem: Problem, replay: Simulation) -> str:
    where = problem.labels[replay.peak_block] if problem.labels else "the whole graph"
    largest = ", ".join(f"{c.name} {human_bytes(c.num_bytes)}" for c in replay.contributors[:LARGEST_SHOWN])
    return f"What holds it up is the {replay.peak_phase} of {where}: {largest}."


def _allow(problem: Problem) -> str:
    """What the user has ruled out and might allow."""
    disallowed = [
        name
        for name, allowed in (
            ("recompute", problem.allow_recompute or not problem.training),
            ("activation offload", problem.allow_offload_activations or not problem.training),
            ("parameters on the host", problem.allow_host_params),
            ("the optimizer on the host", problem.allow_host_optimizer or not problem.training),
        )
        if not allowed
    ]
    return f", or allow {' and '.join(disallowed)}" if disallowed else ""


def _least_host(problem: Problem, limit_s: float) -> int | None:
    """Least host bytes of any plan within the device budget, or None where the device budget alone is too small."""
    unlimited_host = replace(problem, host_budget_bytes=None)
    program = Program(unlimited_host)
    program.minimize_host()
    decisions = program.solve(limit_s=limit_s).decisions
    if decisions is None:
        return None
    return sum(host_bytes(problem, block, decision) for block, decision in enumerate(decisions))


def _host_limit_error(
    problem: Problem, smallest: Sequence[BlockDecision] | None, limit_s: float
) -> InfeasiblePlanError:
    """Decisions made earlier hold more host memory than the limit, whatever the device budget."""
    assert smallest is not None, "without a host limit there is always a smallest peak"
    assert problem.host_budget_bytes is not None
    replay = simulate(problem, smallest)
    needed = _least_host(problem, limit_s)
    if needed is None:
        needed = replay.host_bytes
    message = (
        f"no plan fits the host memory limit of {human_bytes(problem.host_budget_bytes)} "
        f"({problem.host_budget_bytes} bytes), whatever memory_budget is: parameters and optimizer states that an "
        f"earlier graph of this model has put in host memory need {human_bytes(needed)} ({needed} bytes). "
        f"Raise the host memory limit to {needed} bytes; memory_budget must be at least {replay.peak_bytes} bytes."
    )
    return InfeasiblePlanError(message, smallest_budget_bytes=replay.peak_bytes)


def _both_limits_error(problem: Problem, replay: Simulation, limit_s: float) -> InfeasiblePlanError:
    """More host memory would let more leave the device."""
    assert problem.host_budget_bytes is not None and problem.device_budget_bytes is not None
    needed = _least_host(problem, limit_s)
    remedy = (
        "Host memory alone is not enough to keep the present memory_budget: raise both"
        if needed is None
        else f"Raise the host memory limit to {needed} bytes to keep the present memory_budget"
    )
    message = (
        f"no plan fits memory_budget {human_bytes(problem.device_budget_bytes)} ({problem.device_budget_bytes} bytes) "
        f"with host memory limited to {human_bytes(problem.host_budget_bytes)} ({problem.host_budget_bytes} bytes): "
        f"the host memory limit keeps more from leaving the device. With it, the smallest memory_budget that would do "
        f"is {human_bytes(replay.peak_bytes)} ({replay.peak_bytes} bytes). {_held_up(problem, replay)} {remedy}; or raise "
        f"memory_budget to {replay.peak_bytes} bytes, or use a smaller batch{_allow(problem)}."
    )
    return InfeasiblePlanError(message, smallest_budget_bytes=replay.peak_bytes)
