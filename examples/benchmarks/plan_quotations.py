"""What the pages quote of what ``autohete plan`` prints; see `quotations`."""

from collections.abc import Callable, Iterable, Sequence

from quoting import read

_WIDTH = 127


def plan_in_short() -> str:
    """From the predicted step on."""
    command, lines = _printed()
    return _listing([f"$ {command}", "…", *_section(lines, "predicted step")])


def plan() -> str:
    """All but why, and of the blocks the first and the last ones."""
    command, lines = _printed()
    lines = lines[: lines.index("why") - 1]
    begin = next(i for i, line in enumerate(lines) if line.startswith("---")) + 1
    end = lines.index("", begin)
    blocks = lines[begin:end]
    shown = [*blocks[:10], "…", *blocks[-7:]] if len(blocks) > 18 else blocks
    return _listing([f"$ {command}", *lines[:begin], *shown, *lines[end:]])


def plan_reasons() -> str:
    """What binds, and of two blocks what else could have been chosen."""
    lines = _printed()[1]
    binds = _section(lines, lines[lines.index("why") + 1])
    blocks: list[list[str]] = []
    for line in lines[lines.index("why") + len(binds) + 2 :]:
        if not line.startswith(" "):
            blocks.append([])
        blocks[-1].append(line)
    return _listing([*binds, "", *blocks[1], *blocks[-3], "…"])


def plan_ranks() -> str:
    """The table of a sweep over numbers of ranks, with its heading."""
    command, lines = _printed("what_if_ranks")
    return _listing([f"$ {command}", *lines])


def _printed(name: str = "what_if") -> tuple[str, list[str]]:
    (row,) = read(name).rows
    return row["command"], row["printed"]


def _section(lines: Sequence[str], start: str) -> list[str]:
    """From a line that begins so up to an empty one."""
    begin = next(i for i, line in enumerate(lines) if line.startswith(start))
    return list(lines[begin : lines.index("", begin)])


def _listing(lines: Iterable[str]) -> str:
    cut = (line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…" for line in lines)
    return "\n".join(["```", *cut, "```"])


FIGURES: dict[str, Callable[[], str]] = {
    "plan.short": plan_in_short,
    "plan": plan,
    "plan.reasons": plan_reasons,
    "plan.ranks": plan_ranks,
}
"""By the name under which a page quotes it."""
