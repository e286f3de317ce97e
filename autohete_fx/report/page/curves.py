"""Two pictures of figures: step time over the budget with today's point, and prediction errors over steps."""

import statistics
from collections.abc import Sequence

from autohete_fx.ir import StepRecord
from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.report.data import ReportData
from autohete_fx.report.page import svg
from autohete_fx.report.page.words import off

_HEIGHT = 220
_MOST_POINTS = 240
_ROOM = 0.5
"""Below the fastest step, in parts of what lies between it and the slowest: the time axis need not begin at 0."""
_RADIUS = {"plan": 8, "run": 4.5}


def budget_picture(data: ReportData) -> str:
    """Step time by device budget; the plan, what was measured, and the budget stand on it."""
    if not data.curve:
        return svg.element("p", svg.escape(NO_CURVE))
    points = sorted([*((p.budget_bytes, p.step_s) for p in data.curve), (data.plan.peak_bytes, data.plan.step_s)])
    marks = [("plan", "this plan", data.plan.peak_bytes, data.plan.step_s)]
    if data.measured_step_s is not None:
        peak = data.measured_peak_bytes or data.plan.peak_bytes
        marks.append(("run", "measured", peak, data.measured_step_s))
    sizes = [num_bytes for num_bytes, _ in points] + [num_bytes for _, _, num_bytes, _ in marks]
    sizes += [data.budget_bytes] if data.budget_bytes is not None and data.budget_bytes < 2 * max(sizes) else []
    x = svg.axis(min(sizes), max(sizes), steps=5, binary=True)
    times = [step_s for _, step_s in points] + [step_s for _, _, _, step_s in marks]
    y = svg.axis(max(0.0, min(times) - _ROOM * (max(times) - min(times))), 1.02 * max(times), steps=4)
    places = [(x.share(num_bytes), y.share(step_s)) for num_bytes, step_s in points]
    inside = [svg.grid(x, y, _HEIGHT), svg.stretched(_HEIGHT, svg.line(places, class_="curve"))]
    if data.budget_bytes is not None and x.low <= data.budget_bytes <= x.high:
        at, after = svg.percent(x.share(data.budget_bytes)), x.share(data.budget_bytes) > 0.8
        inside.append(svg.element("line", x1=at, x2=at, y1=0, y2=_HEIGHT, class_="limit budget"))
        side = {"dx": -6, "text_anchor": "end"} if after else {"dx": 6}
        inside.append(svg.text("budget", x=at, y=12, class_="limit budget", **side))
    for point in data.curve:
        words = f"{format_bytes(point.budget_bytes)}: {format_seconds(point.step_s)} a step, predicted"
        inside.append(_dot(x, y, point.budget_bytes, point.step_s, words, "point", 4))
    for name, words, num_bytes, step_s in marks:
        said = f"{words}: {format_seconds(step_s)} a step, {format_bytes(num_bytes)}"
        inside.append(_dot(x, y, num_bytes, step_s, said, f"mark-{name}", _RADIUS[name]))
    described = f"Step time over the device memory. {budget_sentence(data)}"
    entries = [("dot plan", "this plan, predicted"), ("line curve", "the fastest plans found")]
    entries += [("dot run", "measured")] if len(marks) > 1 else []
    picture = svg.plot("budgets", described, _HEIGHT, x, format_bytes, svg.y_words(y, _HEIGHT, format_seconds), *inside)
    return picture + svg.legend(entries)


NO_CURVE = "No curve can be shown: as the planner counts, no plan fits the device."


def budget_sentence(data: ReportData) -> str:
    """The ends of the curve in words."""
    if not data.curve:
        return NO_CURVE
    first, last = data.curve[0], data.curve[-1]
    return (
        f"The smallest budget that a plan keeps is {format_bytes(first.budget_bytes)}, with {format_seconds(first.step_s)} a step;"
        f" from {format_bytes(last.budget_bytes)} on, with {format_seconds(last.step_s)}, more memory gains nothing."
    )


def errors_picture(data: ReportData) -> str:
    """Prediction over measurement less one, of step time and of the peak, step after step."""
    timed = errors_of(data.steps, data)
    if len(timed) < 2:
        return svg.element("p", svg.escape(NO_ERRORS))
    each, number_of = -(-len(timed) // _MOST_POINTS), [number for number, _, _ in timed]
    series = {
        "time": [(number, error) for number, error, _ in timed],
        "peak": [(number, error) for number, _, error in timed if error is not None],
    }
    series = {name: _medians(points, each) for name, points in series.items() if points}
    reach = max(abs(error) for points in series.values() for _, error in points)
    x = svg.axis(number_of[0], number_of[-1], steps=6, extends=False)
    x = svg.Axis(low=x.low, high=x.high, marks=tuple(mark for mark in x.marks if mark == int(mark)))
    y = svg.axis(-max(reach, 0.05) * 1.05, max(reach, 0.05) * 1.05, steps=5)
    inside = [svg.grid(x, y, _HEIGHT)]
    zero = _HEIGHT * (1 - y.share(0.0))
    inside.append(svg.element("line", x1="0", x2="100%", y1=zero, y2=zero, class_="zero"))
    for name, points in series.items():
        places = [(x.share(number), y.share(error)) for number, error in points]
        inside.append(svg.stretched(_HEIGHT, svg.line(places, class_=f"error {name}")))
        for number, error in points:
            words = f"step {number}: {_WORDS[name]} predicted {off(1 + error, 1.0)}"
            inside.append(_dot(x, y, number, error, words, f"error {name}", 3))
    described = f"Prediction errors over steps. {errors_sentence(data)}"
    entries = [(f"line error {name}", _WORDS[name]) for name in series]
    words = f"the median of each {each} steps" if each > 1 else ""
    side = svg.y_words(y, _HEIGHT, lambda error: f"{error:+.0%}" if round(error, 4) else "0%")
    picture = svg.plot("errors", described, _HEIGHT, x, lambda number: f"{number:g}", side, *inside)
    return picture + svg.legend([*entries, *([("", words)] if words else [])])


_WORDS = {"time": "step time", "peak": "peak memory"}
NO_ERRORS = (
    "Fewer than two steps were timed, the first one left out: there is nothing to hold the predictions against yet."
)


def errors_of(steps: Sequence[StepRecord], data: ReportData) -> list[tuple[int, float, float | None]]:
    """For each step but the first its number, and by which share step time and peak were predicted too high."""
    return [
        (
            step.number,
            data.plan.step_s / step.step_s - 1,
            data.plan.peak_bytes / step.peak_bytes - 1 if step.peak_bytes else None,
        )
        for step in steps
        if step.number and step.step_s > 0
    ]


def errors_sentence(data: ReportData) -> str:
    """The errors in words."""
    timed = errors_of(data.steps, data)
    if len(timed) < 2:
        return NO_ERRORS
    times, peaks = [abs(error) for _, error, _ in timed], [error for _, _, error in timed if error is not None]
    said = f"In the median of {len(timed)} steps, the predicted time is {statistics.median(times):.1%} off"
    if peaks:
        said += f" and the predicted peak {statistics.median(map(abs, peaks)):.1%}"
    return f"{said}. Above 0 the prediction was too high."


def _medians(points: Sequence[tuple[int, float]], each: int) -> list[tuple[int, float]]:
    groups = [points[i : i + each] for i in range(0, len(points), each)]
    return [(group[len(group) // 2][0], statistics.median(error for _, error in group)) for group in groups]


def _dot(x: svg.Axis, y: svg.Axis, at: float, value: float, words: str, name: str, radius: float) -> str:
    place = {"cx": svg.percent(x.share(at)), "cy": _HEIGHT * (1 - y.share(value)), "r": radius}
    return svg.element("circle", svg.hint(words), class_=f"dot {name}", **place)
