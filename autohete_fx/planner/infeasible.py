"""Say why nothing fits: in comes a problem without a plan, out comes the error that a user can act on.

Two limits can hold a plan up. The smallest device budget is found within the host budget as it is, and the smallest host budget
within the device budget as it is. Either does, if raised alone to what the error says.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.model.simulate import simulate

_SEARCH_S = 5.0
_LEAST_S = 1.0
_NAMED = 4


def least_peak(problem: Problem, *, deadline: float) -> tuple[BlockDecision, ...] | None:
    """Decisions of least device peak within the host budget; None where nothing keeps the host budget."""
    if not problem.costs:
        return ()
    program = Program(problem)
    program.minimize_peak()
    return program.solve(limit_s=_SEARCH_S, deadline=_later(deadline)).decisions


def infeasible(problem: Problem, *, deadline: float) -> InfeasiblePlanError:
    """The error for a problem without a plan: which limit holds it up, where, and what would do."""
    assert problem.device_budget_bytes is not None or problem.host_budget_bytes is not None
    smallest_host = _smallest_host_bytes(problem, deadline)
    least = least_peak(problem, deadline=deadline)
    if least is None:
        return _host_error(problem, smallest_host, deadline)
    replayed = simulate(replace(problem, device_budget_bytes=None), least)
    largest = ", ".join(f"{c.name} {format_bytes(c.num_bytes)}" for c in replayed.contributors[:_NAMED])
    assert problem.device_budget_bytes is not None
    label = problem.labels[replayed.peak_block] if problem.labels else "a graph without blocks"
    return too_small(
        problem.device_budget_bytes,
        replayed.peak_bytes,
        f"It is held up in the {replayed.peak_phase} of {label!r}, by {largest}",
        smallest_host_bytes=smallest_host,
        advice=advice_of(problem),
    )


def too_small(
    budget_bytes: int,
    smallest_bytes: int,
    held_up_by: str,
    *,
    smallest_host_bytes: int | None = None,
    advice: str = "",
    is_least: bool = True,
) -> InfeasiblePlanError:
    """The error for a device budget that no plan keeps; ``smallest_host_bytes`` where more host memory would help. ``is_least``:
    whether no smaller budget than ``smallest_bytes`` is known to do."""
    with_host = "" if smallest_host_bytes is None else " within host_budget"
    which = "the smallest" if is_least else "one"
    or_host = "" if smallest_host_bytes is None else f" or host_budget to at least {smallest_host_bytes}"
    return InfeasiblePlanError(
        f"no plan fits memory_budget {format_bytes(budget_bytes)}{with_host}: {which} that would do is"
        f" {format_bytes(smallest_bytes)} ({smallest_bytes} bytes). {held_up_by}. Set memory_budget to at least"
        f" {smallest_bytes}{or_host}, or use a smaller batch{advice}",
        smallest_budget_bytes=smallest_bytes,
        smallest_host_budget_bytes=smallest_host_bytes,
        held_up_by=held_up_by,
    )


def broken_up(error: InfeasiblePlanError, graph_breaks: Sequence[str]) -> InfeasiblePlanError:
    """The same error, which names the graph breaks that made the call more than one graph, if there are any."""
    if not graph_breaks:
        return error
    what = f"Graph breaks make the call several graphs, which share the budget: {'; '.join(graph_breaks)}"
    return InfeasiblePlanError(
        f"{error}. {what}",
        smallest_budget_bytes=error.smallest_budget_bytes,
        smallest_host_budget_bytes=error.smallest_host_budget_bytes,
        held_up_by=error.held_up_by,
    )


def _smallest_host_bytes(problem: Problem, deadline: float) -> int | None:
    """Least host memory within the device budget; None where there is no host budget, or none would do."""
    if problem.host_budget_bytes is None or not problem.costs:
        return None
    free = replace(problem, host_budget_bytes=None)
    program = Program(free)
    program.minimize_host()
    decisions = program.solve(limit_s=_SEARCH_S, deadline=_later(deadline)).decisions
    return None if decisions is None else simulate(free, decisions, events=False).host_bytes


def _host_error(problem: Problem, smallest_host_bytes: int | None, deadline: float) -> InfeasiblePlanError:
    """The error where the host budget alone rules everything out: what must be on the host does not fit there."""
    assert problem.host_budget_bytes is not None, "without a host budget some plan has a least peak"
    needed, also = smallest_host_bytes, ""
    if needed is None:
        needed = _smallest_host_bytes(replace(problem, device_budget_bytes=None), deadline)
        assert needed is not None, "without a device budget there is a plan"
        also = "; memory_budget is too small besides"
    return InfeasiblePlanError(
        f"no plan fits host_budget {format_bytes(problem.host_budget_bytes)}, whatever memory_budget is: at least"
        f" {format_bytes(needed)} ({needed} bytes) of host memory are needed. Set host_budget to at least {needed}{also}",
        smallest_budget_bytes=None,
        smallest_host_budget_bytes=smallest_host_bytes,
    )


def _later(deadline: float) -> float:
    """A deadline that leaves a little time to say why."""
    return max(deadline, time.monotonic() + _LEAST_S)


def advice_of(problem: Problem, *others: Problem) -> str:
    """The end of an error's last sentence: what else may be decided if the user wants so, and what stands in its way.

    ``others`` are the problems of other graphs of its call.
    """
    obstacles = {word: what for each in (*others, problem) for word, what in each.obstacles}
    disallowed = ", ".join(word for word in _disallowed(problem) if word not in obstacles)
    return (f"; or allow {disallowed}" if disallowed else "") + "".join(
        f". {what}" for what in obstacles.values() if what
    )


def _disallowed(problem: Problem) -> list[str]:
    words = {
        "recompute": problem.allow_recompute,
        "offload_activations": problem.allow_offload_activations,
        "host_params": problem.allow_host_params,
        "host_optimizer": problem.allow_host_optimizer,
    }
    return [word for word, allowed in words.items() if not allowed]


def without_frames(error: InfeasiblePlanError) -> InfeasiblePlanError:
    """The error, to be kept in a frame of those that raised it.

    They would keep each other, and with them the batch, until garbage is collected. Its traceback would, and that of the error
    that was being handled when it was raised.
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
