"""README is short, what it and docs/ point to is there, and their figures are those of the result files."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_MEASURED = {
    "README.md": ["60%"],  # an example of an option
    "clusters.md": [
        "0.5%",
        "1.79 times",
        "5%",
    ],  # a bound that a test asserts, a claim of the paper's authors, the reserve of the table
    "families.md": ["60%"],  # the share that the survey is given
    "promises.md": ["0.1%", "5%", "60%", "3%", "1%"],  # bounds that the tests beside them assert
}


def test_readme_is_read_in_one_go():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    assert page.name != "README.md" or {f"docs/{other.name}" for other in PAGES[1:]} <= set(links)
    for link in links:
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "tests/cuda/FIRST_TEN_MINUTES.md"], ids=lambda page: page.name)
def test_files_that_commands_and_sentences_name_are_there(page: Path):
    text = re.sub(r"--json \S+", "", page.read_text())  # is written by the command
    named = re.findall(r"\b(?:tests|examples|autohete_fx)/[\w/]+(?:\.\w+)?", text)
    named += [f"examples/benchmarks/{script}" for script in re.findall(r"\| `(\w+\.py)[ `]", text)]
    for name in named:
        assert (ROOT / name).exists(), name


def test_the_site_shows_every_page():
    """`make docs` builds it."""
    nav = re.findall(r"^ +- .*: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(nav) == sorted(["index.md", *(page.name for page in PAGES[1:])])


def test_rooms_of_the_house_are_there():
    text = (ROOT / "docs" / "internals.md").read_text()
    rooms = re.findall(r"`(\w+(?:/\w+)?)/`", text[text.index("## Where things are") :])
    assert len(rooms) > 10
    for room in rooms:
        found = [ROOT / "autohete_fx" / room, *(ROOT / "autohete_fx").glob(f"*/{room}")]
        assert any(path.is_dir() for path in found), room


def test_words_of_warnings_and_errors_are_said():
    sources = (ast.parse(path.read_text()) for path in (ROOT / "autohete_fx").rglob("*.py"))
    said = [node.value for tree in sources for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    texts = [text for text in said if isinstance(text, str)]
    quoted = re.findall(r'^\| "([^"]+)"', (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.M)
    assert len(quoted) > 8
    for words in quoted:
        assert any(words in text for text in texts), words


@pytest.fixture(scope="module")
def figures(benchmarks: Path) -> Any:
    """The script that writes them."""
    import figures  # pyright: ignore[reportMissingImports]

    return figures


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_result_files(page: Path, figures: Any):
    """`python examples/benchmarks/figures.py` writes them."""
    assert not list(figures.differences(page.name, page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_figure_stands_beside_them(page: Path, figures: Any):
    """A share, a time or a rate that no result file tells could be anything by now."""
    text = re.sub(r"```.*?```", "", figures.unmarked(page.read_text()), flags=re.S)
    assert re.findall(r"\d[\d.,]*\s?(?:%|times\b|s\b|ms\b|[MG]B/s|tokens/s)", text) == NOT_MEASURED.get(page.name, [])


def test_a_figure_that_drifted_is_told_with_its_line(figures: Any):
    good = "# Title\n\nThe worst is <!-- figure: planner_gap.worst --><!-- /figure -->.\n"
    (found,) = figures.differences("page.md", good)
    assert found.startswith("page.md:3: figure planner_gap.worst\n  stands:   \n  expected: ")
    assert not list(figures.differences("page.md", figures.filled(good)))
    assert list(figures.differences("page.md", figures.filled(good).replace("%", "‰")))
    for bad in (
        "<!-- figure: unknown -->1<!-- /figure -->",
        "<!-- figure: plan -->",
        good.replace("The worst is ", ""),
    ):
        assert list(figures.differences("page.md", bad)), bad


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_that_of_its_run(theme: str, benchmarks: Path):
    """`python examples/benchmarks/step_picture.py` draws it."""
    import step_picture  # pyright: ignore[reportMissingImports]

    run = json.loads(step_picture.DATA.read_text())["rows"]
    drawn, page = step_picture.draw(run, step_picture.THEMES[theme]), (ROOT / "README.md").read_text()
    assert step_picture.path_of(theme).read_text() == drawn
    assert f'"docs/step-{theme}.svg"' in page and len(drawn) < 60_000
    forward_s = min(bar["begin s"] for bar in run["bars"] if bar["what"] == "forward")
    assert forward_s < max(bar["end s"] for bar in run["bars"] if bar["what"] == "update"), "as the README says of it"
    run["bars"][0]["end s"] += 0.1
    assert step_picture.draw(run, step_picture.THEMES[theme]) != drawn
