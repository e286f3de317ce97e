"""Result files, and the phrases and tables that pages make of them; what they quote is in `quotations` and its neighbours."""

import functools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Result:
    """One result file."""

    environment: dict[str, Any]
    rows: Any

    @property
    def machine(self) -> str:
        """Cores and processor."""
        name = re.sub(r"\(R\)| Processor| CPU", "", self.environment["machine"])
        return f"{self.environment['cores']} core{'s'[: self.environment['cores'] > 1]}, {name}"

    def argument(self, name: str, default: str) -> str:
        """What its script was given by that name."""
        found = re.search(rf"{name} (\S+)", self.environment["command"])
        return found[1] if found else default

    @property
    def script(self) -> str:
        """That wrote it, with its arguments but for where it wrote."""
        words = self.environment["command"].removeprefix("python ").split()
        words = [word for i, word in enumerate(words) if not {word, words[i - 1]} & {"--json", "--save"}]
        return " ".join([Path(words[0]).name, *words[1:]])


@functools.cache
def read(name: str) -> Result:
    """A result file, by its name."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    return Result(content["environment"], content["rows"])


def named(prefix: str) -> list[Result]:
    """All result files whose names begin so."""
    return [read(path.stem) for path in sorted(RESULTS.glob(f"{prefix}*.json"))]


@dataclass(frozen=True)
class Row:
    """Of the table of measurements: what was measured, what came out, and the file that says so."""

    what: str
    result: str
    source: Result


def listed(words: Iterable[object]) -> str:
    """``a, b and c``."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last


def percent(share: float) -> str:
    """Whole ones from ten on, else with a digit."""
    return "less than 0.1%" if 0 < share < 0.0005 else f"{share:.{0 if share >= 0.0995 else 1}%}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])
