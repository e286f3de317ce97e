"""The page of a report: every part is there, with and without measurements, and nothing is loaded from anywhere."""

import dataclasses
import re
import time
from html.parser import HTMLParser

import pytest

from autohete_fx.errors import ReportError
from autohete_fx.ir import Plan
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.report.data import ReportData
from autohete_fx.report.page import page_of, sentences_of, svg
from autohete_fx.report.page.words import off
from tests.report_data import report_data

BLOCKS = 10
DATA = report_data(BLOCKS)
PLANNED = report_data(BLOCKS, is_measured=False)
_VOID = {"meta", "input", "br"}


class Element:
    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Element] = []
        self.words = ""

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    def walk(self):
        yield self
        for child in self.children:
            yield from child.walk()

    def all(self, tag: str, *classes: str) -> "list[Element]":
        return [e for e in self.walk() if e.tag == tag and set(classes) <= set(e.classes)]

    def text(self) -> str:
        return " ".join(e.words for e in self.walk() if e.words)


class _Reader(HTMLParser):
    """Refuses what is not closed, or closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("root", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.open[-1].words += data.strip()


def read(html: str) -> Element:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == [reader.root], f"{reader.open[-1].tag} is not closed"
    return reader.root


def section(page: Element, name: str) -> Element:
    (found,) = (e for e in page.all("section") if e.attributes["id"] == name)
    return found


@pytest.fixture(scope="module")
def page() -> Element:
    return read(page_of(DATA))


def test_the_data_is_read_back_as_it_was():
    for data in (DATA, PLANNED):
        assert ReportData.from_json(data.to_json()) == data


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "no schema_version"),
        (DATA.to_json().replace('"schema_version": 1}', '"schema_version": 99}'), "schema version 99"),
        (DATA.to_json().replace('"h2d"', '"moon"'), "'moon'"),
        (DATA.to_json().replace('"curve"', '"kurve"'), "lacks 'curve'"),
    ],
)
def test_data_that_is_none_is_refused(text: str, reason: str):
    with pytest.raises(ReportError, match=reason):
        ReportData.from_json(text)


def test_nothing_is_loaded_from_anywhere(page: Element):
    html = page_of(DATA)
    assert not re.search(r"(?:src|href)=\"(?!#)|url\((?!#)|@import|https?://|fetch\(|XMLHttp", html)
    assert len(page.all("style")) == len(page.all("script")) == 1
    assert "$" not in re.sub(r"<script>.*?</script>", "", html, flags=re.S), "a placeholder was left"


def test_links_lead_to_parts_of_the_page(page: Element):
    ids = {e.attributes["id"] for e in page.walk() if "id" in e.attributes}
    links = [e.attributes["href"] for e in page.all("a")]
    assert len(links) == 6 and {link.removeprefix("#") for link in links} <= ids


def test_it_reads_on_a_phone_and_in_the_dark(page: Element):
    (style,) = page.all("style")
    assert "prefers-color-scheme: dark" in style.words and "max-width: 620px" in style.words
    assert any("width=device-width" in e.attributes.get("content", "") for e in page.all("meta"))
    widths = [e.attributes["width"] for e in page.all("svg", "chart")]
    assert len(widths) == 5 and set(widths) == {"100%"}


def test_pictures_are_described_for_those_who_cannot_see_them(page: Element):
    for chart in page.all("svg", "chart"):
        assert chart.attributes["role"] == "img" and chart.attributes["tabindex"] == "0"
        assert chart.attributes["aria-label"].endswith(".")


def test_memory_shows_holders_measurement_and_budget(page: Element):
    memory = section(page, "memory")
    names = {part.name for level in DATA.levels for part in level.held}
    assert len(memory.all("path", "stack")) == len(names) > 4
    assert len(memory.all("path", "measured")) == 1
    assert len(memory.all("line", "limit", "budget")) == len(memory.all("line", "limit", "peak")) == 1
    assert len(memory.all("rect", "hover")) == len(DATA.levels)
    assert DATA.peak_level is not None
    rows = memory.all("table", "holders")[0].all("tr")
    assert [row.all("th")[0].words for row in rows] == [part.name for part in DATA.peak_level.held]
    assert format_bytes(DATA.peak_level.held[0].num_bytes) in rows[0].text()


def test_the_levels_are_those_of_the_replay():
    assert max(level.num_bytes for level in DATA.levels) == DATA.plan.peak_bytes
    assert [level.at_s for level in DATA.levels] == sorted(level.at_s for level in DATA.levels)
    assert DATA.levels[0].phase == "backward" and {level.phase for level in DATA.levels} >= {
        "forward",
        "optimizer step",
    }
    assert DATA.levels[0].at_s >= 0 and DATA.levels[-1].at_s < DATA.plan.step_s


def test_lanes_show_plan_over_measurement_with_waits(page: Element):
    lanes = section(page, "lanes")
    planned, measured = lanes.all("g", "planned"), lanes.all("g", "measured")
    assert len(planned) == len(measured) == len({event.lane for event in DATA.events})
    bars = [bar for group in planned for bar in group.all("rect", "work") if "held" not in bar.classes]
    assert len(bars) == len(DATA.events)
    assert planned[0].all("rect", "held") and len(measured[0].all("rect", "held")) == 1
    assert all(float(bar.attributes["x"].rstrip("%")) <= 100 for bar in bars)
    assert "compute waits" in lanes.all("ul", "legend")[0].text()


def test_a_cell_stands_for_each_decision_about_each_block(page: Element):
    decisions = section(page, "decisions")
    columns = decisions.all("svg", "chart")[0].children[:BLOCKS]
    hints = [column.all("title")[0].words for column in columns]
    assert all(label in hint for label, hint in zip(DATA.plan.labels, hints, strict=True))
    halved = sum((d.num_offloaded is not None) + (d.num_moved_states is not None) for d in DATA.plan.decisions)
    assert halved and sum(len(column.all("rect", "cell")) for column in columns) == 3 * BLOCKS + halved
    assert "offload" in hints[0] and "orange" in columns[0].all("rect")[0].classes


def test_the_curve_has_todays_point(page: Element):
    budget = section(page, "budget")
    assert len(budget.all("circle", "point")) == len(DATA.curve)
    (plan,) = budget.all("circle", "mark-plan")
    assert format_bytes(DATA.plan.peak_bytes) in plan.all("title")[0].words
    assert len(budget.all("circle", "mark-run")) == len(budget.all("path", "curve")) == 1


def test_reasons_are_said_of_every_block(page: Element):
    reasons = section(page, "reasons")
    assert "lane binds" in reasons.all("p")[0].words and "next best" in reasons.text()
    assert sum(int(n) for n in re.findall(r"layers\.\d+-\d+ \((\d+)\)", reasons.text())) == BLOCKS


def test_errors_are_shown_of_every_step_but_the_first(page: Element):
    errors = section(page, "errors")
    for name in ("time", "peak"):
        assert len(errors.all("circle", "error", name)) == len(DATA.steps) - 1
    assert "too low" in errors.all("circle", "time")[0].all("title")[0].words
    assert not any("step 0:" in title.words for title in errors.all("title"))


def test_without_measurements_the_page_says_so():
    planned = read(page_of(PLANNED))
    assert not section(planned, "memory").all("path", "measured")
    assert not section(planned, "lanes").all("g", "measured")
    assert "No step has been recorded yet" in section(planned, "lanes").text()
    assert "Fewer than two steps" in section(planned, "errors").text()
    assert not section(planned, "budget").all("circle", "mark-run")


def test_a_bare_plan_has_a_page():
    plan = Plan(labels=DATA.plan.labels, decisions=DATA.plan.decisions)
    bare = dataclasses.replace(PLANNED, plan=plan, events=(), levels=(), curve=(), budget_bytes=None)
    found = read(page_of(bare))
    for name, words in (("memory", "cannot be shown"), ("lanes", "cannot be shown"), ("budget", "No curve")):
        assert words in section(found, name).text()
    assert "no reasons are recorded" in section(found, "reasons").text().lower()


def test_labels_are_not_taken_for_html():
    hostile = [f'<script>alert("{i}")</script>&' for i in range(BLOCKS)]
    found = read(page_of(report_data(BLOCKS, labels=hostile)))
    assert len(found.all("script")) == 1
    assert hostile[0] in section(found, "decisions").all("title")[0].words


def test_a_hundred_blocks_take_a_moment():
    data = report_data(100, with_reasons=False)
    began = time.perf_counter()
    html = page_of(data)
    assert time.perf_counter() - began < 5.0 and len(html) < 1_000_000
    assert len(section(read(html), "decisions").all("svg", "chart")[0].children) >= 100


def test_sentences_sum_it_up():
    said = sentences_of(DATA)
    assert len(said) == 5 and all(sentence.endswith(".") for sentence in said)
    assert said[0].startswith("The peak is predicted") and "10 blocks." in said[2]


def test_how_far_off_is_said_in_words():
    assert (off(103.0, 100.0), off(97.0, 100.0), off(100.0, 100.0)) == ("3.0% too high", "3.0% too low", "right")


@pytest.mark.parametrize(
    ("low", "high", "binary", "marks"),
    [
        (0.0, 10.0, False, (0, 2, 4, 6, 8, 10)),
        (0.0, 3.0, False, (0, 1, 2, 3)),
        (0.0, 900.0, True, (0, 256, 512, 768, 1024)),
    ],
)
def test_axes_have_round_figures(low: float, high: float, binary: bool, marks: tuple[float, ...]):
    found = svg.axis(low, high, binary=binary)
    assert found.marks == marks and (found.low, found.high) == (marks[0], marks[-1])


def test_an_axis_of_one_figure_is_an_axis():
    found = svg.axis(5.0, 5.0)
    assert found.low <= 5.0 < found.high and 0 <= found.share(5.0) < 1
