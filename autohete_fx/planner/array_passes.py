"""Passes over all blocks for many assignments at once: in come tables of what settings take, out comes when passes end.

A row is an assignment, and every number here is an array over rows: what counts is how many steps NumPy is asked for, per
position about twenty. So nothing is compared or masked on the way. What a setting does is looked up, where it is: its
copies up by *slot* (how many blocks ahead they are issued), the place where their end will be found in a record of
all slots, and the position at whose end its copies down are awaited.

Passes that do not depend on each other run side by side, as more rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
Rows = NDArray[np.int64]
"""Assignments as indices into each block's settings; or any other indices."""

NEVER = -np.inf
"""When that is there which nobody waits for."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What assignments do in passes.

    Attributes:
        passes: by figure (work, copies down, where copies up end, where copies down are awaited, and by slot copies up),
            position and row: all rows for the first pass, all for the second, and so on.
        waits: of the first pass, by slot, position and row: 0 where copies up wait for an update, else NEVER.
        updates: seconds of updates on the device and on the host, and of uploads and streamed states that no pass issues, by block
            and row.
    """

    passes: Seconds
    waits: Seconds
    updates: Seconds

    def part(self, passes: slice) -> "Figures":
        """Some of the passes."""
        count = self.waits.shape[-1]
        return Figures(self.passes[..., passes.start * count : passes.stop * count], self.waits, self.updates)


class PassTables:
    """`Figures` of every setting of every block.

    Args:
        lanes: of each pass, work, copies up and copies down by block and setting.
        reverse: of each pass, whether it takes the last block first.
        distance: prefetch distances by block and setting.
        updates: seconds of updates on the device and on the host, and of uploads and streamed states that no pass issues, by block
            and setting.
        on_host: by block and setting, whether updates are on the host; the first pass's copies up wait for those.
    """

    def __init__(
        self,
        lanes: Sequence[Seconds],
        reverse: Sequence[bool],
        distance: Rows,
        updates: tuple[Seconds, Seconds, Seconds, Seconds],
        on_host: NDArray[np.bool_],
    ) -> None:
        self.count = len(lanes)
        self.blocks = np.arange(len(distance))
        self.positions = [self.blocks[::-1] if backward else self.blocks for backward in reverse]
        tables = [_table(each, distance, at) for each, at in zip(lanes, self.positions, strict=True)]
        updated = on_host & (updates[1] > 0)
        waits = np.where((tables[0][..., 4:] > 0) & updated[..., None], 0.0, NEVER)
        self.tables = [*tables, waits, np.stack(updates, axis=-1)]

    def of(self, rows: Rows) -> Figures:
        """Figures of assignments."""
        found = (np.ascontiguousarray(table[self.blocks, rows].transpose(2, 1, 0)) for table in self.tables)
        *passes, waits, updates = found
        ordered = [each[:, at] for each, at in zip(passes, self.positions, strict=True)]
        return Figures(np.concatenate(ordered, axis=2), waits, updates)

    def change(self, figures: Figures, rows: Rows, blocks: Rows, settings: Rows) -> None:
        """Give blocks of some rows other settings."""
        *passes, waits, updates = (table[blocks, settings].T for table in self.tables)
        count = figures.waits.shape[-1]
        for i, (each, at) in enumerate(zip(passes, self.positions, strict=True)):
            figures.passes[:, at[blocks], i * count + rows] = each
        figures.waits[:, blocks, rows], figures.updates[:, blocks, rows] = waits, updates


def _table(lanes: Seconds, distance: Rows, at: Rows) -> Seconds:
    """Of a pass, by block, setting and figure."""
    work, up, down = lanes
    at, blocks, slots = at[:, None], len(at), min(len(at) - 1, int(distance.max())) + 1
    ahead, behind = np.minimum(distance, at), np.minimum(distance, blocks - 1 - at)
    ends_in = np.where(up > 0, (at - ahead) * slots + ahead, blocks * slots)
    awaited_at = np.where(down > 0, at + behind, blocks)
    by_slot = [np.where(ahead == slot, up, 0.0) for slot in range(slots)]
    return np.stack([work, down, ends_in, awaited_at, *by_slot], axis=-1)


@dataclass(frozen=True, slots=True)
class Done:
    """When passes end, by row; by position and row, when its work and copy down are done, when the lane up is done with what is
    issued there, and what that takes."""

    end: Seconds
    landed: Seconds
    sent: Seconds
    sent_s: Seconds


def run(figures: Figures, *, start: Seconds | None = None, updated: Seconds | None = None) -> Done:
    """Run passes, the first from ``start`` on, where ``updated`` says by position and row when updates are done; the others
    from 0 on."""
    work, down, ends_in, awaited_at, *by_slot = figures.passes
    positions, rows = work.shape
    row, first = np.arange(rows), slice(figures.waits.shape[-1])
    ends_in, awaited_at = ((places * rows).astype(np.int64) + row for places in (ends_in, awaited_at))
    took, waited = _issued(by_slot, None if updated is None else figures.waits + updated)
    # By position what is issued there; and at the end, where it is never, of what is issued nowhere.
    arrivals = np.full((positions + 1, *took.shape[1:]), NEVER)
    departures = np.full((positions + 1, rows), NEVER)
    departed = departures.reshape(-1)
    worked, left = np.empty((2, positions, rows))
    clock, up_free, down_free = np.zeros((3, rows))
    if start is not None:
        clock[first] = start
    for i, arrival in enumerate(arrivals[:-1]):
        np.add(took[i], np.maximum(up_free, clock), out=arrival)
        if updated is not None:
            np.maximum(arrival[:, first], waited[i], out=arrival[:, first])
        up_free = arrival[-1]
        clock = np.maximum(clock, arrivals.take(ends_in[i]), out=worked[i])
        clock += work[i]
        down_free = np.maximum(down_free, clock, out=left[i])
        down_free += down[i]
        # A lane works in order: of the copies that are awaited here the last is the one to wait for.
        departed[awaited_at[i]] = down_free
        clock = np.maximum(clock, departures[i])
    return Done(clock, np.where(down > 0, left, worked), arrivals[:-1, -1], took[:, -1])


def run_shared(figures: Figures, *, start: Seconds, ready: Seconds) -> Seconds:
    """When a forward from ``start`` on ends whose copies up share their lane with those of updates, the lower block always first.

    Args:
        ready: by block and row when an update on the host is done, NEVER for none. Time counts when the lane is idle but for
            what it is given here. Streamed states come at 0.

    Blocks 0..b have all they need when the first of their copies to come, of those that keep the lane busy from then on, and all
    that come after it are done: the largest over copies k of when k comes plus the seconds of those that do not come before.
    """
    work, down, _, awaited_at, *by_slot = figures.passes
    positions, rows = work.shape
    awaited_at = (awaited_at * rows).astype(np.int64) + np.arange(rows)
    issued = [copies > 0 for copies in by_slot]
    uploads_s, states_s = figures.updates[2:]
    copies_s = uploads_s + sum(by_slot)
    all_states_s, since_states = np.cumsum(states_s, axis=0), np.zeros(rows)
    comes, through = np.where(copies_s > 0, ready, NEVER), np.empty_like(work)
    departures = np.full((positions + 1, rows), NEVER)
    departed, down_free, clock = departures.reshape(-1), np.zeros(rows), start
    for i in range(positions):
        for slot, here in enumerate(issued[: positions - i]):
            np.maximum(comes[i + slot], clock, out=comes[i + slot], where=here[i + slot])
        through[:i] += copies_s[i] * (comes[:i] <= comes[i]) + states_s[i] * (comes[:i] <= 0)
        through[i] = comes[i] + copies_s[i] + (copies_s[:i] * (comes[:i] >= comes[i])).sum(axis=0)
        through[i] += all_states_s[i] * (comes[i] <= 0)
        since_states += copies_s[i] * (comes[i] >= 0)
        copied = np.maximum(through[: i + 1].max(axis=0), all_states_s[i] + since_states)
        clock = np.maximum(clock, copied) + work[i]
        down_free = np.maximum(down_free, clock) + down[i]
        departed[awaited_at[i]] = down_free
        clock = np.maximum(clock, departures[i])
    return clock


def _issued(by_slot: Sequence[Seconds], updated: Seconds | None) -> tuple[Seconds, Seconds]:
    """Of the copies up that are issued at a position, by position, slot and row: what those up to a slot take, and until when
    they wait for updates, with what those behind take; for both see how `run` adds them up."""
    slots, (positions, rows) = len(by_slot), by_slot[0].shape
    took = np.zeros((positions, slots, rows))
    waited = np.full((positions, slots, 0 if updated is None else updated.shape[-1]), NEVER)
    for slot, copies in enumerate(by_slot):
        here = slice(positions - slot)
        if slot:
            took[:, slot] = took[:, slot - 1]
            waited[:, slot] = waited[:, slot - 1]
        if updated is not None:
            np.maximum(waited[here, slot], updated[slot, slot:], out=waited[here, slot])
            waited[here, slot] += copies[slot:, : waited.shape[-1]]
        took[here, slot] += copies[slot:]
    return took, waited
