"""Plans over many devices as text, JSON, and a Gantt chart."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.frontier import Priced
from autohete_fx.cluster.memory import memory_of_plan
from autohete_fx.cluster.plan import ClusterPlan, Pipeline
from autohete_fx.cluster.simulate import Timeline
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import ClusterError
from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.report.plots import require_matplotlib
from autohete_fx.report.tables import aligned

_COLORS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "send": "#bab0ac",
    "receive": "#bab0ac",
    "reduce": "#54a24b",
    "update": "#b279a2",
}
_MOST_ROWS = 48
"""Stages that a chart shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A plan to compare: a baseline, or ours on another cluster; ``plan`` is None where nothing fits."""

    name: str
    plan: ClusterPlan | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """All that is said of a plan.

    Attributes:
        plan: that is reported.
        timeline: its simulated step.
        cluster: that it is for.
        costs: that it was made from.
        seq: tokens of a sample.
        flops: of a step: six for each parameter and token.
        peak_flops_per_s: stated, of one GPU, by type; empty where nobody knows.
        bounds_s: (the model's bound, all GPUs at work all the time).
        solve_s: of the search.
        baselines: on the same cluster.
        changes: of the cluster.
        assumed: sentences on what was not described.
    """

    plan: ClusterPlan
    timeline: Timeline
    cluster: Cluster
    costs: CostTable
    seq: int
    flops: float
    peak_flops_per_s: Mapping[str, float]
    bounds_s: tuple[float, float]
    solve_s: float
    baselines: Sequence[Variant] = ()
    changes: Sequence[Variant] = ()
    assumed: Sequence[str] = ()

    @property
    def tokens_per_s(self) -> float:
        """The throughput of all pipelines together."""
        return self.plan.global_batch * self.seq / self.timeline.iteration_s

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization: the share of the used GPUs' stated peak that the model's own products make up."""
        if not self.peak_flops_per_s:
            return None
        peak = sum(count * self.peak_flops_per_s[gpu] for gpu, count in self.plan.used().items())
        return self.flops / self.timeline.iteration_s / peak

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Price of the used GPUs; None where one has none."""
        return usd_per_million_tokens(self.plan, self.cluster, self.seq)


def usd_per_million_tokens(plan: ClusterPlan, cluster: Cluster, seq: int) -> float | None:
    """Dollars that the used GPUs cost while a million tokens are trained; None where one has no price."""
    usd_per_s = 0.0
    for gpu, count in plan.used().items():
        price = cluster.gpu(gpu).usd_per_hour
        if price is None:
            return None
        usd_per_s += count * price / 3600
    return usd_per_s * plan.iteration_s / (plan.global_batch * seq) * 1e6


def binding(plan: ClusterPlan, timeline: Timeline) -> dict[str, float]:
    """Seconds of the step by what takes them, in the pipeline that ends last: its busiest stage and all that follows."""
    last = max(timeline.units, key=lambda unit: unit.backward_end_s).pipeline
    busiest = max((unit for unit in timeline.units if unit.pipeline == last), key=lambda unit: unit.compute_s)
    messages_s = sum(span.end_s - span.begin_s for span in busiest.spans if span.what in ("send", "receive"))
    return {
        "compute": busiest.compute_s,
        "messages": messages_s,
        "bubble": max(0.0, timeline.pipelines_s - busiest.compute_s - messages_s),
        "gradient sums": timeline.reduce_s,
        "updates": timeline.update_s,
    }


def alike(plan: ClusterPlan) -> list[tuple[Pipeline, int]]:
    """Pipelines that differ in their nodes alone, each once with its number."""
    groups: dict[tuple[Any, ...], list[Pipeline]] = {}
    for pipeline in plan.pipelines:
        stages = tuple((s.gpu, s.tp, s.first, s.last, s.recomputed, s.offloaded) for s in pipeline.stages)
        groups.setdefault((stages, pipeline.micro_batch, pipeline.micro_batches), []).append(pipeline)
    return [(members[0], len(members)) for members in groups.values()]


def report_text(report: ClusterReport) -> str:
    """The plan as tables."""
    plan, timeline = report.plan, report.timeline
    model_bound_s, compute_bound_s = report.bounds_s
    bound_s = min(model_bound_s, timeline.iteration_s)
    shares = binding(plan, timeline)
    parts = [f"{name} {seconds / timeline.iteration_s:.0%}" for name, seconds in shares.items() if seconds]
    lines = [
        f"{plan.model} on {_counts({gpu.name: report.cluster.count(gpu.name) for gpu in report.cluster.gpus})},"
        f" {plan.global_batch} samples of {report.seq} tokens a step",
        *(f"assumed: {sentence}" for sentence in report.assumed),
        f"costs: {report.costs.source}",
        "",
        f"step {format_seconds(timeline.iteration_s)}, {report.tokens_per_s:,.0f} tokens/s{_utilization(report)}{_price(report)}",
        f"where it goes: {', '.join(parts)}",
        f"at best {format_seconds(bound_s)} as the solver counts, {format_seconds(compute_bound_s)} with all GPUs always at work;"
        f" searched {report.solve_s:.1f} s",
        "",
        _pipelines_table(report),
    ]
    idle = _idle(report)
    if idle:
        lines += ["", idle]
    for title, variants in (("other ways to plan this cluster", report.baselines), ("other clusters", report.changes)):
        if variants:
            lines += ["", title, _variants_table(report, variants)]
    return "\n".join(lines)


def _utilization(report: ClusterReport) -> str:
    return "" if report.utilization is None else f", {report.utilization:.0%} of the used GPUs' peak (MFU)"


def _price(report: ClusterReport) -> str:
    dollars = report.usd_per_million_tokens
    return "" if dollars is None else f", ${dollars:.3f} per million tokens"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {gpu}" for gpu, count in counts.items())


def _pipelines_table(report: ClusterReport) -> str:
    plan, costs = report.plan, report.costs
    memories = dict(zip(plan.pipelines, memory_of_plan(plan, costs), strict=True))
    rows = []
    for pipeline, count in alike(plan):
        for place, stage in enumerate(pipeline.stages):
            cost = costs.stage(
                stage.layers,
                stage.gpu,
                stage.tp,
                pipeline.micro_batch,
                recomputed=stage.recomputed,
                offloaded=stage.offloaded,
            )
            treated = [
                f"{number} {word}"
                for number, word in ((stage.recomputed, "recomputed"), (stage.offloaded, "offloaded"))
                if number
            ]
            rows.append(
                [
                    f"{count} x" if not place else "",
                    f"{pipeline.micro_batches} of {pipeline.micro_batch}" if not place else "",
                    stage.gpu,
                    str(stage.tp),
                    f"{stage.first}-{stage.last}",
                    ", ".join(treated) or "kept",
                    format_seconds(cost.forward_s + cost.backward_s),
                    format_bytes(memories[pipeline][place].peak_bytes),
                    format_bytes(report.cluster.gpu(stage.gpu).memory_bytes),
                ]
            )
    header = [
        "pipelines",
        "micro-batches",
        "gpu",
        "tp",
        "layers",
        "activations",
        "a micro-batch",
        "peak",
        "of",
    ]
    return aligned(header, rows, right_from=6)


def _idle(report: ClusterReport) -> str:
    """A sentence on GPUs that the plan leaves alone."""
    used = report.plan.used()
    left = {gpu.name: report.cluster.count(gpu.name) - used.get(gpu.name, 0) for gpu in report.cluster.gpus}
    left = {gpu: count for gpu, count in left.items() if count}
    if not left:
        return ""
    return (
        f"idle: {_counts(left)}. Every plan that was simulated with more of them is slower: what they compute is less than"
        " the bubble,"
        " the messages or the gradient sums that they add"
    )


def _variants_table(report: ClusterReport, variants: Sequence[Variant]) -> str:
    rows = []
    ours = report.timeline.iteration_s
    for variant in (Variant(name="this plan", plan=report.plan), *variants):
        plan = variant.plan
        if plan is None:
            rows.append([variant.name, "nothing fits", "-", "-", "-"])
            continue
        cost = usd_per_million_tokens(plan, report.cluster, report.seq) if _known(plan, report.cluster) else None
        rows.append(
            [
                variant.name,
                format_seconds(plan.iteration_s),
                f"{plan.iteration_s / ours:.2f}x",
                "-" if cost is None else f"${cost:.3f}",
                _counts(plan.used()),
            ]
        )
    return aligned(["", "step", "of this", "a million tokens", "used"], rows, right_from=1, right_until=4)


def _known(plan: ClusterPlan, cluster: Cluster) -> bool:
    return set(plan.used()) <= {gpu.name for gpu in cluster.gpus}


def frontier_table(points: Sequence[Priced], tokens: int) -> str:
    """Seconds against dollars: plans that none beats in both."""
    rows = [
        [
            format_seconds(point.solution.plan.iteration_s),
            f"{tokens / point.solution.plan.iteration_s:,.0f}",
            f"${point.usd_per_step / tokens * 1e6:.3f}",
            _counts(point.solution.plan.used()),
        ]
        for point in points
    ]
    return "faster or cheaper\n" + aligned(
        ["step", "tokens/s", "a million tokens", "used"], rows, right_from=0, right_until=3
    )


def report_json(report: ClusterReport) -> str:
    """The plan and its figures as one JSON object."""
    plan = report.plan
    memories = memory_of_plan(plan, report.costs)
    body = {
        "plan": json.loads(plan.to_json()),
        "iteration_s": report.timeline.iteration_s,
        "tokens_per_s": report.tokens_per_s,
        "utilization": report.utilization,
        "usd_per_million_tokens": report.usd_per_million_tokens,
        "seconds_by_cause": binding(plan, report.timeline),
        "model_bound_s": report.bounds_s[0],
        "compute_bound_s": report.bounds_s[1],
        "solve_s": report.solve_s,
        "memory": [[asdict(held) | {"peak_bytes": held.peak_bytes} for held in row] for row in memories],
        "baselines": {v.name: v.plan and v.plan.iteration_s for v in report.baselines},
        "changes": {v.name: v.plan and v.plan.iteration_s for v in report.changes},
        "assumed": list(report.assumed),
        "costs": report.costs.source,
    }
    return json.dumps(body, indent=1)


def draw_gantt(report: ClusterReport, path: str | Path) -> None:
    """Write a chart of the step: a row for each stage, what it does over time, every part labelled where it stands.

    One of each kind of pipelines that are alike is drawn. Raises OptionError where matplotlib is missing, ClusterError where the
    file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plan, timeline = report.plan, report.timeline
    shown = {id(pipeline): count for pipeline, count in alike(plan)}
    numbers = {index: shown[id(p)] for index, p in enumerate(plan.pipelines) if id(p) in shown}
    units = [unit for unit in timeline.units if unit.pipeline in numbers][:_MOST_ROWS]
    figure = Figure(figsize=(12, 1.2 + 0.42 * len(units)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = timeline.iteration_s
    for row, unit in enumerate(units):
        for span in unit.spans:
            length = span.end_s - span.begin_s
            axes.barh(
                row,
                length,
                left=span.begin_s,
                height=0.8,
                color=_COLORS[span.what],
                edgecolor="white",
                linewidth=0.3 if len(unit.spans) < 200 else 0.0,
            )
            word = str(span.micro_batch + 1) if span.what in ("forward", "backward") else span.what
            if length > 0.012 * len(word) * width and span.what != "receive":
                middle = span.begin_s + length / 2
                axes.text(middle, row, word, ha="center", va="center", fontsize=7, color="white")
    labels = []
    for unit in units:
        stage = plan.pipelines[unit.pipeline].stages[unit.place]
        count = f"{numbers[unit.pipeline]} x  " if not unit.place else ""
        labels.append(f"{count}{stage.gpu} tp {stage.tp}, layers {stage.first}-{stage.last}")
    axes.set_yticks(range(len(units)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, width)
    axes.set_xlabel("seconds; numbers are micro-batches, blue forward and orange backward, grey messages, white waits")
    axes.set_title(f"{plan.model}: a step of {format_seconds(width)}, {plan.global_batch} samples", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"cannot draw {str(path)!r}: {error}. Expected was an SVG, PNG or PDF file in a directory that exists. Give"
            " another path"
        ) from error
