"""The text of a what-if plan: predictions and sweeps as text, as JSON values, and as a plot."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autohete_fx.compiler.compilation import replayed
from autohete_fx.ir import Lane
from autohete_fx.ir.sizes import format_bytes, format_count, format_seconds
from autohete_fx.report import plan_table
from autohete_fx.report.plots import PlotPoint, draw_budget_curve
from autohete_fx.report.tables import ComparisonRow, aligned, comparison_table
from autohete_fx.report.why import binding_lane, why
from autohete_fx.whatif.predict import Prediction, Scaling, Sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The question.

    Attributes:
        model, dtype: as given.
        batch, seq: sequences of a micro-batch of one rank, and tokens of each. Inputs of a factory that are no token ids have
            one example each.
        source: where the machine's figures come from.
        peak_flops_per_s: what the utilization refers to, and in words.
        num_nodes: on which the ranks are.
        traced_layers: how many layers were traced of the model's.
        trace_s: seconds that tracing and profiling took.
    """

    model: str
    batch: int
    seq: int
    dtype: str
    source: str
    peak_flops_per_s: float
    peak_name: str
    traced_layers: int
    trace_s: float
    num_nodes: int = 1


def prediction_text(setting: Setting, given: Prediction, more: Sequence[Prediction], *, explain: bool = False) -> str:
    """The plan, what it predicts, what each lane does, what more would buy, and where asked for why the plan is as it is."""
    plan = given.plan
    lines = [
        *_heading(setting, given),
        "",
        plan_table(plan),
        f"throughput      {given.tokens_per_s:,.0f} tokens/s, {given.utilization(setting.peak_flops_per_s):.1%} of"
        f" {setting.peak_name}",
        *_of_ranks(given),
        "",
        _lanes_table(given),
    ]
    if more:
        rows = [_row(given.name, given), *(_row(prediction.name, prediction) for prediction in more)]
        lines += ["", "what more would buy", comparison_table(rows, baseline=given.name)]
    if explain:
        lines += ["", "why", why(plan)]
    return "\n".join(lines)


def sweep_text(setting: Setting, sweep: Sweep) -> str:
    """The budget-time curve and the baselines as tables."""
    rows = [_row(_budget_name(point), point) for point in sweep.points]
    baselines = [_row(point.name, point) for point in sweep.baselines]
    lines = [
        *_heading(setting, sweep.points[-1]),
        "",
        "step time by device budget",
        comparison_table(rows, rows[-1].name),
    ]
    if baselines:
        fits = [point.plan.peak_bytes <= sweep.capacity_bytes for point in sweep.baselines]
        lines += [
            "",
            "strategies of other systems, whatever memory they take; each updates when its system does",
            comparison_table(baselines),
        ]
        if not all(fits):
            lines.append(f"those above {format_bytes(sweep.capacity_bytes)} do not fit the device")
    return "\n".join(lines)


def scaling_text(setting: Setting, scaling: Scaling) -> str:
    """Step time and throughput by number of ranks as a table."""
    found = [point for point in scaling.points if point is not None]
    first = found[0]
    per_rank = first.tokens_per_s / first.problem.num_ranks
    rows = [
        [str(count), *(_scaling_cells(point, per_rank) if point is not None else ["no plan fits", *6 * ["-"]])]
        for count, point in zip(scaling.num_ranks, scaling.points, strict=True)
    ]
    header = ["ranks", "step time", "tokens/s", "of linear", "peak a rank", "host a rank", "net", "binds"]
    return "\n".join(
        [
            *_heading(setting, found[-1])[:1],
            f"on {first.problem.machine.device_name}, {setting.source}, one node",
            "",
            "step time by number of ranks, each with that batch",
            aligned(header, rows, right_from=1, right_until=7),
        ]
    )


def _scaling_cells(point: Prediction, per_rank: float) -> list[str]:
    plan, lane = point.plan, binding_lane(point.plan)
    return [
        format_seconds(plan.step_s),
        f"{point.tokens_per_s:,.0f}",
        f"{point.tokens_per_s / (per_rank * point.problem.num_ranks):.0%}",
        format_bytes(plan.peak_bytes),
        format_bytes(plan.host_bytes),
        f"{net_share(point):.0%}",
        "-" if lane is None else lane.value,
    ]


def net_share(prediction: Prediction) -> float:
    """The share of the step that the net lane works."""
    busy_s = sum(time.busy_s for time in prediction.plan.busy_s if time.lane is Lane.NET)
    return busy_s / prediction.plan.step_s


def draw_sweep(setting: Setting, sweep: Sweep, path: str | Path) -> None:
    """The curve with the baselines as points, as a PNG file. Raises OptionError where it cannot be drawn."""
    title = f"{setting.model}, batch {setting.batch} x {setting.seq}, {sweep.points[0].problem.machine.device_name}"
    curve = [PlotPoint(num_bytes=p.problem.device_budget_bytes or 0, step_s=p.plan.step_s) for p in sweep.points]
    points = [PlotPoint(num_bytes=p.plan.peak_bytes, step_s=p.plan.step_s, name=p.name) for p in sweep.baselines]
    draw_budget_curve(path, title, curve, points, sweep.capacity_bytes)


def prediction_json(setting: Setting, given: Prediction, more: Sequence[Prediction]) -> str:
    """Everything that the text says, and the plan itself, as one JSON object."""
    step_s = given.plan.step_s
    return _json(
        {
            **_setting_values(setting, given),
            **_values(setting, given),
            **_lane_values(given),
            "lanes": [
                {"lane": lane.value, "busy_s": busy_s, "share": busy_s / step_s, "work_s": work}
                for lane, busy_s, work in _lanes(given)
            ],
            "more": [_values(setting, prediction) for prediction in more],
            "plan": json.loads(given.plan.to_json()),
        }
    )


def sweep_json(setting: Setting, sweep: Sweep) -> str:
    """The curve and the baselines as one JSON object."""
    return _json(
        {
            **_setting_values(setting, sweep.points[-1]),
            "capacity_bytes": sweep.capacity_bytes,
            "points": [_values(setting, point) for point in sweep.points],
            "baselines": [_values(setting, point) for point in sweep.baselines],
        }
    )


def scaling_json(setting: Setting, scaling: Scaling) -> str:
    """The points as one JSON object, null where no plan fits."""
    first = next(point for point in scaling.points if point is not None)
    common = {k: v for k, v in _setting_values(setting, first).items() if k not in ("num_ranks", "tokens")}
    points = [
        {"num_ranks": count, "prediction": None if point is None else _values(setting, point) | _lane_values(point)}
        for count, point in zip(scaling.num_ranks, scaling.points, strict=True)
    ]
    return _json({**common, "points": points})


def _lane_values(prediction: Prediction) -> dict[str, Any]:
    lane = binding_lane(prediction.plan)
    return {"net_share": net_share(prediction), "binds": None if lane is None else lane.value}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1)


def _setting_values(setting: Setting, prediction: Prediction) -> dict[str, Any]:
    problem = prediction.problem
    return {
        "model": setting.model,
        "num_params": prediction.num_params,
        "batch": setting.batch,
        "seq": setting.seq,
        "micro_batches": problem.micro_batches,
        "num_ranks": problem.num_ranks * problem.num_replicas,
        "num_replicas": problem.num_replicas,
        "num_nodes": setting.num_nodes,
        "dtype": setting.dtype,
        "device": problem.machine.device_name,
        "device_source": setting.source,
        "schedule": {"overlap": problem.schedule.overlap.value, "clips_gradients": problem.clips_gradients},
        "flops": prediction.flops,
        "tokens": prediction.tokens,
        "trace_s": setting.trace_s,
    }


def _values(setting: Setting, prediction: Prediction) -> dict[str, Any]:
    plan = prediction.plan
    return {
        "name": prediction.name,
        "device_budget_bytes": prediction.problem.device_budget_bytes,
        "host_budget_bytes": prediction.problem.host_budget_bytes,
        "step_s": plan.step_s,
        "tokens_per_s": prediction.tokens_per_s,
        "utilization": prediction.utilization(setting.peak_flops_per_s),
        "peak_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "lower_bound_s": plan.lower_bound_s,
        "status": plan.status,
    }


def _heading(setting: Setting, prediction: Prediction) -> list[str]:
    problem = prediction.problem
    budget, host = problem.device_budget_bytes, problem.host_budget_bytes
    micro = f" x {problem.micro_batches} micro-batches" if problem.micro_batches > 1 else ""
    limits = [f"{format_bytes(budget)} on the device"] if budget is not None else []
    limits += [f"{format_bytes(host)} on the host"] if host is not None else []
    each, ranks, count = "", "", problem.num_ranks * problem.num_replicas
    if count > 1:
        nodes = f"{setting.num_nodes} nodes" if setting.num_nodes > 1 else "one node"
        each, ranks = " on each rank", f"{count} ranks on {nodes}, each "
    return [
        f"{setting.model}: {format_count(prediction.num_params)} parameters in {setting.dtype}, batch {setting.batch} x"
        f" {setting.seq} tokens{micro}{each}",
        f"{ranks}on {problem.machine.device_name}, {setting.source}",
        f"budget {', '.join(limits)}{each}; {setting.traced_layers} layers traced and priced in {format_seconds(setting.trace_s)}",
    ]


def _of_ranks(prediction: Prediction) -> list[str]:
    """What a plan of several ranks says beside that of one."""
    problem, lane = prediction.problem, binding_lane(prediction.plan)
    count = problem.num_ranks * problem.num_replicas
    if count == 1:
        return []
    binds = "" if lane is None else f", the {lane.value} lane binds"
    rate = f"{format_bytes(problem.machine.net_bytes_per_s)}/s to other ranks"
    replicas, machine = f"{problem.num_replicas} replicas of {problem.num_ranks} ranks", problem.machine
    between = f"{format_bytes(machine.replica_net_bytes_per_s)}/s to the same shards of others"
    return [
        f"ranks           {count}, tokens of all, all else of one; {rate}",
        *([f"replicas        {replicas}; {between}"] if problem.num_replicas > 1 else []),
        f"net             works {net_share(prediction):.0%} of the step{binds}",
    ]


def _budget_name(prediction: Prediction) -> str:
    return format_bytes(prediction.problem.device_budget_bytes or 0)


def _row(name: str, prediction: Prediction) -> ComparisonRow:
    return ComparisonRow(
        name=name,
        step_s=prediction.plan.step_s,
        peak_bytes=prediction.plan.peak_bytes,
        tokens_per_s=prediction.tokens_per_s,
    )


def _lanes(prediction: Prediction) -> list[tuple[Lane, float, dict[str, float]]]:
    """Busy seconds of each lane that works, and of what."""
    work: dict[Lane, dict[str, float]] = {}
    for event in replayed(prediction.problem, prediction.plan).events:
        kinds = work.setdefault(event.lane, {})
        kinds[event.label] = kinds.get(event.label, 0.0) + event.end_s - event.start_s
    return [(busy.lane, busy.busy_s, work.get(busy.lane, {})) for busy in prediction.plan.busy_s if busy.busy_s]


def _lanes_table(prediction: Prediction) -> str:
    rows = [
        [
            lane.value,
            format_seconds(busy_s),
            f"{busy_s / prediction.plan.step_s:.0%}",
            ", ".join(f"{label} {format_seconds(seconds)}" for label, seconds in work.items()),
        ]
        for lane, busy_s, work in _lanes(prediction)
    ]
    return aligned(["lane", "busy", "share", "with"], rows, right_from=1, right_until=3)
