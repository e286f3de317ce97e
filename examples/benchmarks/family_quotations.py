"""What the pages quote of `survey.py`; see `quotations`."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from quoting import Result, named

Row = dict[str, Any]


def _rows() -> list[Row]:
    """Of all its files, ordered by kind and name; a family has one for each inner backend."""
    return sorted((row for result in _results() for row in result.rows), key=lambda row: (row["kind"], row["family"]))


def _results() -> list[Result]:
    return named("families_")


def _trained(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["result"] in ("trained", "refused")]


def _is_within(row: Row) -> bool:
    return row["peak bytes"] <= row["budget bytes"]


def _compile_ratio(row: Row) -> float:
    return row["compile s"] / row["plain compile s"]


def in_short() -> str:
    """How many ran, trained, were exact and kept their budget, by inner backend."""
    parts = []
    for inner, name in (("inductor", "under Inductor"), ("eager", "with the graphs run node by node")):
        ran = [row for row in _rows() if row["inner"] == inner]
        rows = _trained(ran)
        if not rows:
            continue
        bitwise, exact = sum(row["bitwise"] for row in rows), sum(row["exact"] for row in rows)
        within, refused = sum(map(_is_within, rows)), sum(row["result"] == "refused" for row in rows)
        ratios = [_compile_ratio(row) for row in rows if "compile s" in row]
        took = (
            f"; compiling took {statistics.median(ratios):.2f} times plain's in the median of {len(ratios)}"
            if ratios
            else ""
        )
        parts.append(
            f"{name} {len(ran)} of {_num_families()} families ran, and {len(rows)} of them trained: {bitwise} bitwise equal to"
            f" plain, {exact} exact, {within} within budget, {refused} of them in the budget that a refusal named{took}"
        )
    return "; ".join(parts)


def _num_families() -> int:
    """Of the installed transformers, as the survey that ran last has them."""
    return max(result.environment.get("families", 0) for result in _results())


def table() -> str:
    """A row for each family and inner backend."""
    head = (
        "family",
        "kind",
        "inner",
        "graphs",
        "layers found",
        "exact",
        "budget",
        "peak of it",
        "compile time",
        "remarks",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in _trained(_rows())]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    own = row.get("plain's difference", 0.0)
    exact = "bitwise" if row["bitwise"] else f"{row['difference']:.0e}, plain from eager {own:.0e}"
    budget = f"{row['budget bytes'] / row['plain peak bytes']:.0%}" + (
        " (refused less)" if row["result"] == "refused" else ""
    )
    said = [
        *(f"break: {reason}" for reason in row["breaks"]),
        *(text.splitlines()[0][:120] for text in row["warnings"]),
    ]
    peak = f"{row['peak bytes'] / row['budget bytes']:.1%}"
    return (
        row["family"],
        row["kind"],
        row["inner"],
        str(row["graphs"]),
        str(len(row["layers found"])),
        exact if row["exact"] else f"**no**: {exact}",
        budget,
        peak if _is_within(row) else f"**{peak}**",
        f"{_compile_ratio(row):.2f} times" if "compile s" in row else "",
        "; ".join(said).replace("|", "/"),
    )


def rest() -> str:
    """Families without a row that trained, with the reason."""
    lines = ["| family | inner | result | why |", "|---|---|---|---|"]
    for row in _rows():
        if not _trained([row]):
            why = row["error"][:200].replace("|", "/")
            lines.append(f"| {row['family']} | {row['inner']} | {row['result']} | {why} |")
    return "\n".join(lines)


FIGURES: dict[str, Callable[[], str]] = {"families.short": in_short, "families.table": table, "families.rest": rest}
"""By the name under which a page quotes it."""
