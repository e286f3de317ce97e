"""Device memory during a replay: named buffers that come and go, and the largest sum of them there ever was."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """Device bytes of one kind, over all blocks, at one moment."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLevel:
    """The most device memory in use while one piece of work is done.

    Attributes:
        at_s: when the program comes to it, in seconds since the step began.
        block, phase: the work: block index, and ``forward``, ``backward`` or ``optimizer step``.
        held: the parts, largest first.
    """

    at_s: float
    block: int
    phase: str
    held: tuple[Contributor, ...]

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return sum(part.num_bytes for part in self.held)


class DeviceMemory:
    """Buffers by name and block.

    Args:
        keep_levels: whether to note what every observation saw.

    Attributes:
        peak: the most bytes in use when anybody looked; -1 before.
        peak_block, peak_phase: where that was first so.
        levels: what was seen, in order.
    """

    def __init__(self, *, keep_levels: bool) -> None:
        self.peak = -1
        self.peak_block = 0
        self.peak_phase = ""
        self.levels: list[MemoryLevel] = []
        self._buffers: dict[tuple[str, int], int] = {}
        self._used = 0
        self._of_name: dict[str, int] = {}
        self._contributors: tuple[Contributor, ...] = ()
        self._keep_levels = keep_levels

    def hold(self, name: str, block: int, num_bytes: int) -> None:
        """Make a buffer's size ``num_bytes``; 0 frees it."""
        more = num_bytes - self._buffers.get((name, block), 0)
        self._used += more
        if self._keep_levels:
            self._of_name[name] = self._of_name.get(name, 0) + more
        if num_bytes:
            self._buffers[name, block] = num_bytes
        else:
            self._buffers.pop((name, block), None)

    def observe(self, block: int, phase: str, at_s: float) -> None:
        """Look at what is in use now."""
        held = self._held() if self._keep_levels else ()
        if self._keep_levels:
            self.levels.append(MemoryLevel(at_s=at_s, block=block, phase=phase, held=held))
        if self._used > self.peak:
            self.peak, self.peak_block, self.peak_phase = self._used, block, phase
            self._contributors = held

    def contributors(self) -> tuple[Contributor, ...]:
        """The parts of the peak, largest first."""
        return self._contributors

    def _held(self) -> tuple[Contributor, ...]:
        largest_first = sorted(self._of_name.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Contributor(name=name, num_bytes=num_bytes) for name, num_bytes in largest_first if num_bytes)
