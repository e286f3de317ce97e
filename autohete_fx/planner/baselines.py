"""Strategies of other systems as plans: decided by rule, replayed by the simulator, of the same type as a solved plan."""

from collections.abc import Callable, Mapping

from autohete_fx.ir import Activations, BlockDecision, Optimizer, Params, Plan, Problem
from autohete_fx.planner.simulate import simulate


def evaluate(problem: Problem, decisions: tuple[BlockDecision, ...], status: str) -> Plan:
    """A plan of given decisions with the simulator's predictions; nothing is proven of it."""
    replayed = simulate(problem, decisions, events=False)
    return Plan(
        labels=problem.labels,
        decisions=decisions,
        step_s=replayed.step_s,
        peak_bytes=replayed.peak_bytes,
        host_bytes=replayed.host_bytes,
        disk_bytes=replayed.disk_bytes,
        schedule=problem.schedule,
        busy_s=replayed.busy_s,
        status=status,
        problem_digest=problem.digest,
    )


def _same(problem: Problem, decision: BlockDecision, status: str) -> Plan:
    return evaluate(problem, (decision,) * len(problem.costs), status)


def keep_all(problem: Problem) -> Plan:
    """Plain training: nothing recomputed, nothing moved."""
    return _same(problem, BlockDecision(), "keep-all")


def full_recompute(problem: Problem) -> Plan:
    """Every block is a checkpoint."""
    return _same(problem, BlockDecision(activations=Activations.RECOMPUTE), "full-recompute")


def zero_offload(problem: Problem) -> Plan:
    """ZeRO-Offload: all optimizer states and updates on the host, parameters on the device."""
    return _same(problem, BlockDecision(optimizer=Optimizer.HOST), "zero-offload")


def offload_everything(problem: Problem) -> Plan:
    """FSDP2's CPU offload: parameters, gradients and optimizer on the host, blocks recomputed."""
    decision = BlockDecision(
        activations=Activations.RECOMPUTE, params=Params.HOST, optimizer=Optimizer.HOST, prefetch_distance=1
    )
    return _same(problem, decision, "offload-everything")


BASELINES: Mapping[str, Callable[[Problem], Plan]] = {
    "keep-all": keep_all,
    "full-recompute": full_recompute,
    "zero-offload": zero_offload,
    "offload-everything": offload_everything,
}
"""By name."""
