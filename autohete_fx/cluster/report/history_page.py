"""The page of a job: its figures, loss and seconds over steps, and a table of its starts. One file of HTML, without a script."""

import importlib.resources
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from autohete_fx.cluster.report.history import COLUMNS, History, Step, facts, table_rows
from autohete_fx.ir.files import write_text
from autohete_fx.ir.sizes import format_seconds
from autohete_fx.report.page import svg

_HEIGHT = 180
_MOST_POINTS = 2000
_STYLE = """
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 20px; margin: 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; font-variant-numeric: tabular-nums; }
.starts { overflow-x: auto; } .starts table { border-collapse: collapse; font-size: 13.5px; }
.starts th, .starts td { padding: 4px 12px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
.starts td:last-child { min-width: 260px; }
.run { stroke: var(--blue); stroke-width: 2; vector-effect: non-scaling-stroke; }
.began { stroke: var(--orange); stroke-width: 1.5; stroke-dasharray: 4 3; }
"""


def write_history_page(history: History, prices: Mapping[str, float], path: str | Path) -> Path:
    """Write the page; returns its path."""
    write_text(path, history_page(history, prices))
    return Path(path)


def history_page(history: History, prices: Mapping[str, float]) -> str:
    """The HTML text of a job's page."""
    style = importlib.resources.files("autohete_fx.report.page").joinpath("style.css").read_text(encoding="utf-8")
    model = svg.escape(history.starts[0].plan.model)
    named = "".join(
        svg.element("dt", svg.escape(name)) + svg.element("dd", svg.escape(words))
        for name, words in facts(history, prices).items()
    )
    sections = (
        _section("figures", "Figures", svg.element("dl", named, class_="facts")),
        _section("loss", "Loss", _curve("loss", history, lambda step: step.loss, lambda value: f"{value:.3g}")),
        _section("seconds", "Seconds of a step", _curve("seconds", history, lambda step: step.seconds, format_seconds)),
        _section("starts", "Starts", _table(history)),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>autohete: job of {model}</title>\n<style>\n{style}{_STYLE}</style>\n</head>\n<body>\n"
        f'<header><p class="brand">autohete</p><h1>{model}</h1></header>\n<main>\n'
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _section(name: str, heading: str, inside: str) -> str:
    return svg.element("section", svg.element("h2", svg.escape(heading)), inside, id=name)


def _curve(name: str, history: History, value: Callable[[Step], float], words: Callable[[float], str]) -> str:
    """A line over steps as they were trained, and where the job began again; values that are not finite are left out."""
    steps = history.steps
    if len(steps) < 2:
        return svg.element("p", "Fewer than two steps were trained.", class_="lead")
    finite = [(at, value(step)) for at, step in enumerate(steps) if math.isfinite(value(step))]
    if not finite:
        return svg.element("p", "No step has a finite number here.", class_="lead")
    x = svg.axis(0, len(steps) - 1, extends=False)
    y = svg.axis(min(number for _, number in finite), max(number for _, number in finite))
    points = [(x.share(at), y.share(number)) for at, number in finite[:: -(-len(finite) // _MOST_POINTS)]]
    inside, done = [svg.grid(x, y, _HEIGHT), svg.stretched(_HEIGHT, svg.line(points, class_="run"))], 0
    for start in history.starts[:-1]:
        done += len(start.steps)
        at = svg.percent(x.share(done - 0.5))
        inside.append(svg.element("line", x1=at, x2=at, y1=0, y2=_HEIGHT, class_="began"))
    described = f"{name} over {len(steps)} steps in the order in which they were trained"
    side = svg.y_words(y, _HEIGHT, words)
    picture = svg.plot(name, described, _HEIGHT, x, lambda at: f"{steps[round(at)].step}", side, *inside)
    left_out = len(steps) - len(finite)
    odd = f" {left_out} of {len(steps)} steps are left out: their numbers are not finite." if left_out else ""
    return picture + svg.element("p", f"Dashed lines: the job began again.{odd}", class_="note")


def _table(history: History) -> str:
    head = svg.element("tr", *(svg.element("th", svg.escape(column)) for column in COLUMNS))
    body = (svg.element("tr", *(svg.element("td", svg.escape(cell)) for cell in row)) for row in table_rows(history))
    return svg.element("div", svg.element("table", head, *body), class_="starts")
