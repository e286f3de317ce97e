"""Say why nothing fits: in comes a problem without a plan, out comes the error that a user can act on."""

from dataclasses import replace

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Problem
from autohete_fx.planner.formulation import Program
from autohete_fx.planner.simulate import simulate

_SEARCH_S = 10.0
_NAMED = 4


def infeasible(problem: Problem) -> InfeasiblePlanError:
    """The error for a problem without a plan: the smallest budget that would do, where it binds and on what."""
    assert problem.device_budget_bytes is not None or problem.host_budget_bytes is not None
    if problem.host_budget_bytes is not None and _fits_without_host_budget(problem):
        return _host_error(problem)
    program = Program(problem)
    program.minimize_peak()
    least = program.solve(limit_s=_SEARCH_S)
    if least.decisions is None:
        return _host_error(problem)
    replayed = simulate(replace(problem, device_budget_bytes=None), least.decisions)
    largest = ", ".join(f"{c.name} {_mib(c.num_bytes)}" for c in replayed.contributors[:_NAMED])
    disallowed = _disallowed(problem)
    advice = f"; or allow {disallowed}" if disallowed else ""
    assert problem.device_budget_bytes is not None
    where = f"the {replayed.peak_phase} of {problem.labels[replayed.peak_block]!r}"
    return too_small(
        problem.device_budget_bytes, replayed.peak_bytes, f"It is held up in {where}, by {largest}", advice
    )


def too_small(budget_bytes: int, smallest_bytes: int, held_up_by: str, advice: str = "") -> InfeasiblePlanError:
    """The error for a device budget that no plan keeps."""
    return InfeasiblePlanError(
        f"no plan fits memory_budget {_mib(budget_bytes)}: the smallest that would do is {_mib(smallest_bytes)}"
        f" ({smallest_bytes} bytes). {held_up_by}. Set memory_budget to at least {smallest_bytes}, or use a smaller"
        f" batch{advice}",
        smallest_budget_bytes=smallest_bytes,
        held_up_by=held_up_by,
    )


def _fits_without_host_budget(problem: Problem) -> bool:
    free = replace(problem, host_budget_bytes=None)
    program = Program(free)
    program.minimize_peak()
    answer = program.solve(limit_s=_SEARCH_S)
    if answer.decisions is None:
        return False
    budget = problem.device_budget_bytes
    return budget is None or simulate(free, answer.decisions, events=False).peak_bytes <= budget


def _host_error(problem: Problem) -> InfeasiblePlanError:
    assert problem.host_budget_bytes is not None, "without a host budget some plan has a least peak"
    program = Program(replace(problem, host_budget_bytes=None))
    program.minimize_host()
    answer = program.solve(limit_s=_SEARCH_S)
    return InfeasiblePlanError(
        f"no plan fits host_budget {_mib(problem.host_budget_bytes)}: within the device budget at least"
        f" {_mib(int(answer.bound))} of host memory are needed; raise host_budget or memory_budget",
        smallest_budget_bytes=problem.device_budget_bytes or 0,
    )


def _disallowed(problem: Problem) -> str:
    words = {
        "recompute": problem.allow_recompute,
        "offload_activations": problem.allow_offload_activations,
        "host_params": problem.allow_host_params,
        "host_optimizer": problem.allow_host_optimizer,
    }
    return ", ".join(word for word, allowed in words.items() if not allowed)


def _mib(num_bytes: int) -> str:
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 1 else f"{num_bytes / 2**20:.2f} MiB"
