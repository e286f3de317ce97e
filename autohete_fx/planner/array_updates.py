"""When updates on the host are done, for many assignments at once: in come landings of gradients, out come seconds.

Every array is by block and row, a row being an assignment. `update_lane` and `shared_lane` say what is served when; here is
what follows from that, without a queue.
"""

import numpy as np

from autohete_fx.planner.array_passes import NEVER, Done, Seconds


def all_updated(ready: Seconds, host_s: Seconds, *, priority: bool) -> Seconds:
    """When the update lane is done with each block and all that the next forward needs before it.

    By priority, blocks 0..b are done when the last of them to come, of those whose successors keep the lane busy from
    then on, has had its turn: the largest over c <= b of when c comes plus the updates of 0..c, since these come later and
    go first. Else in the order in which they come, the last block first.
    """
    if priority:
        return np.maximum.accumulate(ready + np.cumsum(host_s, axis=0), axis=0)
    ready = np.broadcast_to(ready, host_s.shape)
    updated, free = np.zeros_like(host_s), np.full(host_s.shape[1], NEVER)
    for block in reversed(range(len(host_s))):
        free = np.where(host_s[block] > 0, np.maximum(free, ready[block]) + host_s[block], free)
        updated[block] = free
    return updated


def each_updated(landed: Seconds, host_s: Seconds, *, priority: bool) -> Seconds:
    """When each block is updated whose update begins when its gradients land, the last block's first; NEVER for no update.

    By priority b waits for all that come before it is done: for c..b-1, where c-1 is the first to come when those and b are. With
    H[c] for the updates of 0..c-1, b comes at r[b] and is done at r[b] + H[b+1] - H[c], and c is the largest that has
    r[c-1] + H[c] >= r[b] + H[b+1], or 0.
    """
    if not priority:
        return np.where(host_s > 0, all_updated(landed, host_s, priority=False), NEVER)
    landed = np.maximum.accumulate(landed[::-1], axis=0)[::-1]  # blocks without an update, too
    after = np.cumsum(host_s, axis=0)
    before = after - host_s
    busy_until = landed + after
    first = np.zeros_like(host_s)
    for c in range(1, len(host_s)):
        np.copyto(first[c:], before[c], where=busy_until[c - 1] >= busy_until[c:])
    return np.where(host_s > 0, busy_until - first, NEVER)


def idle_time(at: Seconds, backward: Done) -> Seconds:
    """Points of time before or after the end of backward, which is 0, as what the lane up is idle from then to there."""
    found = at.copy()
    for end, took in zip(backward.sent - backward.end, backward.sent_s, strict=True):
        if took.any():
            found += np.minimum(np.maximum(end - at, 0.0), took)
    return found
