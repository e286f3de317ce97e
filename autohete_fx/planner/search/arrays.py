"""What compiled code works on: tables of what settings take, figures of assignments, and what walks know.

All are arrays, in named tuples, which Numba takes as they are. Figures and what a replay notes end with the place in a group of
`compiled.WIDTH` assignments, which are replayed side by side.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
Bytes = NDArray[np.float64]
"""Exact, and faster than whole numbers."""
Rows = NDArray[np.int64]
"""Assignments as indices into each block's settings; or any other indices."""


class Rules(NamedTuple):
    """What replays of a problem are made of.

    Attributes:
        training: else a step is one forward.
        synchronous: all updates are done before the next step begins.
        early: updates begin when gradients land, not when backward ends.
        sends_at_once: see `figures.sends_at_once`.
        priority: of updates, by the order of the next forward.
        one_memory: updates on the host begin after those on the device.
        micro_batches: passes forward and backward in a step.
    """

    training: bool
    synchronous: bool
    early: bool
    sends_at_once: bool
    priority: bool
    one_memory: bool
    micro_batches: int


class Tables(NamedTuple):
    """What every setting of every block does.

    Attributes:
        rules: of the problem.
        lanes: seconds of work, copies up and copies down by pass, block and setting. The first pass waits for updates; the
            second is a backward, the last block first; a third is a forward, where the first is not that.
        distance: prefetch distances by block and setting.
        updates: by block and setting, seconds of updates on the device and on the host, and of uploads and streamed states that no
            pass issues.
        waits: by block and setting, whether the first pass's copies up wait for an update on the host.
    """

    rules: Rules
    lanes: Seconds
    distance: Rows
    updates: Seconds
    waits: NDArray[np.bool_]


class Figures(NamedTuple):
    """What assignments do: every array begins with groups of `compiled.WIDTH` and ends with the place in the group.

    Attributes:
        passes: by pass, position and kind: seconds of work, copies up and copies down; how many positions before a copy up is
            issued, and after how many a copy down is awaited, or `compiled.NOWHERE` where there is none. Behind the last position
            there are `compiled.SLOTS` with no copies.
        updates: by kind, as in `Tables`, and block.
        waits: by block 0 where copies up wait for an update, else NEVER.
    """

    passes: Seconds
    updates: Seconds
    waits: Seconds


class Scratch(NamedTuple):
    """Of one group, by the place in it: what a replay notes.

    Attributes:
        start, step, all_updated: when a pass starts, seconds of the step, and when all updates are done.
        mean: when blocks of the first pass are done, on average.
        state: of the pass that runs (`compiled.STATES`), flat.
        updated: by block, as many more as there are slots, and flat.
        landed, sent: of the last pass, by position and flat, when work and copy down are done, and the lane up with what is issued
            there, or up to there.
    """

    start: Seconds
    step: Seconds
    all_updated: Seconds
    mean: Seconds
    state: Seconds
    updated: Seconds
    landed: Seconds
    sent: Seconds


class Terms(NamedTuple):
    """What annealing looks at.

    Attributes:
        tables: of seconds.
        use: device bytes by block, setting and span.
        elsewhere: bytes on the host and on disk, by block, setting and tier.
        fixed_bytes: device bytes that are always there.
        limits: of device memory, host memory and disk, infinite for none.
        paid, wasted: by block and setting, what is added to seconds of a step; the latter counts for walks only.
        parts: by block and setting: what is done with activations, places, distance.
        counts: how many there are of each part, by block.
        settings: the setting that has such parts, by block and parts.
    """

    tables: Tables
    use: Bytes
    elsewhere: Bytes
    fixed_bytes: float
    limits: Seconds
    paid: Seconds
    wasted: Seconds
    parts: Rows
    counts: Rows
    settings: Rows


class Walks(NamedTuple):
    """Assignments that change: by walk, and what was best so far.

    Attributes:
        rows: settings by block.
        use, elsewhere, paid, wasted: of these, all together.
        prices: what their steps take, with all that is added.
        figures: of ``rows``.
        best, best_score: one that keeps the limits, and its score.
    """

    rows: Rows
    use: Bytes
    elsewhere: Bytes
    paid: Seconds
    wasted: Seconds
    prices: Seconds
    figures: Figures
    best: Rows
    best_score: Seconds


class Heat(NamedTuple):
    """How walks walk.

    Attributes:
        hottest, coldest: what a change may cost and still be taken with a chance of 1/e: first, as a share of a block's part in the
            best score, and last, as a share of all of it.
        first_price, last_price: of memory above a limit, as shares of the best score for a share of the limit.
        near: how far the second of two blocks is half of the time, at most.
        exchanges, changes_of_two: shares of changes where two blocks exchange what they do, or where two change.
        given: share of changes to what some block of some walk does.
        mating: every so many rounds walks mate, counted from the first of a call of `compiled.walk_on`.
        lateness: what walks pay at first for a second by which blocks of the first pass are done later on average; nothing at last.
    """

    hottest: float
    coldest: float
    first_price: float
    last_price: float
    near: int
    exchanges: float
    changes_of_two: float
    given: float
    mating: int
    lateness: float
