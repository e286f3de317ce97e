"""Graphs that run one after another in a step, and share the device: their problems as one, and the plan that takes least.

In: the problems of graphs in the order of their forwards; their backwards come in the opposite order. The blocks of all
make up one problem, as if the graph between them had not been broken. Out: that problem, and its decisions graph by graph.
Why: planned one after the other, the first graph takes the whole budget.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autohete_fx.ir import Activations, BlockDecision, Edge, Optimizer, Params, Problem
from autohete_fx.planner.baselines import fits
from autohete_fx.planner.infeasible import least_peak
from autohete_fx.planner.model.choices import choices
from autohete_fx.planner.model.figures import kept_bytes, replicated_bytes
from autohete_fx.planner.model.simulate import simulate


def joined(problems: Sequence[Problem]) -> Problem:
    """One problem of all blocks. Limits and schedule are those of the last that trains parameters, as a loss does not; what each
    holds itself adds up."""
    training = [problem for problem in problems if any(cost.grad_bytes for cost in problem.costs)]
    last, edges, before = (training or problems)[-1], [], 0
    for problem in problems:
        edges += [
            Edge(producer=e.producer + before, consumer=e.consumer + before, num_bytes=e.num_bytes)
            for e in problem.edges
        ]
        before += len(problem.costs)
    return replace(
        last,
        labels=tuple(f"{index}/{label}" for index, problem in enumerate(problems) for label in problem.labels),
        costs=tuple(cost for problem in problems for cost in problem.costs),
        edges=tuple(edges),
        fixed_bytes=sum(problem.fixed_bytes for problem in problems),
        update_workspace_bytes=max(problem.update_workspace_bytes for problem in problems),
        slot_bytes=max(problem.slot_bytes for problem in problems),
        allow_host_optimizer=all(problem.allow_host_optimizer for problem in problems),
        fixed_decisions=tuple(
            decision for problem in problems for decision in problem.fixed_decisions or (None,) * len(problem.costs)
        ),
    )


def divided(problems: Sequence[Problem], decisions: Sequence[BlockDecision]) -> Iterator[tuple[BlockDecision, ...]]:
    """The decisions for each problem's blocks, out of those for the blocks of all."""
    begin = 0
    for problem in problems:
        yield tuple(decisions[begin : begin + len(problem.costs)])
        begin += len(problem.costs)


def leanest(problem: Problem, *, deadline: float) -> tuple[BlockDecision, ...] | None:
    """Decisions that leave little on the device between a graph's forward and its backward, and after it.

    Reloads make peaks: what leaves least offloads, what takes a little less at its peak recomputes. Where one of these keeps the
    budgets, the one that leaves least is taken. Else it is what takes least beside other graphs within the host budget, its peak
    and what it leaves added up. That may exceed the device budget though the plan of least peak keeps it, so that a budget which a
    refusal names is not refused. None where nothing keeps the host budget.
    """
    patterns = [_leaving_least(problem, offloads=offloads) for offloads in (True, False)]
    pairs = [(decisions, simulate(problem, decisions, events=False)) for decisions in patterns]
    fitting = [decisions for decisions, replayed in pairs if fits(problem, replayed)]
    if fitting:
        return min(fitting, key=lambda decisions: left_bytes(problem, decisions))
    least = least_peak(problem, deadline=deadline)
    if least is not None:
        pairs.append((least, simulate(problem, least, events=False)))
    roomy = replace(problem, device_budget_bytes=None)
    possible = [pair for pair in pairs if fits(roomy, pair[1])]
    if not possible:
        return None
    return min(possible, key=lambda pair: pair[1].peak_bytes + left_bytes(problem, pair[0]))[0]


def _leaving_least(problem: Problem, *, offloads: bool) -> tuple[BlockDecision, ...]:
    """Decisions, block by block; where something else may be done, activations are offloaded only if ``offloads``."""
    decisions = []
    for block in range(len(problem.costs)):
        allowed = choices(problem, block)
        if not offloads:
            allowed = tuple(d for d in allowed if d.activations is not Activations.OFFLOAD)
        decisions.append(min(allowed, key=lambda decision, block=block: _left_bytes(problem, block, decision)))
    return tuple(decisions)


def left_bytes(problem: Problem, decisions: Sequence[BlockDecision]) -> int:
    """Bytes that a graph leaves on the device: between its passes, and after them."""
    return sum(_left_bytes(problem, block, decision) for block, decision in enumerate(decisions))


def _left_bytes(problem: Problem, block: int, decision: BlockDecision) -> int:
    cost = problem.costs[block]
    at_home = cost.param_bytes if decision.params is Params.DEVICE else 0
    states = cost.states_at(decision, Optimizer.DEVICE)
    gradients = cost.part_at(cost.grad_bytes, decision, Optimizer.DEVICE, Optimizer.STREAMED)
    between = kept_bytes(problem, block, decision) + cost.activations(decision).staying_bytes
    at_home += replicated_bytes(problem, block, decision)
    return at_home + states + gradients + problem.in_flight * between
