"""Exact sub-allocation of large mappings, with leases that come back by themselves.

In: byte counts. Out: leases, ``ctypes`` arrays over a range of a mapping. Why: mapping (and on CUDA, pinning) is slow, so it is
done in few large chunks. A home may be reused only when *nothing* references its bytes any more, not even C++ alone (``.grad``,
a tensor that autograd saved). A lease gives that: whoever looks at the bytes keeps the lease alive, and its death puts the
range back. Nothing polls, and the mapping itself lives as long as its last lease, so that dropping an arena never pulls memory
from under a tensor.
"""

import bisect
import ctypes
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from autohete_fx.errors import HostMemoryError

ALIGNMENT_BYTES = 256
"""cuBLAS chooses kernels by the alignment of its operands, up to this: a weight in a home must not change a product's bits.
It is also a multiple of cache lines and of the widest vector loads."""

_SMALLEST_PIECE_BYTES = 64 * 2**20


def bytes_text(num_bytes: int) -> str:
    """Bytes for an error message, such as ``12.0 MiB``."""
    return f"{num_bytes} bytes" if num_bytes < 2**20 else f"{num_bytes / 2**20:.1f} MiB"


class Fence(Protocol):
    """A point in a device's work, such as ``torch.Event``."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Chunk:
    """One mapping and its free ranges.

    A range is ``(offset, num_bytes)``; the free ones are sorted, disjoint and never adjacent.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self.num_bytes = len(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)]

    def on_release(self, release: Callable[[int], None]) -> None:
        """Call ``release`` with the address before the mapping goes."""
        # Not at exit: the process takes its mappings along, and the device's library may be gone by then.
        weakref.finalize(self, release, self.address).atexit = False

    @property
    def is_free(self) -> bool:
        return self._free == [(0, self.num_bytes)]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Free ranges by rising offset."""
        return iter(self._free)

    def take(self, offset: int, num_bytes: int) -> None:
        """Mark the head of the free range that starts at ``offset`` as used."""
        at = bisect.bisect_left(self._free, (offset, 0))
        start, length = self._free[at]
        assert start == offset and length >= num_bytes
        if length == num_bytes:
            del self._free[at]
        else:
            self._free[at] = (offset + num_bytes, length - num_bytes)

    def put(self, offset: int, num_bytes: int) -> None:
        """Mark a range as free, joined with its free neighbours."""
        at = bisect.bisect_left(self._free, (offset, 0))
        if at < len(self._free) and offset + num_bytes == self._free[at][0]:
            num_bytes += self._free.pop(at)[1]
        if at > 0 and sum(self._free[at - 1]) == offset:
            at -= 1
            offset, head = self._free.pop(at)
            num_bytes += head
        self._free.insert(at, (offset, num_bytes))


class Arena:
    """Leases from chunks that ``map_chunk(num_bytes)`` makes (it raises HostMemoryError where it cannot).

    Args:
        map_chunk: makes a chunk of at least the given bytes.
        growth_bytes: the least a new chunk has, so that small homes share chunks.
        capacity_bytes: the most that all chunks may have together; None for no limit.
        alignment_bytes: of homes, ALIGNMENT_BYTES or a multiple.
        fence: makes a fence at the device's present, or None on a device that works synchronously. A range whose lease died is
            reused only once a fence made after that has passed. The device may still be at work on bytes that Python has let go
            of.

    Thread safe. All sizes are bytes.

    Attributes:
        waited_s: seconds for which those who asked for a lease were held until a fence had passed.
        mapped_s: seconds that it took to make chunks.
    """

    def __init__(
        self,
        map_chunk: Callable[[int], Chunk],
        *,
        growth_bytes: int,
        capacity_bytes: int | None = None,
        alignment_bytes: int = ALIGNMENT_BYTES,
        fence: Callable[[], Fence | None] = lambda: None,
    ) -> None:
        self._map_chunk = map_chunk
        self._growth_bytes = growth_bytes
        self._capacity_bytes = capacity_bytes
        self._alignment_bytes = alignment_bytes
        self._fence = fence
        # Reentrant: a garbage collection inside a locked region may run code that comes back here.
        self._lock = threading.RLock()
        self._chunks: list[Chunk] = []
        # Leases die anywhere, in a garbage collection too: all they do is this append, which needs no lock.
        self._returned: deque[tuple[Chunk, int, int]] = deque()
        self._fenced: deque[tuple[Fence, list[tuple[Chunk, int, int]]]] = deque()
        self._in_use_bytes = 0
        self._set_aside_bytes = 0
        self._closed = False
        self.waited_s = 0.0
        self.mapped_s = 0.0

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all chunks, free ranges included."""
        with self._lock:
            return sum(chunk.num_bytes for chunk in self._chunks)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the living leases, each rounded up to the alignment."""
        with self._lock:
            self._collect()
            return self._in_use_bytes

    def chunk_at(self, address: int) -> Chunk | None:
        """The chunk that an address lies in; None where it lies in none."""
        with self._lock:
            return next((c for c in self._chunks if c.address <= address < c.address + c.num_bytes), None)

    def lease(self, num_bytes: int) -> "ctypes.Array[ctypes.c_char]":
        """An array over ``num_bytes`` uninitialised bytes, aligned.

        Raises HostMemoryError where capacity or the system refuses.
        """
        size = self._aligned(max(num_bytes, 1))
        with self._lock:
            if self._closed:
                raise HostMemoryError(f"asked for a home of {bytes_text(num_bytes)} after close(); open another tier")
            self._collect()
            chunk, offset = self._find(size) or self._wait_for(size) or (self._grow(size), 0)
            chunk.take(offset, size)
            self._in_use_bytes += size
            array = (ctypes.c_char * max(num_bytes, 1)).from_buffer(chunk.mapping, offset)
            # The finalizer holds the chunk, so that the mapping outlives the lease whatever becomes of the arena.
            weakref.finalize(array, self._returned.append, (chunk, offset, size)).atexit = False
        return array

    def reserve(self, num_bytes: int) -> None:
        """Map now what is missing to ``num_bytes`` reserved, in smaller pieces where the system refuses a large one.

        Raises HostMemoryError with what could be had; that much stays reserved.
        """
        with self._lock:
            self._set_aside_bytes = max(self._set_aside_bytes, num_bytes)
            missing = num_bytes - self.reserved_bytes
            piece = missing
            while missing > 0:
                try:
                    missing -= self._add_chunk(min(piece, missing)).num_bytes
                except HostMemoryError as error:
                    if piece <= _SMALLEST_PIECE_BYTES:
                        had = bytes_text(self.reserved_bytes)
                        raise HostMemoryError(f"{had} of {bytes_text(num_bytes)} could be reserved: {error}") from error
                    piece = max(piece // 2, _SMALLEST_PIECE_BYTES)

    def trim(self) -> None:
        """Unmap the chunks without a living lease."""
        with self._lock:
            self._collect()
            self._settle(wait=True)
            self._chunks = [chunk for chunk in self._chunks if not chunk.is_free]

    def close(self) -> None:
        """Refuse further leases and unmap what is free; the rest goes with its last lease."""
        with self._lock:
            self._closed = True
            self.trim()

    def _aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment_bytes) * self._alignment_bytes

    def _collect(self) -> None:
        """Take back the ranges of dead leases, at once or after a fence."""
        ranges: list[tuple[Chunk, int, int]] = []
        while self._returned:
            ranges.append(self._returned.popleft())
        self._in_use_bytes -= sum(size for _, _, size in ranges)
        fence = self._fence() if ranges else None
        if fence is not None:
            self._fenced.append((fence, ranges))
        else:
            self._put(ranges)
        self._settle(wait=False)

    def _settle(self, wait: bool) -> None:
        """Free the ranges whose fence has passed; with ``wait``, all of them."""
        while self._fenced and (wait or self._fenced[0][0].query()):
            fence, ranges = self._fenced.popleft()
            fence.synchronize()
            self._put(ranges)

    def _put(self, ranges: list[tuple[Chunk, int, int]]) -> None:
        for chunk, offset, size in ranges:
            chunk.put(offset, size)

    def _find(self, size: int) -> tuple[Chunk, int] | None:
        """The smallest free range that has ``size`` bytes (best fit)."""
        best: tuple[int, Chunk, int] | None = None
        for chunk in self._chunks:
            for offset, length in chunk.ranges():
                if length >= size and (best is None or length < best[0]):
                    best = (length, chunk, offset)
                    if length == size:
                        return chunk, offset
        return None if best is None else (best[1], best[2])

    def _wait_for(self, size: int) -> tuple[Chunk, int] | None:
        """Rather wait for the device than map more: look again after each fence."""
        found = None
        while self._fenced and found is None:
            fence, ranges = self._fenced.popleft()
            begin_s = time.perf_counter()
            fence.synchronize()
            self.waited_s += time.perf_counter() - begin_s
            self._put(ranges)
            found = self._find(size)
        return found

    def _grow(self, size: int) -> Chunk:
        """A new chunk with room for ``size`` bytes: with some to spare where that is allowed, else exact."""
        reserved = self.reserved_bytes
        # An eighth of what has grown keeps the number of chunks logarithmic in their bytes.
        wanted = max(size, self._growth_bytes, (reserved - self._set_aside_bytes) // 8)
        if self._capacity_bytes is not None:
            if reserved + size > self._capacity_bytes:
                self.trim()  # free chunks that are too small for this one
                reserved = self.reserved_bytes
            wanted = max(size, min(wanted, self._capacity_bytes - reserved))
        if wanted > size:
            try:
                return self._add_chunk(wanted)
            except HostMemoryError:
                pass  # the exact size may still fit, and its refusal is what the user should read
        return self._add_chunk(size)

    def _add_chunk(self, num_bytes: int) -> Chunk:
        num_bytes = self._aligned(num_bytes)
        if self._capacity_bytes is not None and self.reserved_bytes + num_bytes > self._capacity_bytes:
            raise HostMemoryError(
                f"asked for {bytes_text(num_bytes)} of host memory, but {bytes_text(self.reserved_bytes)} of the "
                f"allowed {bytes_text(self._capacity_bytes)} are reserved ({bytes_text(self._in_use_bytes)} in use); "
                "allow more host memory, or offload less"
            )
        begin_s = time.perf_counter()
        chunk = self._map_chunk(num_bytes)
        self.mapped_s += time.perf_counter() - begin_s
        self._chunks.append(chunk)
        return chunk
