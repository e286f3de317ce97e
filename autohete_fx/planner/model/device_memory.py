"""Device memory during a replay: named buffers that come and go, and the largest sum of them there ever was."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """Device bytes of one kind, over all blocks, at the moment of the peak."""

    name: str
    num_bytes: int


class DeviceMemory:
    """Buffers by name and block.

    Attributes:
        peak: the most bytes in use when anybody looked; -1 before.
        peak_block, peak_phase: where that was first so.
    """

    def __init__(self, *, keep_contributors: bool) -> None:
        self.peak = -1
        self.peak_block = 0
        self.peak_phase = ""
        self._buffers: dict[tuple[str, int], int] = {}
        self._used = 0
        self._peak_buffers: dict[tuple[str, int], int] = {}
        self._keep_contributors = keep_contributors

    def hold(self, name: str, block: int, num_bytes: int) -> None:
        """Make a buffer's size ``num_bytes``; 0 frees it."""
        self._used += num_bytes - self._buffers.get((name, block), 0)
        if num_bytes:
            self._buffers[name, block] = num_bytes
        else:
            self._buffers.pop((name, block), None)

    def observe(self, block: int, phase: str) -> None:
        """Look at what is in use now."""
        if self._used > self.peak:
            self.peak, self.peak_block, self.peak_phase = self._used, block, phase
            if self._keep_contributors:
                self._peak_buffers = dict(self._buffers)

    def contributors(self) -> tuple[Contributor, ...]:
        """The parts of the peak, largest first."""
        total: dict[str, int] = {}
        for (name, _), num_bytes in self._peak_buffers.items():
            total[name] = total.get(name, 0) + num_bytes
        largest_first = sorted(total.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Contributor(name=name, num_bytes=num_bytes) for name, num_bytes in largest_first)
