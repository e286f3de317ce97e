"""A lane that does whatever is there and most urgent, a little at a time. In come pieces of work, out comes when they are done.

The blocks' work is asked for in the order of its urgency. All of it thus takes the lane's time that the work before it has
left.
"""

import bisect
from collections.abc import Iterable, Iterator


class SharedLane:
    """The lane, whose work for a block is more urgent than that for the blocks after it.

    Args:
        busy: begin and end of what it does first of all, in order.
    """

    def __init__(self, busy: Iterable[tuple[float, float]]) -> None:
        self._busy = list(busy)
        self._due: dict[int, list[tuple[str, float, float]]] = {}

    def add(self, label: str, block: int, seconds: float, ready_at: float) -> None:
        """Give it work for a block, which can begin from ``ready_at`` on."""
        if seconds:
            self._due.setdefault(block, []).append((label, seconds, ready_at))

    def serve(self, block: int) -> Iterator[tuple[str, float, float]]:
        """Do what it was given for a block: label, begin and end of pieces, in order."""
        for label, seconds, ready_at in self._due.pop(block, ()):
            for begin, end in self._take(seconds, ready_at):
                yield label, begin, end

    def _take(self, seconds: float, ready_at: float) -> list[tuple[float, float]]:
        place = bisect.bisect(self._busy, ready_at, key=lambda piece: piece[1])
        clock, left_s, pieces = ready_at, seconds, []
        for begin, end in [*self._busy[place:], (float("inf"), float("inf"))]:
            if (taken_s := min(left_s, begin - clock)) > 0:
                pieces.append((clock, clock + taken_s))
                left_s -= taken_s
            if left_s <= 0:
                break
            clock = max(clock, end)
        self._busy = sorted([*self._busy, *pieces])
        return pieces
