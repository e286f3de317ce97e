"""The prose of docstrings and pages: sentences that name their subject."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "autohete_fx").rglob("*.py"), *(ROOT / "passes").glob("*.py")])
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BEGINS_BADLY = re.compile(r"(?:\A|[.:!?]\s+|\n\s*\n\s*)((?:Of|What|Who|So|Such)\b[^.]*)")
"""A sentence whose first word stands for a thing instead of naming it."""


def public_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Names and docstrings of a file, its classes and functions, but for private ones."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = getattr(node, "name", "the file")
            text = ast.get_docstring(node)
            if text is not None and not name.startswith("_"):
                yield name, text


def test_the_rule_finds_what_it_is_for():
    for bad in ("What a plan is.", "A plan. So it goes.", "A plan:\n\nOf two blocks.", "Who knows? Such plans."):
        assert BEGINS_BADLY.search(bad), bad
    for good in ("A plan says what it is.", "The plan of a graph, so to say.", "Whatever the plan, it is exact."):
        assert not BEGINS_BADLY.search(good), good


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_of_a_public_docstring_begins_with_a_pronoun(path: Path):
    found = {name: match[1] for name, text in public_docstrings(path) for match in BEGINS_BADLY.finditer(text)}
    assert not found, f"begin the sentence with the thing that it is about: {found}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_sentence_of_a_page_begins_with_a_pronoun(path: Path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    found = [match[1] for match in BEGINS_BADLY.finditer(text)]
    assert not found, f"begin the sentence with the thing that it is about: {found}"
