"""The text of a what-if plan: predictions and sweeps as text, as JSON values, and as a plot."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autohete_fx.compiler.compilation import lane_events
from autohete_fx.ir import Lane
from autohete_fx.ir.sizes import format_bytes, format_count, format_seconds
from autohete_fx.report import plan_table
from autohete_fx.report.plots import PlotPoint, draw_budget_curve
from autohete_fx.report.tables import ComparisonRow, aligned, comparison_table
from autohete_fx.report.why import why
from autohete_fx.whatif.predict import Prediction, Sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The question.

    Attributes:
        model, dtype: as given.
        batch, seq: sequences of a micro-batch, and tokens of each; of a factory's inputs that are no token ids each example is one.
        source: where the machine's figures come from.
        peak_flops_per_s: what the utilization refers to, and in words.
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


def prediction_text(setting: Setting, given: Prediction, more: Sequence[Prediction], *, explain: bool = False) -> str:
    """The plan, what it predicts, what each lane does, what more would buy, and where asked for why the plan is as it is."""
    plan = given.plan
    lines = [
        *_heading(setting, given),
        "",
        plan_table(plan),
        f"throughput      {given.tokens_per_s:,.0f} tokens/s, {given.utilization(setting.peak_flops_per_s):.1%} of"
        f" {setting.peak_name}",
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
    return [
        f"{setting.model}: {format_count(prediction.num_params)} parameters in {setting.dtype}, batch {setting.batch} x"
        f" {setting.seq} tokens{micro}",
        f"on {problem.machine.device_name}, {setting.source}",
        f"budget {', '.join(limits)}; {setting.traced_layers} layers traced and priced in {format_seconds(setting.trace_s)}",
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
    for event in lane_events(prediction.problem, prediction.plan):
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
