"""Text on a terminal: numbers, headings and words of the same kind in the same colours.

Enter the text of a command; it is printed, in colours where standard output is a terminal. ``NO_COLOR`` turns them off, and
``FORCE_COLOR`` on, as elsewhere (https://no-color.org).
"""

import io
import os
import re
import sys

__all__ = ["show_text"]

_RULES = (
    (r"^(?:predicted step|predicted peak|lanes busy|status|throughput|ranks|net)(?= )", "36"),
    (r"^-[- ]+-$", "2"),
    (r"^(?:what more would buy|why|step time by .*|strategies of other systems.*)$", "1"),
    (r"\b(?:recompute|offload|host|disk)\b(?=  |$)", "33"),
    (r"(?<![\w.])\d[\d,.]*(?: (?:[KMGT]iB|B|min \d\d s|h \d\d min|[mun]?s|tokens/s|[KMBT])\b|[%x](?!\w))", "32"),
)
"""Patterns, and the codes of ANSI's colours for what they find."""
_ANY = re.compile("|".join(f"(?P<c{at}>{pattern})" for at, (pattern, _) in enumerate(_RULES)), re.MULTILINE)


def show_text(text: str) -> None:
    """Print it at once. Characters that the output has no code for are named instead."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    print(coloured(text) if _has_colours() else text, flush=True)


def coloured(text: str) -> str:
    """The text with the codes of colours; without them it is as it was."""

    def paint(found: re.Match[str]) -> str:
        code = _RULES[int((found.lastgroup or "c0")[1:])][1]
        return f"\x1b[{code}m{found[0]}\x1b[0m"

    return text if text.startswith("{") else _ANY.sub(paint, text)


def _has_colours() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (sys.stdout.isatty() and os.environ.get("TERM") != "dumb")
