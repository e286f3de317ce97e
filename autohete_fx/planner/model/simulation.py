"""The results of a replay: the values that `simulate` returns."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autohete_fx.ir import Lane, LaneTime
from autohete_fx.planner.model.device_memory import Contributor, MemoryLevel

FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER_STEP = "optimizer step"
"""The phases of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A lane at work on a block, in seconds since the step began.

    ``label`` is ``forward``, ``recompute``, ``backward``, ``fetch``, ``offload``, ``reload``, ``gradients``, ``update``,
    ``upload``, ``states``, ``disk``, ``gather`` or ``reduce``.
    """

    lane: Lane
    label: str
    block: int
    start_s: float
    end_s: float


def events_since(began_s: float, events: Iterable[Event]) -> tuple[Event, ...]:
    """The same with times since then, in order."""
    moved = (replace(e, start_s=e.start_s - began_s, end_s=e.end_s - began_s) for e in events)
    return tuple(sorted(moved, key=lambda event: (event.start_s, event.end_s)))


def levels_since(began_s: float, levels: Iterable[MemoryLevel]) -> tuple[MemoryLevel, ...]:
    """The same with times since then, in order."""
    return tuple(replace(level, at_s=level.at_s - began_s) for level in levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The result of a replay.

    Attributes:
        step_s: seconds of one optimizer step, all its micro-batches included.
        forward_s, backward_s: seconds of a forward that waits for no update, and of the last backward.
        optimizer_s: what the updates add to these.
        peak_bytes: most device memory in use at once.
        peak_block, peak_phase: where the peak is first reached: block index, and ``forward``, ``backward`` or
            ``optimizer step``.
        host_bytes, disk_bytes: host memory for homes, and what is on disk.
        busy_s: seconds of work per lane.
        events: every piece of work, by start time; empty where they were not asked for.
        contributors: what the peak consists of, largest first; empty where events were not asked for.
        levels: device memory in use, piece of work after piece of work; empty likewise.
    """

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_bytes: int
    peak_block: int
    peak_phase: str
    host_bytes: int
    disk_bytes: int
    busy_s: tuple[LaneTime, ...]
    events: tuple[Event, ...]
    contributors: tuple[Contributor, ...]
    levels: tuple[MemoryLevel, ...]
