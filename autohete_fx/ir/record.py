"""Records: what a lane, a pass and a step did, and when."""

from dataclasses import dataclass

from autohete_fx.ir.lane import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRecord:
    """Work that ended: ``begin_s`` and ``end_s`` are readings of ``time.perf_counter``.

    Attributes:
        lane: who did it. On the compute lane stand the times for which the program was held by a wait.
        label: ``prefetch``, ``reload``, ``offload``, ``update``, ``upload``, ``download``, ``edits``; or what was waited for.
        priority: as submitted; smaller was sooner.
        num_bytes: bytes that were copied, or of the parameters that were updated.
    """

    lane: Lane
    label: str
    priority: int
    num_bytes: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRecord:
    """A forward or backward pass of a compiled graph, as the program saw it; on a GPU it only issued work meanwhile.

    Attributes:
        label: ``forward`` or ``backward``.
        begin_s, end_s: readings of ``time.perf_counter``.
    """

    label: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A training step that ended.

    Attributes:
        number: from 0 on; the first one allocates, warms up and may compile the optimizer.
        step_s: from its first forward pass to that of the next, whatever happened between.
        peak_bytes: the most device memory meanwhile; None where it was not measured.
    """

    number: int
    step_s: float
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """Live device bytes at a time.

    Attributes:
        at_s: a reading of ``time.perf_counter``.
        num_bytes: from then on, until the next record.
    """

    at_s: float
    num_bytes: int
