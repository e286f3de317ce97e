"""The picture of device memory over a step: what is predicted to hold it, what was measured, and the budget."""

from collections.abc import Sequence

from autohete_fx.ir import MemoryRecord
from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.planner.model.device_memory import MemoryLevel
from autohete_fx.report.data import ReportData
from autohete_fx.report.page import svg
from autohete_fx.report.page.colours import OF_MEMORY
from autohete_fx.report.page.words import off

_HEIGHT = 280
_POINTS = 1200
_LISTED = 8


def memory_picture(data: ReportData) -> str:
    """Stacked prediction, measured line, budget, predicted peak of the code, and the peak's holders as a list."""
    if not data.levels:
        return svg.element("p", "No replay of this plan was kept: the memory of its step cannot be shown.")
    x = svg.axis(0.0, data.plan.step_s, steps=6, extends=False)
    measured = data.step.memory if data.step else ()
    highest = max(
        *(level.num_bytes for level in data.levels),
        *(record.num_bytes for record in measured),
        data.plan.peak_bytes,
        data.budget_bytes or 0,
    )
    y = svg.axis(0.0, highest * 1.04, steps=5, binary=True)
    names = [name for name in OF_MEMORY if any(part.name == name for level in data.levels for part in level.held)]
    inside = [
        svg.grid(x, y, _HEIGHT),
        svg.stretched(_HEIGHT, *_areas(data.levels, names, x, y, data.plan.step_s)),
        *_limits(data, y),
    ]
    if data.step is not None and measured:
        step_s = data.step.step_s
        stairs = svg.stairs([(r.at_s / step_s, y.share(r.num_bytes)) for r in _thinned(measured, step_s)], 1.0)
        inside.append(svg.stretched(_HEIGHT, svg.line(stairs, class_="measured")))
    inside += _hovers(data, x)
    described = f"Device memory over a step of {format_seconds(data.plan.step_s)}, stacked by what holds it. {peak_sentence(data)}"
    entries = [(OF_MEMORY[name], name) for name in names]
    entries += [("line measured", "measured, its step drawn as long as the predicted one")] if measured else []
    entries.append(("line dashed", f"predicted peak of the code, {format_bytes(data.plan.peak_bytes)}"))
    entries += [] if data.budget_bytes is None else [("line limit", f"budget, {format_bytes(data.budget_bytes)}")]
    return (
        svg.plot("memory", described, _HEIGHT, x, format_seconds, svg.y_words(y, _HEIGHT, format_bytes), *inside)
        + svg.legend(entries)
        + _holders(data)
    )


def peak_sentence(data: ReportData) -> str:
    """The peak in words: predicted, where, measured, budget."""
    level, peak = data.peak_level, data.plan.peak_bytes
    where = f" in the {level.phase} of {data.plan.labels[level.block]}" if level and level.block >= 0 else ""
    said = f"The peak is predicted to be {format_bytes(peak)}{where}"
    if data.measured_peak_bytes:
        said += f"; {format_bytes(data.measured_peak_bytes)} was measured, the prediction is"
        said += f" {off(peak, data.measured_peak_bytes)}"
    if data.budget_bytes is not None:
        said += f"; the budget is {format_bytes(data.budget_bytes)}"
    return f"{said}."


def _areas(levels: Sequence[MemoryLevel], names: Sequence[str], x: svg.Axis, y: svg.Axis, end_s: float) -> list[str]:
    below = [0] * len(levels)
    found = []
    for name in names:
        above = [
            base + sum(part.num_bytes for part in level.held if part.name == name)
            for base, level in zip(below, levels, strict=True)
        ]
        lower, upper = (
            svg.stairs([(x.share(v.at_s), y.share(n)) for v, n in zip(levels, heights, strict=True)], x.share(end_s))
            for heights in (below, above)
        )
        found.append(svg.area(upper, lower, class_=f"stack {OF_MEMORY[name]}"))
        below = above
    return found


def _limits(data: ReportData, y: svg.Axis) -> list[str]:
    """Horizontal lines: the budget, and the peak that the compiled code is predicted to have."""
    heights = {"peak": data.plan.peak_bytes, "budget": data.budget_bytes}
    return [
        svg.element("line", x1="0", x2="100%", y1=at, y2=at, class_=f"limit {name}")
        for name, at in ((name, _HEIGHT * (1 - y.share(n))) for name, n in heights.items() if n is not None)
    ]


def _hovers(data: ReportData, x: svg.Axis) -> list[str]:
    found = []
    for i, level in enumerate(data.levels):
        until_s = data.levels[i + 1].at_s if i + 1 < len(data.levels) else data.plan.step_s
        label = data.plan.labels[level.block] if 0 <= level.block < len(data.plan.labels) else ""
        parts = [f"{format_bytes(part.num_bytes)}  {part.name}" for part in level.held[:_LISTED]]
        words = f"{level.phase} of {label} at {format_seconds(level.at_s)}: {format_bytes(level.num_bytes)} predicted"
        found.append(
            svg.box(
                x.share(level.at_s),
                x.share(until_s),
                0,
                _HEIGHT,
                svg.hint("\n".join([words, *parts])),
                class_="hover",
            )
        )
    return found


def _holders(data: ReportData) -> str:
    """The parts of the peak, largest first, as bars."""
    level = data.peak_level
    assert level is not None
    rows = []
    for part in level.held:
        share = part.num_bytes / max(1, level.num_bytes)
        bar = svg.element(
            "span", class_=f"bar {OF_MEMORY.get(part.name, 'grey')}", style=f"width:{max(0.5, 100 * share):.1f}%"
        )
        rows.append(
            svg.element(
                "tr",
                svg.element("th", svg.escape(part.name), scope="row"),
                svg.element("td", format_bytes(part.num_bytes), class_="number"),
                svg.element("td", f"{share:.0%}", class_="number"),
                svg.element("td", bar, class_="bars"),
            )
        )
    heading = svg.element("h3", "At the predicted peak, as the planner adds it up")
    return heading + svg.element("table", *rows, class_="holders")


def _thinned(records: Sequence[MemoryRecord], span_s: float) -> list[MemoryRecord]:
    """The most of each piece of time, so that no peak is lost."""
    most: dict[int, MemoryRecord] = {}
    for record in records:
        piece = int(record.at_s / span_s * _POINTS)
        if piece not in most or record.num_bytes > most[piece].num_bytes:
            most[piece] = record
    return list(most.values())
