"""The update lane: in come when blocks' gradients are there and how long their updates take, out comes who is served when."""

import heapq
from collections.abc import Iterator, Mapping


def serve(
    ready_at: Mapping[int, float], took_s: Mapping[int, float], *, priority: bool
) -> Iterator[tuple[int, float, float]]:
    """Pieces of work as block, begin and end, in order; a block's last piece ends its update.

    By ``priority`` the lowest block that is there is served, and one that comes meanwhile and is lower goes first at once. Else
    blocks are served whole, in the order in which they come, the highest first of those that come together.
    """
    coming = sorted(ready_at, key=lambda block: (ready_at[block], -block))
    rank = {block: block if priority else place for place, block in enumerate(coming)}
    left_s = dict(took_s)
    coming.reverse()
    here: list[tuple[int, int]] = []
    clock = 0.0
    while coming or here:
        if not here:
            clock = max(clock, ready_at[coming[-1]])
        while coming and ready_at[coming[-1]] <= clock:
            block = coming.pop()
            heapq.heappush(here, (rank[block], block))
        block = here[0][1]
        end = clock + left_s[block]
        if priority and coming and ready_at[coming[-1]] < end:
            end = ready_at[coming[-1]]
            left_s[block] -= end - clock
        else:
            heapq.heappop(here)
        yield block, clock, end
        clock = end
