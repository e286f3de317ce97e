"""Host memory for gradients that are on their way to their updates, taken before any parameter changes.

A gradient that does not live in a home is copied through one. In: the sizes of the gradients of one step that need that. Out:
buffers, as many as updates run at a time and one more, so that the next gradient comes while one is used. They are held until the
last of these updates is over: whatever else takes host memory meanwhile, no update is refused its own.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from autohete_fx.runtime.tiers.host import HostTier


class GradientBuffers:
    """Buffers that updates take in turn. Thread safe.

    At most one of the updates that hold one has not begun: one is left for each that begins, in whatever order they do.

    Args:
        tier: where they are.
        sizes: bytes of the gradients, one for each update that will take a buffer once.
        num_workers: how many updates may run at a time.

    Raises:
        HostMemoryError: no room for them.
    """

    def __init__(self, tier: HostTier, sizes: Sequence[int], num_workers: int) -> None:
        count = min(len(sizes), num_workers + 1)
        self._free = [tier.empty_strided((max(sizes),), (1,), torch.uint8) for _ in range(count)]
        self._is_taken_ahead = False
        self._lock = threading.Lock()

    def take_ahead(self) -> Tensor | None:
        """A buffer for an update that has not begun; None where another such has one."""
        with self._lock:
            if self._is_taken_ahead or not self._free:
                return None
            self._is_taken_ahead = True
            return self._free.pop()

    def note_begun(self) -> None:
        """The update that took a buffer ahead begins."""
        with self._lock:
            self._is_taken_ahead = False

    def take(self) -> Tensor:
        """A buffer for an update that begins."""
        with self._lock:
            return self._free.pop()

    def give_back(self, buffer: Tensor) -> None:
        """The update that had it is over."""
        with self._lock:
            self._free.append(buffer)


def shaped(buffer: Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A buffer's first bytes as a tensor of a dense layout."""
    num_bytes = dtype.itemsize
    for n in shape:
        num_bytes *= n
    return buffer[:num_bytes].view(dtype).as_strided(tuple(shape), tuple(stride))
