"""The page itself: tiles with the figures that matter, a section a picture, and everything else in words."""

import importlib.resources
from collections.abc import Callable, Iterator
from string import Template

from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.report.data import ReportData
from autohete_fx.report.page import svg
from autohete_fx.report.page.curves import budget_picture, budget_sentence, errors_picture, errors_sentence
from autohete_fx.report.page.decisions import decision_map, decisions_sentence
from autohete_fx.report.page.lanes import lanes_picture, lanes_sentence, lanes_table
from autohete_fx.report.page.memory import memory_picture, peak_sentence
from autohete_fx.report.page.words import off
from autohete_fx.report.tables import plan_table
from autohete_fx.report.why import why

_Part = Callable[[ReportData], str]


def page_of(data: ReportData) -> str:
    """The HTML text of a report."""
    title = f"autohete: {len(data.plan.labels)} blocks on {data.device_name}"
    sections = [
        _section("memory", "Memory over a step", peak_sentence(data), memory_picture(data)),
        _section("lanes", "Lanes", lanes_sentence(data), lanes_picture(data) + lanes_table(data), _lanes_note(data)),
        _section("decisions", "Decisions", decisions_sentence(data), decision_map(data) + _table(data)),
        _section("budget", "Step time over budget", _unless(budget_sentence, data.curve, data), budget_picture(data)),
        _section("reasons", "Why", "", _reasons(data)),
        _section(
            "errors",
            "Predictions against measurements",
            _unless(errors_sentence, data.steps, data),
            errors_picture(data),
        ),
        _section("compilation", "Compilation", "", _compilation(data)),
    ]
    return Template(_file("page.html")).substitute(
        title=svg.escape(title),
        style=_file("style.css"),
        script=_file("script.js"),
        heading=svg.escape(data.device_name),
        subtitle=svg.escape(_subtitle(data)),
        tiles="".join(_tiles(data)),
        sections="\n".join(sections),
    )


def sentences_of(data: ReportData) -> list[str]:
    """The parts of the page in a sentence or two each."""
    parts = (peak_sentence, lanes_sentence, decisions_sentence, budget_sentence, errors_sentence)
    return [part(data) for part in parts]


def _file(name: str) -> str:
    return importlib.resources.files("autohete_fx.report.page").joinpath(name).read_text(encoding="utf-8")


def _section(name: str, heading: str, lead: str, *inside: str) -> str:
    head = svg.element("h2", svg.escape(heading), id=f"{name}-heading")
    words = svg.element("p", svg.escape(lead), class_="lead") if lead else ""
    return svg.element("section", head, words, *inside, id=name, aria_labelledby=f"{name}-heading")


def _unless(sentence: _Part, found: object, data: ReportData) -> str:
    """A picture that is none says so itself."""
    return sentence(data) if found else ""


def _subtitle(data: ReportData) -> str:
    blocks = f"{len(data.plan.labels)} blocks"
    which = "" if data.training_graph == 1 else f", training graph {data.training_graph} of its process"
    return f"Plan {data.plan.digest} of {blocks}{which}, {data.plan.status}; torch {data.torch_version}"


def _tiles(data: ReportData) -> Iterator[str]:
    plan = data.plan
    yield _tile("Step time, predicted", format_seconds(plan.step_s), _bound(data))
    measured_s = data.measured_step_s
    if measured_s is None:
        yield _tile("Step time, measured", "-", "after the third step")
    else:
        words = f"the prediction is {off(plan.step_s, measured_s)}"
        yield _tile("Step time, measured", format_seconds(measured_s), words)
    limit = "no budget" if data.budget_bytes is None else f"of {format_bytes(data.budget_bytes)}"
    yield _tile("Peak, predicted", format_bytes(plan.peak_bytes), limit)
    peak = data.measured_peak_bytes
    if peak is None:
        yield _tile("Peak, measured", "-", "nobody counts it")
    else:
        is_within = data.budget_bytes is None or peak <= data.budget_bytes
        state = "" if data.budget_bytes is None else "within budget" if is_within else "above the budget"
        yield _tile(
            "Peak, measured", format_bytes(peak), state, "good" if state and is_within else "" if is_within else "bad"
        )
    yield _tile("Host memory", format_bytes(plan.host_bytes), f"{format_bytes(plan.disk_bytes)} on disk")


def _bound(data: ReportData) -> str:
    if not data.plan.lower_bound_s:
        return data.plan.status
    return f"no plan beats {format_seconds(data.plan.lower_bound_s)}"


def _tile(name: str, figure: str, words: str, state: str = "") -> str:
    return svg.element(
        "div",
        svg.element("dt", svg.escape(name)),
        svg.element("dd", svg.escape(figure)),
        svg.element("p", svg.escape(words)),
        class_=f"tile {state}".strip(),
    )


def _lanes_note(data: ReportData) -> str:
    if data.step is None:
        return svg.element("p", "No step has been recorded yet: only the plan is shown.", class_="note")
    from_where = (
        "from the end of a forward to that of the next" if data.begins_with_backward else "from forward to forward"
    )
    words = (
        f"Measured is step {data.step.number}, {from_where}. Blocks are not timed while they run: compute shows passes of the"
        " program, which on a GPU only issues work, and hatched the times for which a wait held it."
    )
    return svg.element("p", words, class_="note")


def _table(data: ReportData) -> str:
    table = svg.element("pre", svg.escape(plan_table(data.plan)))
    return svg.element("details", svg.element("summary", "As a table"), table)


def _reasons(data: ReportData) -> str:
    binding, _, blocks = why(data.plan).partition("\n\n")
    paragraphs = [svg.element("p", svg.escape(_sentence(line))) for line in binding.splitlines()]
    items = []
    for text in blocks.splitlines():
        if text.startswith(" ") and items:
            items[-1].append(text.strip())
        elif text:
            items.append([text])
    entries = []
    for first, *others in items:
        name, _, chosen = first.rpartition(": ")
        entries.append(svg.element("dt", svg.element("b", svg.escape(name)), f" {svg.escape(chosen)}"))
        entries += [svg.element("dd", svg.escape(other)) for other in others]
    return "".join(paragraphs) + svg.element("dl", *entries, class_="why")


def _sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}{'' if line.endswith('.') else '.'}"


def _compilation(data: ReportData) -> str:
    rows = [
        svg.element(
            "tr",
            svg.element("th", svg.escape(stage.name), scope="row"),
            svg.element("td", format_seconds(stage.seconds), class_="number"),
        )
        for stage in data.compile_s
    ]
    found = [svg.element("p", svg.escape(_sentence(note)), class_="note") for note in data.notes]
    if data.profile_source:
        found.append(svg.element("p", svg.escape(f"Costs of blocks: {data.profile_source}."), class_="note"))
    return "".join(found) + (svg.element("table", *rows, class_="figures") if rows else "")
