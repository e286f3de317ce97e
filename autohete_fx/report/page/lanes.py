"""The picture of a step's lanes: for each lane what was planned, and below it what was measured."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autohete_fx.ir import Lane
from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.report.data import HELD, PROGRAM, ReportData
from autohete_fx.report.page import svg
from autohete_fx.report.page.colours import of_work
from autohete_fx.report.page.words import off

_BAR, _ROW, _GAP = 20, 24, 12
_WRITTEN = 0.022
"""Bars of a smaller share of the width have no words in them."""
_THIN = 0.003
"""Bars of a smaller share have no edges, which would hide them."""
_PAUSE = 0.001
"""Measured bars that are alike are one, where less of the step lies between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """A bar: words in it and over it."""

    lane: Lane
    label: str
    start_s: float
    end_s: float
    written: str
    words: str
    num_bytes: int = 0


def lanes_picture(data: ReportData) -> str:
    """A row a lane as planned, one as measured, with the waits of compute hatched."""
    if not data.events:
        return svg.element("p", "No replay of this plan was kept: its lanes cannot be shown.")
    step = data.step
    span_s = max(data.plan.step_s, step.step_s if step else 0.0)
    x = svg.axis(0.0, span_s, steps=8, extends=False)
    planned = [*_stalls(data), *_planned(data)]
    measured = _merged(_measured(data), span_s)
    lanes = [lane for lane in Lane if any(bar.lane is lane for bar in (*planned, *measured))]
    bars, names, top = [], [], 0
    for lane in lanes:
        rows = [("planned", planned)] + ([("measured", measured)] if step else [])
        height = _ROW * len(rows)
        bars.append(svg.element("rect", x=0, y=top, width="100%", height=height, class_="lane"))
        names.append(svg.text(lane.value, x=0, y=top + height / 2 + 4, class_="lane"))
        for i, (kind, of_kind) in enumerate(rows):
            at = top + i * _ROW + (_ROW - _BAR) / 2
            names.append(svg.text(kind[:4], x=svg.SIDE - 7, y=at + 14, class_="mark", text_anchor="end"))
            drawn = (_bar(bar, x, at, kind) for bar in of_kind if bar.lane is lane)
            bars.append(svg.element("g", *drawn, class_=kind))
        top += height + _GAP
    height = top - _GAP
    ends = [
        svg.element("line", x1=at, x2=at, y1=0, y2=height, class_=f"end {name}")
        for name, at in (
            ("planned", svg.percent(x.share(data.plan.step_s))),
            *((("measured", svg.percent(x.share(step.step_s))),) if step else ()),
        )
    ]
    entries: dict[str, dict[str, None]] = {}
    for bar in (*planned, *measured):
        label = bar.label.partition(":")[0]
        entries.setdefault(of_work(label), {})[_WORDS.get(label, label)] = None
    picture = svg.plot(
        "lanes", lanes_sentence(data), height, x, format_seconds, "".join(names), *bars, *ends, zooms=True
    )
    return picture + svg.legend((name, ", ".join(labels)) for name, labels in entries.items())


_WORDS = {HELD: "compute waits", "between": "between passes: optimizer, data"}


def lanes_sentence(data: ReportData) -> str:
    """The time of the step in words."""
    said = f"A step is predicted to take {format_seconds(data.plan.step_s)}"
    if data.measured_step_s is not None:
        said += f"; the median of those measured took {format_seconds(data.measured_step_s)}, the prediction is"
        said += f" {off(data.plan.step_s, data.measured_step_s)}"
    stalled_s = sum(bar.end_s - bar.start_s for bar in _stalls(data))
    if data.plan.step_s:
        said += f". Compute is planned to wait {format_seconds(stalled_s)} of it ({stalled_s / data.plan.step_s:.0%})"
    return f"{said}."


def _planned(data: ReportData) -> Iterable[_Drawn]:
    for event in data.events:
        label = data.plan.labels[event.block]
        yield _Drawn(
            lane=event.lane,
            label=event.label,
            start_s=event.start_s,
            end_s=event.end_s,
            written=str(event.block),
            words=f"{event.label} of {label}, planned",
        )


def _stalls(data: ReportData) -> list[_Drawn]:
    """Where compute is planned to do nothing."""
    found, at_s = [], 0.0
    works = sorted((e.start_s, e.end_s) for e in data.events if e.lane is Lane.COMPUTE)
    for start_s, end_s in [*works, (data.plan.step_s, data.plan.step_s)]:
        if start_s - at_s > 1e-9 * data.plan.step_s:
            bar = _Drawn(lane=Lane.COMPUTE, label=HELD, start_s=at_s, end_s=start_s, written="", words="compute waits")
            found.append(bar)
        at_s = max(at_s, end_s)
    return found


def _measured(data: ReportData) -> Iterable[_Drawn]:
    for bar in data.step.bars if data.step else ():
        program = bar.label in PROGRAM
        yield _Drawn(
            lane=bar.lane,
            label=bar.label,
            start_s=bar.start_s,
            end_s=bar.end_s,
            written=bar.label if program else "",
            words=f"{bar.label}, measured",
            num_bytes=bar.num_bytes,
        )


def _merged(bars: Iterable[_Drawn], span_s: float) -> list[_Drawn]:
    """Bars of a lane that are alike and follow each other at once, as one. Waits come last: they lie over what they hold."""
    found: dict[tuple[Lane, str], list[_Drawn]] = {}
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        alike = found.setdefault((bar.lane, bar.label), [])
        if alike and bar.start_s - alike[-1].end_s < _PAUSE * span_s and bar.label not in PROGRAM:
            end_s, num_bytes = max(bar.end_s, alike[-1].end_s), bar.num_bytes + alike[-1].num_bytes
            alike[-1] = replace(alike[-1], end_s=end_s, num_bytes=num_bytes)
        else:
            alike.append(bar)
    return sorted((bar for alike in found.values() for bar in alike), key=lambda bar: bar.label.startswith(HELD))


def _bar(bar: _Drawn, x: svg.Axis, top: float, kind: str) -> str:
    start, end = x.share(bar.start_s), x.share(bar.end_s)
    words = f"{bar.words}\n{format_seconds(bar.end_s - bar.start_s)}, from {format_seconds(bar.start_s)} on"
    words += f"\n{format_bytes(bar.num_bytes)}" if bar.num_bytes else ""
    name = of_work(bar.label)
    shape = svg.box(
        start, end, top, _BAR, svg.hint(words), class_=f"work {name}{' thin' if end - start < _THIN else ''}", rx=2
    )
    if not bar.written or end - start < _WRITTEN * max(1, len(bar.written) / 3):
        return shape
    place = {"x": svg.percent((start + end) / 2), "text_anchor": "middle"}
    if bar.label in PROGRAM and kind == "measured":  # waits may lie over its middle
        place = {"x": svg.percent(start), "dx": 6}
    inside = svg.text(bar.written, y=top + 14, class_="written", **place)
    return shape + inside


def lanes_table(data: ReportData) -> str:
    """Seconds of the step for which each lane works, planned beside measured. Compute has only its waits measured."""
    measured = _merged(_measured(data), data.step.step_s) if data.step else []
    rows = []
    for lane in Lane:
        planned_s = sum(time.busy_s for time in data.plan.busy_s if time.lane is lane)
        is_compute = lane is Lane.COMPUTE
        own = [bar for bar in measured if bar.lane is lane and bar.label not in PROGRAM]
        if not planned_s and not own:
            continue
        busy_s, moved = sum(bar.end_s - bar.start_s for bar in own), sum(bar.num_bytes for bar in own)
        cells = [format_seconds(planned_s), "-" if is_compute or not own else format_seconds(busy_s)]
        cells += [format_seconds(busy_s) if is_compute and data.step else "", format_bytes(moved) if moved else ""]
        cells = [svg.element("td", cell, class_="number") for cell in cells]
        rows.append(svg.element("tr", svg.element("th", lane.value, scope="row"), *cells))
    heads = ("lane", "planned to work", "worked", "held by waits", "moved")
    head = svg.element("tr", *(svg.element("th", words, scope="col") for words in heads))
    return svg.element("table", head, *rows, class_="figures")
