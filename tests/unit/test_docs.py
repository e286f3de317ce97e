"""README is short, and what it and docs/ point to is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_is_read_in_one_go():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    assert page.name != "README.md" or {f"docs/{other.name}" for other in PAGES[1:]} <= set(links)
    for link in links:
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_commands_and_sentences_name_are_there(page: Path):
    text = page.read_text()
    named = re.findall(r"\b(?:tests|examples|autohete_fx)/[\w/]+(?:\.\w+)?", text)
    named += [f"examples/benchmarks/{script}" for script in re.findall(r"\| `(\w+\.py)[ `]", text)]
    for name in named:
        assert (ROOT / name).exists(), name


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
