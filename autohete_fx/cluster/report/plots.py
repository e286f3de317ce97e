"""Charts of plans over many devices: what each stage does over a step, and seconds against dollars.

Enter a `ClusterReport`; leave image files. Drawn by matplotlib, which is an optional dependency.
"""

from pathlib import Path
from typing import Any

from autohete_fx.cluster.report.text import ClusterReport, alike, counted
from autohete_fx.errors import ClusterError
from autohete_fx.ir.sizes import format_seconds
from autohete_fx.report.plots import require_matplotlib

_COLORS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "send": "#bab0ac",
    "receive": "#bab0ac",
    "reduce": "#54a24b",
    "update": "#b279a2",
}
_WORDS = {"send": "message", "receive": "message", "reduce": "gradient sums", "update": "update"}
"""Where a part has room for them."""
_MOST_ROWS = 48
"""Stages that a chart shows."""


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
            word = str(span.micro_batch + 1) if span.what in ("forward", "backward") else _WORDS[span.what]
            if length > 0.012 * len(word) * width and span.what != "receive":
                middle = span.begin_s + length / 2
                axes.text(middle, row, word, ha="center", va="center", fontsize=7, color="white")
    labels = []
    for unit in units:
        stage = plan.pipelines[unit.pipeline].stages[unit.place]
        count = f"{numbers[unit.pipeline]} x  " if not unit.place else ""
        shards = f" x {stage.shards} shards" if stage.shards > 1 else ""
        labels.append(f"{count}{stage.gpu} tp {stage.tp}{shards}, layers {stage.first}-{stage.last}")
    axes.set_yticks(range(len(units)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, width)
    axes.set_xlabel(
        "seconds; numbers are micro-batches, blue forward and orange backward, grey messages, white waits, green gradient sums,"
        " purple updates"
    )
    axes.set_title(f"{plan.model}: a step of {format_seconds(width)}, {plan.global_batch} samples", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _write(figure, path)


def draw_frontier(report: ClusterReport, path: str | Path) -> None:
    """Write a chart of the plans that none beats in both seconds and dollars, each with the GPUs that it uses.

    Raises OptionError where matplotlib is missing, ClusterError where the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tokens = report.plan.global_batch * report.seq
    seconds = [point.solution.plan.iteration_s for point in report.frontier]
    dollars = [point.usd_per_step / tokens * 1e6 for point in report.frontier]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.step(seconds, dollars, where="post", color="#4c78a8", linewidth=1.5)
    for s, usd, point in zip(seconds, dollars, report.frontier, strict=True):
        chosen = point.solution.plan == report.plan
        axes.plot([s], [usd], marker="o", markersize=9 if chosen else 6, color="#f58518" if chosen else "#4c78a8")
        words = counted(point.solution.plan.used()).replace(", ", "\n") + ("\n(this plan)" if chosen else "")
        axes.annotate(words, (s, usd), xytext=(6, 5), textcoords="offset points", fontsize=8)
    axes.set_xlim(0, max(seconds) * 1.2)
    room = max(max(dollars) - min(dollars), 0.05 * max(dollars))
    axes.set_ylim(min(dollars) - 0.15 * room, max(dollars) + 0.3 * room)
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("dollars of a million tokens")
    axes.set_title(f"{report.plan.model}: plans that no other one beats in both seconds and dollars", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _write(figure, path)


def _write(figure: Any, path: str | Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"cannot draw {str(path)!r}: {error}. Expected was an SVG, PNG or PDF file in a directory that exists. Give"
            " another path"
        ) from error
