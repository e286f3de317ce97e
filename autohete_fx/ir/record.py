"""Records: what a lane did, and when."""

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
