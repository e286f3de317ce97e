"""Tables: a plan, its transfers, and a comparison of runs, as text of aligned columns."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autohete_fx.ir import Activations, BlockCost, BlockDecision, Lane, Optimizer, Params, Plan, Transfer
from autohete_fx.ir.decision import GATHER_DISTANCE
from autohete_fx.ir.labels import label_pattern, run_label
from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.planner.model.device_memory import MemoryLevel

__all__ = ["ComparisonRow", "aligned", "comparison_table", "memory_table", "plan_table", "transfers_table"]

_LONGEST_NAME = 28


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One run, or one prediction of it. None: not known.

    Attributes:
        name: the first column.
        step_s: seconds of one optimizer step.
        peak_bytes: peak device memory.
        tokens_per_s: training throughput.
    """

    name: str
    step_s: float | None = None
    peak_bytes: int | None = None
    tokens_per_s: float | None = None


def plan_table(
    plan: Plan,
    costs: Sequence[BlockCost] | None = None,
    gathered_again: Collection[int] | None = None,
    gathered: Collection[int] | None = None,
) -> str:
    """The plan as a table, one row per run of blocks that are decided (and cost) alike, totals below.

    Args:
        plan: what to show.
        costs: one per block; adds three columns of bytes *per block*: what its activations, parameters and optimizer
            states are, wherever they live.
        gathered_again: blocks whose backward gathers shards of parameters once more; None: those that the costs tell of.
        gathered: blocks that gather shards at all, likewise. Where there are any, a column says how many blocks ahead.
    """
    assert costs is None or len(costs) == len(plan.decisions), "one cost a block"
    if gathered_again is None:
        gathered_again = [at for at, cost in enumerate(costs or ()) if cost.gathered_again_bytes > 0]
    if gathered is None:
        gathered = [at for at, cost in enumerate(costs or ()) if cost.gathered_bytes > 0]
    header = ["block", "activations", "parameters", "optimizer", "prefetch"]
    header += ["gather"] if gathered else []
    header += ["act. bytes", "param. bytes", "opt. bytes"] if costs else []
    rows = []
    for indices in _alike(plan, costs, gathered_again, gathered):
        decision = plan.decisions[indices[0]]
        row = [
            run_label([plan.labels[i] for i in indices]),
            _activations(decision, costs[indices[0]] if costs else None),
            _params(decision, indices[0] in gathered_again),
            _optimizer(decision, costs[indices[0]] if costs else None),
            str(decision.prefetch_distance) if _uses_host(decision) else "-",
        ]
        if gathered:
            row.append(str(GATHER_DISTANCE) if indices[0] in gathered else "-")
        if costs:
            cost = costs[indices[0]]
            row += [format_bytes(n) for n in (cost.saved_bytes, cost.param_bytes, cost.optimizer_bytes)]
        rows.append(row)
    table = aligned(header, rows, right_from=4)
    return "\n".join([table, *(_byte_totals(plan, costs) if costs else ()), *_predictions(plan)])


def comparison_table(rows: Sequence[ComparisonRow], baseline: str | None = None) -> str:
    """Runs and predictions side by side; with ``baseline``, the name of a row, each figure also as a ratio to it."""
    base = next((row for row in rows if row.name == baseline), None)
    assert baseline is None or base is not None, f"no row is named {baseline!r}"
    columns: list[tuple[str, Callable[[ComparisonRow], float | None], Callable[[float], str]]] = [
        ("step time", lambda row: row.step_s, format_seconds),
        ("peak memory", lambda row: row.peak_bytes, format_bytes),
        ("tokens/s", lambda row: row.tokens_per_s, lambda rate: f"{rate:,.0f}"),
    ]
    columns = [column for column in columns if any(column[1](row) is not None for row in rows)]
    header = [""]
    for title, _, _ in columns:
        header += [title, f"vs {baseline}"] if base else [title]
    body = []
    for row in rows:
        cells = [row.name]
        for _, value_of, shown in columns:
            value, base_value = value_of(row), value_of(base) if base else None
            cells.append("-" if value is None else shown(value))
            if base:
                cells.append(f"{value / base_value:.2f}x" if value is not None and base_value else "-")
        body.append(cells)
    return aligned(header, body, right_from=1)


def transfers_table(transfers: Sequence[Transfer]) -> str:
    """The copies of a rewritten graph in schedule order, with the node after which each starts and what needs it."""
    if not transfers:
        return "no transfers"
    header = ["graph", "op", "block", "lane", "priority", "bytes", "issued after", "needed by"]
    rows = [
        [
            transfer.graph,
            transfer.op,
            str(transfer.block),
            transfer.lane.value,
            str(transfer.priority),
            format_bytes(transfer.num_bytes),
            _shortened(transfer.waits_on) or "(start)",
            _shortened(transfer.needed_by),
        ]
        for transfer in transfers
    ]
    table = aligned(header, rows, right_from=2, right_until=6)
    by_lane = sorted({transfer.lane for transfer in transfers}, key=lambda lane: lane.index)
    totals = [
        f"{lane.value} {format_bytes(sum(t.num_bytes for t in transfers if t.lane is lane))}"
        f" in {sum(t.lane is lane for t in transfers)}"
        for lane in by_lane
    ]
    return f"{table}\n{len(transfers)} transfers: {', '.join(totals)}"


def memory_table(plan: Plan, levels: Sequence[MemoryLevel]) -> str:
    """The predicted device memory over a step, a moment a row, and who holds it when it is most. It is the planner's own count:
    the plan's peak may be that of a trace of the code."""
    if not levels:
        return "no memory is predicted"
    peak = max(levels, key=lambda level: level.num_bytes)
    rows = [
        [format_seconds(level.at_s), level.phase, plan.labels[level.block], format_bytes(level.num_bytes)]
        for level in levels
    ]
    held = ", ".join(f"{part.name} {format_bytes(part.num_bytes)}" for part in peak.held)
    return (
        f"{aligned(['at', 'work', 'block', 'device memory'], rows, right_from=3)}\n"
        f"peak {format_bytes(peak.num_bytes)}, {peak.phase} of {plan.labels[peak.block]}: {held}"
    )


def _alike(
    plan: Plan, costs: Sequence[BlockCost] | None, gathered_again: Collection[int], gathered: Collection[int]
) -> Iterator[list[int]]:
    """Runs of consecutive blocks whose labels differ in their last number only, and whose rows would be equal."""

    def key(i: int) -> tuple[object, ...]:
        decision, cost = plan.decisions[i], costs[i] if costs else None
        shown = (cost.saved_bytes, cost.param_bytes, cost.optimizer_bytes) if cost else ()
        if not _uses_host(decision):
            decision = replace(decision, prefetch_distance=1)  # of no meaning then, and not shown
        return label_pattern(plan.labels[i]), decision, _params(decision, i in gathered_again), i in gathered, shown

    for _, run in groupby(range(len(plan.decisions)), key):
        yield list(run)


def _activations(decision: BlockDecision, cost: BlockCost | None) -> str:
    """``offload 2 of 5`` where some tensors stay; without costs nobody knows of how many."""
    if decision.num_offloaded is None:
        return decision.activations.value
    of = f" of {len(cost.offloadable)}" if cost else " largest"
    return f"{decision.activations.value} {decision.num_offloaded}{of}"


def _params(decision: BlockDecision, is_gathered_again: bool) -> str:
    """``host, kept`` where one fetch does for both passes; where ranks share the block ``device, replicated``, ``device, kept till
    backward`` or ``device, gathered again``."""
    if decision.replicates:
        return f"{decision.params.value}, replicated"
    if decision.keeps_fetched:
        till = " till backward" if is_gathered_again or decision.params is Params.DEVICE else ""
        return f"{decision.params.value}, kept{till}"
    return f"{decision.params.value}, gathered again" if is_gathered_again else decision.params.value


def _optimizer(decision: BlockDecision, cost: BlockCost | None) -> str:
    """``host 2 of 4`` where states of some parameters stay on the device, ``host 2 of 4, streamed`` where they are streamed;
    without costs nobody knows of how many."""
    if decision.num_moved_states is None:
        return decision.optimizer.value
    of = f" of {len(cost.trained)}" if cost else " smallest"
    others = "" if decision.other_states is Optimizer.DEVICE else f", {decision.other_states.value}"
    return f"{decision.optimizer.value} {decision.num_moved_states}{of}{others}"


def _uses_host(decision: BlockDecision) -> bool:
    return decision.activations is Activations.OFFLOAD or decision.params is Params.HOST


def _byte_totals(plan: Plan, costs: Sequence[BlockCost]) -> Iterator[str]:
    """What each kind of bytes adds up to, and how much of it the plan takes off the device."""
    yield ""
    moved = {
        "activations": (
            [cost.saved_bytes for cost in costs],
            [
                cost.saved_bytes - cost.activations(decision).staying_bytes
                for cost, decision in zip(costs, plan.decisions, strict=True)
            ],
        ),
        "parameters": (
            [cost.param_bytes for cost in costs],
            [cost.param_bytes for cost, d in zip(costs, plan.decisions, strict=True) if d.params is Params.HOST],
        ),
        "optimizer": (
            [cost.optimizer_bytes for cost in costs],
            [
                cost.optimizer_bytes - cost.states_at(d, Optimizer.DEVICE)
                for cost, d in zip(costs, plan.decisions, strict=True)
            ],
        ),
    }
    for name, (total, freed) in moved.items():
        yield f"{name:<16}{format_bytes(sum(total))} in all, {format_bytes(sum(freed))} of it off the device"


def _predictions(plan: Plan) -> Iterator[str]:
    yield ""
    if not plan.step_s and not plan.peak_bytes:
        yield f"status          {plan.status} (no predictions)"
        return
    yield f"predicted step  {format_seconds(plan.step_s)}"
    yield f"predicted peak  {format_bytes(plan.peak_bytes)} on the device, {format_bytes(plan.host_bytes)} on the host"
    if plan.busy_s:
        shares = (
            f"{time.lane.value} {format_seconds(time.busy_s)}"
            + (f" ({time.busy_s / plan.step_s:.0%})" if plan.step_s else "")
            for time in plan.busy_s
            if time.busy_s or time.lane is not Lane.NET  # one rank has no net
        )
        yield f"lanes busy      {', '.join(shares)}"
    solved = f", solved in {format_seconds(plan.solve_s)}" if plan.solve_s else ""
    bound = f", no plan beats {format_seconds(plan.lower_bound_s)} (gap {plan.gap:.1%})" if plan.lower_bound_s else ""
    yield f"status          {plan.status}{bound}{solved}"


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 10]}..{name[-8:]}"


def aligned(
    header: Sequence[str], rows: Sequence[Sequence[str]], right_from: int, right_until: int | None = None
) -> str:
    """Columns two spaces apart under a rule; those from ``right_from`` to before ``right_until`` aligned right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    right = range(right_from, len(header) if right_until is None else right_until)
    lines = [
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
