"""Reasons: why a plan decides as it does, recorded with it by whoever solved the problem; `explanation` says it in words."""

import enum
from dataclasses import dataclass

from autohete_fx.ir.decision import BlockDecision
from autohete_fx.ir.lane import LaneTime

NO_TIME = 1e-6
"""Steps that differ by a smaller share are as fast."""


class Memory(enum.Enum):
    """A memory whose capacity a plan must keep."""

    DEVICE = "device memory"
    HOST = "host memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How much of a capacity is used, at the moment when it is most.

    Attributes:
        memory: see the enum.
        used_bytes: as the planner counts.
        limit_bytes: what the plan may use; None for no limit.
        block, phase: of device memory, the moment: the index of the block, and ``forward``, ``backward`` or ``optimizer
            step``. Host memory and disk are used all the time: None and empty.
    """

    memory: Memory
    used_bytes: int
    limit_bytes: int | None
    block: int | None = None
    phase: str = ""

    @property
    def lacking_bytes(self) -> int:
        """By how much the limit is exceeded; 0 where it is kept."""
        return 0 if self.limit_bytes is None else max(0, self.used_bytes - self.limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The plan with one block decided otherwise.

    Attributes:
        decision: of that block.
        step_s: predicted seconds of the step then.
        more_copies_s: by how many seconds the copies and collectives of a step, hidden ones included, then take longer.
        exceeded: the limits that it breaks; empty where it fits.
    """

    decision: BlockDecision
    step_s: float
    more_copies_s: float
    exceeded: tuple[MemoryUse, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReasons:
    """The other decisions that one block could have got, at whatever prefetch distance, all other blocks as they are.

    Better is what the planner takes for better: less time, and of plans about as fast the one that copies less.

    Attributes:
        num_others: how many other choices were looked at.
        next_best: the best of those that fit; None where none does.
        barred: the fastest of those that would be better than what was chosen but do not fit. Among several as fast it is the
            one that lacks the fewest bytes; None where there is none.
    """

    num_others: int
    next_best: Alternative | None = None
    barred: Alternative | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """Why a plan decides as it does.

    Attributes:
        blocks: one a block.
        memory: of the device, the host and, where it has a capacity, the disk. The planner's own count: a plan's
            ``peak_bytes`` may come from a trace of the rewritten graphs since.
        waits_s: seconds of the step that the compute lane does not work.
        meanwhile: what the other lanes work in these seconds.
        more_bytes: so much more device memory was tried; 0 without a limit on it.
        more_step_s: what the step takes at most, then.
    """

    blocks: tuple[BlockReasons, ...]
    memory: tuple[MemoryUse, ...]
    waits_s: float
    meanwhile: tuple[LaneTime, ...]
    more_bytes: int
    more_step_s: float

    def binds(self, memory: Memory) -> bool:
        """Whether some block would be decided otherwise, and better, with more of it."""
        uses = (use for block in self.blocks if block.barred is not None for use in block.barred.exceeded)
        return any(use.memory is memory for use in uses)
