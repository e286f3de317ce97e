"""Optimizer states on disk: homes that are in RAM only window by window, while somebody works on them.

In: states, as large as a machine's RAM or larger, and work to be done on each of their elements. Out: the work done, window by
window: one is worked on while the disk lane writes the one before it and reads the next. Why not through the mapping: the
kernel would keep what was read in RAM until RAM is short, and write when it likes. It would also take a fault for every page,
and a budget would be kept by luck.

A state on disk is a tensor over a shared mapping of an unnamed file. It is on the CPU whatever the compute device, so any code
can read and write it at any time. Pages that are so touched stay in RAM until the next walk over them, or until the kernel
needs their room. Walks have three windows in RAM, in buffers: the one under update, the next one, and the first one of the next
update. The kernel has the pages of one window on its way in and of one on its way out.
"""

import contextlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.tiers.host import MappedFileTier, without_modes
from autohete_fx.runtime.tiers.mapped_files import FileChunk

WINDOW_BYTES = 8 * 2**20
"""Bytes of all states of one parameter together: enough to keep a disk busy, and little beside any RAM."""

RESIDENT_BYTES = 5 * WINDOW_BYTES
"""Bytes that the walks of one lane have in RAM at most: three windows in buffers, two in the kernel."""

_MOST_AHEAD = 2
"""The update that begins now, and the next one. Another may come between them and be read ahead too."""

_GRAIN = mmap.PAGESIZE
"""Elements that windows begin at: whole pages for every dtype; and a multiple of every vector length, so that an update in
windows is bitwise the update of the whole."""


class DiskTier(MappedFileTier):
    """Homes of optimizer states in unnamed files of ``offload_dir``. No page belongs to two homes.

    Raises HostMemoryError for an ``offload_dir`` that cannot be used.
    """

    def __init__(self, offload_dir: str | None = None) -> None:
        super().__init__(offload_dir, make_chunk=FileChunk, alignment_bytes=mmap.PAGESIZE)
        self._lock = threading.Lock()
        self._ahead: list[Walk] = []
        self._buffers: list[mmap.mmap] = []

    def locate(self, t: Tensor) -> tuple[FileChunk, int, int]:
        """The file, offset and bytes of a part of a home that begins at a page, to the end of its last page."""
        chunk = self._arena.chunk_at(t.data_ptr())
        assert isinstance(chunk, FileChunk), "a tensor that is no home of this tier"
        offset = t.data_ptr() - chunk.address
        assert offset % mmap.PAGESIZE == 0
        return chunk, offset, _whole_pages(t.nbytes)

    def take_buffer(self, num_bytes: int) -> mmap.mmap:
        """RAM for a window."""
        with self._lock:
            buffer = self._buffers.pop() if self._buffers else None
        return (
            buffer if buffer is not None and len(buffer) >= num_bytes else mmap.mmap(-1, max(num_bytes, WINDOW_BYTES))
        )

    def give_buffer(self, buffer: mmap.mmap) -> None:
        """For the next window."""
        with self._lock:
            self._buffers.append(buffer)

    def put_ahead(self, walk: "Walk") -> "Walk | None":
        """Note that a walk reads ahead. Returns the one that must give up its place for it, if any."""
        with self._lock:
            self._ahead.append(walk)
            return self._ahead.pop(0) if len(self._ahead) > _MOST_AHEAD else None

    def take_ahead(self, walk: "Walk") -> bool:
        """Whether the walk has read ahead and kept its place, which it then leaves."""
        with self._lock:
            if walk not in self._ahead:
                return False
            self._ahead.remove(walk)
            return True


class _Window:
    """One part of some homes, on its way to RAM, there, or on its way back. Its methods but ``parts`` are the lane's."""

    def __init__(self, tier: DiskTier, homes: Sequence[Tensor]) -> None:
        self._tier = tier
        self._homes = homes
        self._pages = [tier.locate(home) for home in homes]
        self._buffer: mmap.mmap | None = None
        self.num_bytes = sum(num_bytes for _, _, num_bytes in self._pages)

    def open(self) -> None:
        """Take RAM for it."""
        self._buffer = self._tier.take_buffer(self.num_bytes)

    def read(self) -> None:
        """Take RAM and fill it."""
        self.open()
        with self._views() as views:
            for (chunk, offset, _), view in zip(self._pages, views, strict=True):
                chunk.read(offset, view)

    def write(self) -> None:
        """Give it to the disk and the buffer back."""
        with self._views() as views:
            for (chunk, offset, _), view in zip(self._pages, views, strict=True):
                chunk.write(offset, view)
        self.close()

    def settle(self) -> None:
        """Wait for the disk."""
        for chunk, offset, num_bytes in self._pages:
            chunk.settle(offset, num_bytes)

    def close(self) -> None:
        """Give the RAM back."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._tier.give_buffer(buffer)

    def parts(self) -> list[Tensor]:
        """The part in RAM, a flat tensor for each home."""
        assert self._buffer is not None
        found, offset = [], 0
        with without_modes(), torch.inference_mode(False):
            for home, (_, _, num_bytes) in zip(self._homes, self._pages, strict=True):
                found.append(torch.frombuffer(self._buffer, dtype=home.dtype, count=home.numel(), offset=offset))
                offset += num_bytes
        return found

    @contextlib.contextmanager
    def _views(self) -> Iterator[list[memoryview]]:
        assert self._buffer is not None
        with memoryview(self._buffer) as whole, contextlib.ExitStack() as stack:
            views, offset = [], 0
            for _, _, num_bytes in self._pages:
                views.append(stack.enter_context(whole[offset : offset + num_bytes]))
                offset += num_bytes
            yield views


class Walk:
    """One pass over equally long flat homes of a tier, window by window.

    Args:
        lanes: have the disk lane.
        homes: written as the work goes on.
        reads: whether the work needs what they hold.
        is_cut: whether the work may be done window by window. Else there is one window, and RAM for all that the homes hold.
    """

    def __init__(
        self, tier: DiskTier, lanes: Lanes, homes: Sequence[Tensor], *, reads: bool = True, is_cut: bool = True
    ) -> None:
        self._tier = tier
        self._lanes = lanes
        length = homes[0].numel()
        self._slices = _slices(length, sum(t.itemsize for t in homes)) if is_cut else [slice(0, length)][:length]
        self._windows = [_Window(tier, [home[part] for home in homes]) for part in self._slices]
        self._reads = reads
        self._first: Ticket | None = None

    def read_ahead(self) -> None:
        """Start to read the first window. Where too many walks do, the one that did so first reads again when it begins."""
        if self._first is not None or not self._windows:
            return
        ousted = self._tier.put_ahead(self)
        if ousted is not None:
            ousted._submit("leave", ousted._windows[0].close, 0)
        self._first = self._read(0)

    def run(self, work: Callable[[slice, list[Tensor]], object]) -> None:
        """Do ``work`` on each window, in order: it gets which elements, and a tensor for each home, which it changes. Return
        when all are on disk. Raises what the work or the disk raised."""
        coming = self._first if self._tier.take_ahead(self) else None
        going: list[Ticket] = []
        try:
            for index, (part, window) in enumerate(zip(self._slices, self._windows, strict=True)):
                (coming or self._read(index)).synchronize()
                # The lane has one thread: it reads when the window before was given to the disk, which then does both at once.
                coming = self._read(index + 1) if index + 1 < len(self._windows) else None
                if index:
                    going.append(self._submit("settle", self._windows[index - 1].settle, 0))
                work(part, window.parts())
                going.append(self._submit("write", window.write, window.num_bytes))
            if self._windows:
                going.append(self._submit("settle", self._windows[-1].settle, 0))
            for ticket in going:
                ticket.synchronize()
        except BaseException:  # one error is enough
            for ticket in (*going, *([coming] if coming is not None else [])):
                with contextlib.suppress(Exception):
                    ticket.synchronize()
            raise

    def _read(self, index: int) -> Ticket:
        window = self._windows[index]
        return (
            self._submit("read", window.read, window.num_bytes) if self._reads else self._submit("open", window.open, 0)
        )

    def _submit(self, label: str, work: Callable[[], None], num_bytes: int) -> Ticket:
        return self._lanes.disk(label, work, num_bytes=num_bytes)


def _slices(length: int, bytes_each: int) -> list[slice]:
    """So many elements in even parts of at most WINDOW_BYTES, where an element takes ``bytes_each`` over all homes."""
    largest = max(WINDOW_BYTES // bytes_each // _GRAIN, 1) * _GRAIN
    count = max(-(-length // largest), 1)
    size = max(-(-length // count // _GRAIN), 1) * _GRAIN
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
