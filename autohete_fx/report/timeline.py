"""The lanes of one step as a text Gantt chart.

In: the events of a simulation, or of a recorded run. Out: one row per lane. A bar begins with the letter of its work and the
number of its block. It is drawn out with ``=``: ``F3====`` is the forward of block 3. Idle time is blank. Where bars are
narrower than a character, the one that covers most of it is shown.
"""

from collections.abc import Sequence
from typing import Protocol

from autohete_fx.ir import Lane
from autohete_fx.ir.sizes import format_seconds

__all__ = ["LaneEvent", "render_timeline"]

_NAME_WIDTH = 8
_SHARE_WIDTH = 6


class LaneEvent(Protocol):
    """Work on one lane: ``label`` says what it is (``forward``), ``block`` for which block, times in seconds."""

    @property
    def lane(self) -> Lane: ...
    @property
    def label(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


def render_timeline(events: Sequence[LaneEvent], width: int = 100) -> str:
    """Draw events in ``width`` columns (at least 40): a row per lane that works, with the share of time it does.

    Events of one lane must not overlap: a lane is in order.
    """
    assert width >= 40, "a timeline needs 40 columns"
    if not events:
        return "no events"
    start_s = min(event.start_s for event in events)
    span_s = max(event.end_s for event in events) - start_s
    if span_s <= 0:
        return "no time passes between the events"
    columns = width - _NAME_WIDTH - _SHARE_WIDTH - 3
    letters = _letters(events)
    lines = [_axis(span_s, columns)]
    for lane in Lane:
        on_lane = sorted((event for event in events if event.lane is lane), key=lambda event: event.start_s)
        if not on_lane:
            continue
        cells = _draw(on_lane, letters, start_s, span_s / columns, columns)
        busy = sum(event.end_s - event.start_s for event in on_lane) / span_s
        lines.append(f"{lane.value:<{_NAME_WIDTH}} |{cells}|{busy:>{_SHARE_WIDTH}.0%}")
    lines.extend(_legend(letters, width))
    return "\n".join(lines)


def _draw(events: Sequence[LaneEvent], letters: dict[str, str], start_s: float, cell_s: float, columns: int) -> str:
    """One lane: each cell goes to the event that covers most of it, then each event writes over its own cells."""
    owner: list[int | None] = [None] * columns
    covered = [0.0] * columns
    for position, event in enumerate(events):
        first = min(int((event.start_s - start_s) / cell_s), columns - 1)
        last = min(int((event.end_s - start_s) / cell_s), columns - 1)
        for cell in range(first, last + 1):
            left_s, right_s = start_s + cell * cell_s, start_s + (cell + 1) * cell_s
            overlap_s = min(event.end_s, right_s) - max(event.start_s, left_s)
            if overlap_s > covered[cell]:
                owner[cell], covered[cell] = position, overlap_s
    fullest: dict[int, int] = {}
    for cell, position in enumerate(owner):
        if position is not None and covered[cell] > covered[fullest.setdefault(position, cell)]:
            fullest[position] = cell
    # An event that stopped before half of its last cell leaves that cell idle; however short, it keeps one.
    kept = {*fullest.values(), *(cell for cell in range(columns) if covered[cell] >= cell_s / 2)}
    owner = [position if cell in kept else None for cell, position in enumerate(owner)]
    row = [" "] * columns
    for position, event in enumerate(events):
        own = [cell for cell, holder in enumerate(owner) if holder == position]
        head = f"{letters[event.label]}{event.block}"
        text = head if len(head) <= len(own) else letters[event.label]
        for place, cell in enumerate(own):
            row[cell] = text[place] if place < len(text) else "="
    return "".join(row)


def _letters(events: Sequence[LaneEvent]) -> dict[str, str]:
    """One capital per label, in order of appearance: its first letter that is still free."""
    letters: dict[str, str] = {}
    for event in sorted(events, key=lambda event: event.start_s):
        if event.label not in letters:
            free = (letter for letter in event.label.upper() if letter.isalpha() and letter not in letters.values())
            letters[event.label] = next(free, "*")
    return letters


def _axis(span_s: float, columns: int) -> str:
    left, middle, right = "0", format_seconds(span_s / 2), format_seconds(span_s)
    gap = columns // 2 - len(left) - len(middle) // 2
    line = f"{left}{' ' * gap}{middle}"
    return f"{'':<{_NAME_WIDTH}}  {line}{right:>{columns - len(line)}}"


def _legend(letters: dict[str, str], width: int) -> list[str]:
    lines, line = [], ""
    for label, letter in letters.items():
        entry = f"{letter} {label}"
        if line and len(line) + 3 + len(entry) > width:
            lines.append(line)
            line = ""
        line = f"{line}   {entry}" if line else entry
    return [*lines, line]
