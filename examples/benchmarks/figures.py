"""The figures that the README and docs/ quote, written from the result files.

A page marks what is quoted: ``<!-- figure: step_time.half -->1.27 times …<!-- /figure -->`` within a sentence, or on lines of their
own around a table or a listing. `FIGURES` has a function for each name, from result files to text.

    python examples/benchmarks/figures.py            # write all figures into the pages
    python examples/benchmarks/figures.py --check    # say what stands there and what should, and fail where they differ
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import cluster_quotations
import family_quotations
import gpu_quotations
import plan_quotations
import quotations

FIGURES = {
    **quotations.FIGURES,
    **cluster_quotations.FIGURES,
    **family_quotations.FIGURES,
    **gpu_quotations.FIGURES,
    **plan_quotations.FIGURES,
}
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_MARKED = re.compile(r"<!-- figure: (\S+) -->(.*?)<!-- /figure -->", flags=re.S)


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where a figure is not its file's")
    if parser.parse_args().check:
        found = [difference for page in PAGES for difference in differences(page.name, page.read_text())]
        sys.exit("\n".join(found) or None)
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def filled(text: str) -> str:
    """A page with every figure as the result files have it."""
    return _MARKED.sub(lambda match: match[0].replace(f"-->{match[2]}<!--", f"-->{_wanted(match)}<!--"), text)


def differences(name: str, text: str) -> Iterator[str]:
    """Where a page has something else than the result files, and where a mark would not be read as one."""
    for match in _MARKED.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        where = f"{name}:{line}: figure {match[1]}"
        if match[1] not in FIGURES:
            yield f"{where} is none of {', '.join(FIGURES)}"
        elif match[2] != _wanted(match):
            yield f"{where}\n  stands:   {match[2].strip()}\n  expected: {_wanted(match).strip()}"
        elif "\n" not in match[2] and text[: match.start()].endswith("\n"):
            yield f"{where} begins its line, which Markdown then takes for HTML"
    if len(re.findall(r"<!-- /?figure", text)) != 2 * len(_MARKED.findall(text)):
        yield f"{name}: a mark of a figure has no counterpart"


def unmarked(text: str) -> str:
    """A page without its figures."""
    return _MARKED.sub("", text)


def _wanted(match: re.Match[str]) -> str:
    figure = FIGURES[match[1]]()
    return f"\n{figure}\n" if "\n" in figure else figure


if __name__ == "__main__":
    main()
