"""Plans made by hand: in comes a problem, out comes what a known strategy would decide, with what it predicts.

They are of the same type as the planner's own and judged by the same replay, so that they compare. A baseline ignores
the budgets, and what the problem allows or pins: compare ``peak_bytes`` with the budget yourself.
"""

from collections.abc import Sequence

from autohete_fx.ir import Activations, BlockDecision, Optimizer, Params, Plan, Problem
from autohete_fx.planner.simulate import simulate


def evaluate(
    problem: Problem,
    decisions: Sequence[BlockDecision],
    status: str = "given",
    *,
    lower_bound_s: float = 0.0,
    solve_s: float = 0.0,
) -> Plan:
    """A plan of these decisions, with the replay's predictions.

    ``lower_bound_s`` is what was proven, in seconds; 0 where nothing was. A bound above the replayed time, as rounding
    may give, is taken for that time.
    """
    replay = simulate(problem, decisions, events=False)
    bound = min(lower_bound_s, replay.step_s)
    return Plan(
        labels=problem.labels,
        decisions=tuple(decisions),
        step_s=replay.step_s,
        peak_bytes=replay.peak_bytes,
        host_bytes=replay.host_bytes,
        busy_s=replay.busy_s,
        lower_bound_s=bound,
        gap=(replay.step_s - bound) / replay.step_s if replay.step_s else 0.0,
        status=status,
        problem_digest=problem.digest,
        solve_s=solve_s,
    )


def _everywhere(problem: Problem, decision: BlockDecision) -> Plan:
    return evaluate(problem, (decision,) * len(problem.costs))


def keep_all(problem: Problem) -> Plan:
    """Everything on the device: plain ``torch.compile``."""
    return _everywhere(problem, BlockDecision())


def full_recompute(problem: Problem) -> Plan:
    """Every block recomputed: full activation checkpointing."""
    return _everywhere(problem, BlockDecision(activations=Activations.RECOMPUTE))


def zero_offload(problem: Problem) -> Plan:
    """Every optimizer state and update on the host, parameters and activations on the device: ZeRO-Offload."""
    return _everywhere(problem, BlockDecision(optimizer=Optimizer.HOST))


def offload_everything(problem: Problem) -> Plan:
    """Activations, parameters and optimizer states of every block in host memory."""
    everything = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
    return _everywhere(problem, everything)
