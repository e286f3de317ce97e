"""The prose of docstrings, pages and errors: short sentences that name their subject.

A page's figures, code, formulas and tables are no sentences; a bullet and an entry of a section such as ``Args:`` begin one.
"""

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "autohete_fx").rglob("*.py"), *(ROOT / "passes").glob("*.py")])
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BEGINS_BADLY = re.compile(r"(?:\A|[.:!?]\s+|\n\s*\n\s*)\[?((?:Of|What|Who|So|Such)\b[^.]*)")
"""A sentence whose first word stands for a thing instead of naming it."""
MOST_WORDS = 25
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_BULLET = re.compile(r"(?:\*|-|\d+\.)\s+")
_SENTENCE = re.compile(r"(?<=[.!?])[\])*\"'_]*\s+(?=[A-Z`*\[\"'(0-9])")
_ERRORS = re.compile(r"\w*Error|.*\.(?:warn|warning|error)|error|_Refusal")


def public_docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Names and docstrings of a file, its classes, functions and constants, but for private ones."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = getattr(node, "name", "the file")
            text = ast.get_docstring(node)
            if text is not None and not name.startswith("_"):
                yield name, text
        if isinstance(node, ast.Module | ast.ClassDef):
            yield from constant_docstrings(node.body)


def constant_docstrings(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Names and texts of strings that stand below an assignment."""
    for assigned, said in itertools.pairwise(body):
        match assigned, said:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str() as text)):
                target = assigned.targets[0] if isinstance(assigned, ast.Assign) else assigned.target
                if not (name := ast.unparse(target)).lstrip("(").startswith("_"):
                    yield name, inspect.cleandoc(text)


def paragraphs(text: str) -> Iterator[str]:
    """The running text of a docstring or a page, a bullet or an entry at a time, without code and tables."""
    text = re.sub(
        r"```.*?```|^<!-- figure: \S+ -->$.*?^<!-- /figure -->$", "\n\n", text, flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"<!-- figure: \S+ -->.*?<!-- /figure -->", "figure", text, flags=re.DOTALL)
    found: list[str] = []
    section = literal = None
    base = indent = 0
    is_blank = True
    for line in text.splitlines():
        stripped, before, indent = line.strip(), indent, len(line) - len(line.lstrip())
        bullet = _BULLET.match(stripped)
        if stripped and literal is not None and indent <= literal:
            literal = None
        if stripped and section is not None and indent <= section:
            section = None
        if stripped and literal is None and section is None and is_blank and indent > base and not bullet:
            literal = base
        was_blank, is_blank = is_blank, not stripped
        if not stripped or stripped[0] in "#|<" or literal is not None or _SECTION.fullmatch(stripped):
            section = indent if _SECTION.fullmatch(stripped) else section
            yield " ".join(found)
            found = []
            continue
        if not bullet and section is None and (was_blank or indent < base):
            base = indent
        begins_term = (
            section is None and not bullet and bool(found) and indent > before and not found[0].startswith("\0")
        )
        if bullet or begins_term or (section is not None and indent == section + 4):
            yield " ".join(found)
            found = []
        found.append(("\0" if bullet else "") + stripped[bullet.end() if bullet else 0 :])
        if stripped.endswith("::"):
            literal = indent
    yield " ".join(found)


def long_sentences(text: str) -> list[str]:
    """Sentences of more than MOST_WORDS words; a piece of code and a link's address are one."""
    found = []
    for paragraph in paragraphs(text):
        for sentence in _SENTENCE.split(paragraph.replace("\0", "")):
            words = re.sub(r"``?[^`]+``?", "code", re.sub(r"\]\([^)]*\)", "]", sentence)).split()
            if sum(bool(re.search(r"\w", word)) for word in words) > MOST_WORDS:
                found.append(sentence)
    return found


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of errors and warnings; a value that is put in is one word."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and node.args and _ERRORS.fullmatch(ast.unparse(node.func)):
            match node.args[0]:
                case ast.Constant(str() as text):
                    yield node.lineno, text
                case ast.JoinedStr(parts):
                    yield (
                        node.lineno,
                        "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts),
                    )
                case _:
                    pass


def test_the_rule_finds_what_it_is_for():
    for bad in ("What a plan is.", "A plan. So it goes.", "A plan:\n\nOf two blocks.", "Who knows? Such plans."):
        assert BEGINS_BADLY.search(bad), bad
    for good in ("A plan says what it is.", "The plan of a graph, so to say.", "Whatever the plan, it is exact."):
        assert not BEGINS_BADLY.search(good), good


def test_sentences_are_counted_word_by_word():
    enough = " ".join(["word"] * MOST_WORDS)
    assert not long_sentences(f"{enough}.\nNext {' '.join(['word'] * 20)}.")
    assert not long_sentences(f"One::\n\n    {enough} of code\n\nTwo.\n\n* {enough}\n* {enough}")
    assert not long_sentences(f"One.\n\nArgs:\n    a: {' '.join(['word'] * 20)}\n    b: {' '.join(['word'] * 20)}")
    assert len(long_sentences(f"One.\n\n* {enough}\n  more. Two.\n\nAlso {enough}.")) == 2
    assert long_sentences(f"{enough}\nand `some code`.") == [f"{enough} and `some code`."]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_docstrings_are_sentences_of_few_words_that_name_their_subject(path: Path):
    texts = list(public_docstrings(path))
    begun = {name: match[1] for name, text in texts for match in BEGINS_BADLY.finditer(text)}
    assert not begun, f"begin the sentence with the thing that it is about: {begun}"
    behind = [name for name, text in texts if re.search(r"\bbehind\b", text)]
    assert not behind, f"say 'after', or what is meant, instead of 'behind': {behind}"
    long = {name: found for name, text in texts if (found := long_sentences(text))}
    assert not long, f"a sentence has at most {MOST_WORDS} words: {long}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_are_sentences_of_few_words_that_name_their_subject(path: Path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    begun = [match[1] for match in BEGINS_BADLY.finditer(text)]
    assert not begun, f"begin the sentence with the thing that it is about: {begun}"
    assert not re.search(r"\bbehind\b", text), "say 'after', or what is meant, instead of 'behind'"
    assert not (found := long_sentences(path.read_text())), f"a sentence has at most {MOST_WORDS} words: {found}"


def test_errors_and_warnings_are_sentences_of_few_words_that_name_their_subject():
    wrong = []
    for path in SOURCES:
        for line, text in messages(path):
            for part in re.split(r"(?<=[.;!?])\s+", text):
                words = re.sub(r"`[^`]+`", "code", part).split()
                if len(words) > MOST_WORDS or re.match(r"(?:Of|What|Who|So|Such)\b", part) or "behind" in words:
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {part}")
    assert not wrong, "\n".join(wrong)
