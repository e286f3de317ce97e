"""When updates on the host are done, for many assignments side by side: in come landings of gradients, out come seconds.

Every array is by block and column, a column being an assignment. `update_lane` and `shared_lane` say what is served when; here is
what follows from that, without a queue.
"""

from collections.abc import Sequence

import numpy as np

from autohete_fx.planner.search.passes import NEVER, Seconds


def all_updated(begin: Seconds, host_s: Seconds, *, priority: bool) -> Seconds:
    """When each block is updated, where all gradients come together: by priority blocks 0..b one after the other, else the last
    block first."""
    took = host_s if priority else host_s[::-1]
    updated = np.add.accumulate(took, axis=0)
    updated += begin
    return updated if priority else updated[::-1]


def each_updated(landed: Seconds, host_s: Seconds, *, priority: bool) -> Seconds:
    """When each block is updated whose update begins when its gradients land, the last block's first; NEVER for no update.

    Without priority in the order in which they come. By priority b waits until all that come before it are done. They are
    c..b-1, where c-1 is the first to come when those and b are. Write H[c] for the updates of 0..c-1. Then b comes at r[b] and
    is done at r[b] + H[b+1] - H[c]. Here c is the largest that has r[c-1] + H[c] >= r[b] + H[b+1], or 0.
    """
    if not priority:
        updated, free = np.empty_like(host_s), np.full(host_s.shape[1], NEVER)
        for block in range(len(host_s))[::-1]:
            free = np.where(host_s[block] > 0, np.maximum(free, landed[block]) + host_s[block], free)
            updated[block] = free
        return np.where(host_s > 0, updated, NEVER)
    after = np.add.accumulate(host_s, axis=0)
    before = after - host_s
    # Of blocks without an update, too, the last to land until then.
    busy_until = np.maximum.accumulate(landed[::-1], axis=0)[::-1] + after
    first = np.zeros_like(host_s)
    for c in range(1, len(host_s)):
        np.copyto(first[c:], before[c], where=busy_until[c - 1] >= busy_until[c:])
    return np.where(host_s > 0, busy_until - first, NEVER)


def idle_time(at: Seconds, busy: Sequence[tuple[Seconds, Seconds]]) -> Seconds:
    """Points of time before or after 0, as what a lane is idle from then to there.

    ``busy`` says until when it is, and how long, piece by piece, by column.
    """
    found, left = at.copy(), np.empty_like(at)
    for end, took in busy:
        if took.any():
            np.subtract(np.where(took > 0, end, 0.0), at, out=left)
            np.maximum(left, 0.0, out=left)
            np.minimum(left, took, out=left)
            np.add(found, left, out=found)
    return found
