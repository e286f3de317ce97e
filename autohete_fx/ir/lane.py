"""Lanes: the in-order executors that a schedule fills."""

import enum
from dataclasses import dataclass


class Lane(enum.Enum):
    """One in-order executor. ``index`` is what the graph's ops carry as an integer argument."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    UPDATE = "update"
    DISK = "disk"
    NET = "net"
    """Collectives of all ranks that hold the model, in the order of the program: no priority reorders them."""

    @property
    def copies(self) -> bool:
        """Whether the lane's work is copies between memories, at the rate that a `Machine` has under the lane's name."""
        return self in (Lane.H2D, Lane.D2H)

    @property
    def index(self) -> int:
        """Position in definition order, from 0; stable across processes."""
        return list(Lane).index(self)

    @staticmethod
    def from_index(index: int) -> "Lane":
        """The lane whose ``index`` is given."""
        return list(Lane)[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTime:
    """Seconds per step that a lane is predicted to work."""

    lane: Lane
    busy_s: float
