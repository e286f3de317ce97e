"""Strategies of other systems as plans: decided by rule, replayed by the simulator, of the same type as a solved plan.

Each has few free numbers, and where ranks share blocks the choice between gathering all again and keeping all. Those are set to
what is fastest within the budgets, as a careful user of that system would. Where nothing keeps them, they are set to what has
the least peak, and the plan says by its ``peak_bytes`` that it does not fit. A strategy brings its own schedule, whatever the
problem's is; on a CPU device updates never overlap.

Checkpointing in segments of sqrt(n) blocks (Chen et al., arXiv 1604.06174) is not among them. It drops the boundaries inside a
segment and computes the whole segment again at once. No decisions of single blocks say that: each keeps its boundary. The
nearest plan is `full_recompute`, whose segments are single blocks. It takes the same time, and less memory up to (saved /
boundary)**2 blocks. In return for boundaries a longer segment holds the activations of all its blocks at once.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autohete_fx.ir import Activations, BlockDecision, Optimizer, Overlap, Params, Plan, Problem, Schedule
from autohete_fx.planner.model.figures import limits_of, whole_of
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.simulation import Simulation
from autohete_fx.planner.search.improve import Search
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.slots import without_streaming

Decisions = tuple[BlockDecision, ...]

_MOST_VALUES = 24
"""How many values of one of AutoHete's three integers are tried; for more blocks, evenly spread."""
_CHUNK = 1024
_SYNCHRONOUS = Schedule(overlap=Overlap.NONE)
_ON_ARRIVAL = Schedule(overlap=Overlap.BACKWARD, priority=False)
_BY_PRIORITY = Schedule(overlap=Overlap.BACKWARD)


def evaluate(problem: Problem, decisions: Decisions, status: str) -> Plan:
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


def fits(problem: Problem, replayed: Simulation | Plan) -> bool:
    """Whether a replay keeps all budgets of a problem."""
    used = replayed.peak_bytes, replayed.host_bytes, replayed.disk_bytes
    pairs = zip(used, limits_of(problem), strict=True)
    return all(limit is None or num_bytes <= limit for num_bytes, limit in pairs)


def keep_all(problem: Problem) -> Plan:
    """Plain training: nothing recomputed, nothing moved."""
    return _same(problem, BlockDecision(), "keep-all")


def full_recompute(problem: Problem) -> Plan:
    """Every block is a checkpoint: its boundary is kept, the rest computed again, block by block."""
    return _same(problem, BlockDecision(activations=Activations.RECOMPUTE), "full-recompute")


def zero_offload(problem: Problem) -> Plan:
    """ZeRO-Offload: all optimizer states and updates on the host, inside the step; parameters on the device."""
    return _best(
        problem,
        _settings(problem, [(BlockDecision(optimizer=Optimizer.HOST),) * _count(problem)]),
        "zero-offload",
    )


def twin_flow(problem: Problem) -> Plan:
    """ZeRO-Offload++: as ZeRO-Offload, for as many of the last blocks as must be."""
    rows = (_split(problem, BlockDecision(), BlockDecision(optimizer=Optimizer.HOST), n) for n in _sizes(problem))
    return _best(problem, _settings(problem, rows), "twin-flow")


def offload_everything(problem: Problem) -> Plan:
    """FSDP2's CPU offload: parameters, gradients and optimizer on the host, updates after backward."""
    decision = BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST)
    rows = ((replace(decision, prefetch_distance=distance),) * _count(problem) for distance in (1, 2))
    return _best(problem, _settings(problem, rows), "offload-everything")


def chunks_on_demand(problem: Problem) -> Plan:
    """Like PatrickStar: parameters come when they are needed; states stay on the device for as many blocks as fit."""
    host = BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST)
    rows = (_split(problem, replace(host, optimizer=Optimizer.DEVICE), host, n) for n in _sizes(problem))
    return _best(problem, _settings(problem, rows), "chunks-on-demand")


def working_window(problem: Problem) -> Plan:
    """Like StrongHold: the first layers stay, the others pass through a window; the host updates as gradients arrive."""
    host = BlockDecision(optimizer=Optimizer.HOST)
    rows = (
        _split(problem, host, replace(host, params=Params.HOST, prefetch_distance=distance), n)
        for n in _sizes(problem)
        for distance in (1, 2, 4)
    )
    overlapping = replace(problem, schedule=_ON_ARRIVAL)
    return _best(problem, _settings(problem, rows), "working-window", overlapping)


def three_integers(problem: Problem) -> Plan:
    """AutoHete's own program: the first blocks recompute, the first fetch their parameters, the last update on the host."""
    return _three_integers(problem, _BY_PRIORITY, "three-integers")


def three_integers_on_arrival(problem: Problem) -> Plan:
    """AutoHete's program without its priority schedule: updates in the order in which gradients arrive."""
    return _three_integers(problem, _ON_ARRIVAL, "three-integers-on-arrival")


def always_regather(problem: Problem) -> Plan:
    """ZeRO-3: all ranks' shards are gathered for every forward and again for every backward; nothing leaves the device."""
    return _best(problem, _with_and_without_recompute([_gathered(problem, keeps=False)]), "always-regather")


def always_keep(problem: Problem) -> Plan:
    """ZeRO-2's traffic: what a forward gathered stays until its backward. With one rank that is what `always_regather` does."""
    return _best(problem, _with_and_without_recompute([_gathered(problem, keeps=True)]), "always-keep")


def _gathered(problem: Problem, *, keeps: bool) -> Decisions:
    """All blocks at home on the device, those that gather again kept or not."""
    row = (BlockDecision(),) * _count(problem)
    return _kept(problem, row) if keeps else row


def _kept(problem: Problem, row: Decisions) -> Decisions:
    """As given, but blocks that gather again for their backward keep what they gathered."""
    again = (whole_of(problem, block).gathered_again > 0 for block in range(_count(problem)))
    return tuple(
        replace(decision, keeps_fetched=decision.keeps_fetched or (problem.training and gathers))
        for decision, gathers in zip(row, again, strict=True)
    )


def _three_integers(problem: Problem, schedule: Schedule, status: str) -> Plan:
    overlapping = without_streaming(replace(problem, schedule=schedule))
    count = _count(problem)
    if not count:
        return evaluate(overlapping, (), status)
    kinds = [
        BlockDecision(activations=activations, params=params, optimizer=optimizer)
        for activations in (Activations.KEEP, Activations.RECOMPUTE)
        for params in (Params.DEVICE, Params.HOST)
        for optimizer in (Optimizer.DEVICE, Optimizer.HOST)
    ]
    sharings = [list(zip(*rows, strict=True)) for rows in _by_sharing(problem, [(kind,) * count for kind in kinds])]
    plans = [_best_integers(overlapping, of_blocks, status) for of_blocks in sharings]
    fitting = [plan for plan in plans if plan is not None]
    least = (kinds[-1],) * count
    return min(fitting, key=lambda plan: plan.step_s) if fitting else evaluate(overlapping, least, status)


def _best_integers(problem: Problem, kinds: Sequence[Sequence[BlockDecision]], status: str) -> Plan | None:
    """The fastest within the budgets, given for each block its eight decisions; None if none is."""
    count = len(kinds)
    replays = Replays(problem, kinds)
    sizes = np.array(list(_sizes(problem)))
    recomputed, fetched, updated = (grid.reshape(-1, 1) for grid in np.meshgrid(sizes, sizes, sizes, indexing="ij"))
    at = np.arange(count)
    kind = 4 * (at < recomputed) + 2 * (at < fetched) + (at >= count - updated)
    search = Search(replays, deadline=math.inf)
    found: list[Plan] = []
    # The safe prefetch: as far ahead as memory allows, for all blocks alike.
    for distance in range(1, replays.farthest + 1):
        ahead = [[replace(decision, prefetch_distance=distance) for decision in of_block] for of_block in kinds]
        settings = np.array([replays.row(row) for row in zip(*ahead, strict=True)])
        rows = settings[kind, at]
        rows = np.concatenate([part[search.fitting(part)] for part in np.array_split(rows, 1 + len(rows) // _CHUNK)])
        if len(rows):
            best = rows[int(np.argmin(replays.seconds(rows)))]
            found.append(evaluate(problem, replays.decisions(best), status))
    return min(found, key=lambda plan: plan.step_s) if found else None


def _same(problem: Problem, decision: BlockDecision, status: str) -> Plan:
    return evaluate(replace(problem, schedule=_SYNCHRONOUS), (decision,) * _count(problem), status)


def _count(problem: Problem) -> int:
    return len(problem.costs)


def _sizes(problem: Problem) -> Iterable[int]:
    """How many blocks a strategy may take: all numbers, or for many blocks some that are evenly spread."""
    count = _count(problem)
    return (int(n) for n in np.unique(np.linspace(0, count, min(count, _MOST_VALUES) + 1).round()))


def _split(problem: Problem, first: BlockDecision, last: BlockDecision, num_last: int) -> Decisions:
    return (first,) * (_count(problem) - num_last) + (last,) * num_last


def _with_and_without_recompute(rows: Iterable[Decisions]) -> Iterable[Decisions]:
    for row in rows:
        yield row
        yield tuple(replace(decision, activations=Activations.RECOMPUTE) for decision in row)


def _by_sharing(problem: Problem, rows: Sequence[Decisions]) -> Iterable[Sequence[Decisions]]:
    """The rows as they are, and where ranks share blocks also with all that was gathered kept till backward."""
    yield rows
    kept = [_kept(problem, row) for row in rows]
    if kept != rows:
        yield kept


def _settings(problem: Problem, rows: Iterable[Decisions]) -> Iterable[Decisions]:
    """Every row with recomputation and without, gathering again and keeping."""
    for sharing in _by_sharing(problem, list(_with_and_without_recompute(rows))):
        yield from sharing


def _best(problem: Problem, rows: Iterable[Decisions], status: str, scheduled: Problem | None = None) -> Plan:
    """The fastest that keeps the budgets, or the one of least peak; synchronous unless ``scheduled``."""
    replayed = scheduled or replace(problem, schedule=_SYNCHRONOUS)
    plans = [evaluate(replayed, row, status) for row in rows]
    fitting = [plan for plan in plans if fits(problem, plan)]
    return min(fitting, key=lambda plan: plan.step_s) if fitting else min(plans, key=lambda plan: plan.peak_bytes)


BASELINES: Mapping[str, Callable[[Problem], Plan]] = {
    "keep-all": keep_all,
    "full-recompute": full_recompute,
    "zero-offload": zero_offload,
    "twin-flow": twin_flow,
    "offload-everything": offload_everything,
    "chunks-on-demand": chunks_on_demand,
    "working-window": working_window,
    "three-integers": three_integers,
    "three-integers-on-arrival": three_integers_on_arrival,
}
"""By name."""
SHARDED_BASELINES: Mapping[str, Callable[[Problem], Plan]] = {
    "always-regather": always_regather,
    "always-keep": always_keep,
}
"""Likewise, of systems whose ranks hold shards of a model."""
