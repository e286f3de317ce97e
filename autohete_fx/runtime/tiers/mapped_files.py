"""Mappings of unnamed files: the memory below a CPU device's RAM, and the disk below any host's.

In: byte counts and a directory. Out: chunks for the arena. Why files: their pages are neither anonymous memory (``RssAnon``)
nor known to PyTorch's CPU allocator. A CPU device thus has a tier below the memory that a budget limits. Which pages are in RAM
is the kernel's choice, but for those of a `FileChunk`. The files have no name from the start: ``O_TMPFILE``, or created and
unlinked at once where the file system lacks that. The kernel therefore frees them with the process however it ends. In a
directory on tmpfs the pages are RAM: correct, but nothing is saved.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

from autohete_fx.errors import HostMemoryError, OptimizerStateError
from autohete_fx.ir.files import is_directory
from autohete_fx.runtime.tiers.arena import Chunk, bytes_text

MakeChunk = Callable[[mmap.mmap, int], Chunk]
"""Makes a chunk of a mapping and the descriptor of its file, which is open during the call."""

_SYNC_FILE_RANGE_WRITE = 2
_SYNC_FILE_RANGE_WRITE_AND_WAIT = 1 | 2 | 4
_LARGEST_FOLIO_BYTES = 2 * 2**20
"""The kernel keeps pages in groups of at most this and leaves RAM with whole groups only."""


def check_directory(directory: str | None) -> Path:
    """The directory for homes, default the system's for temporary files.

    Raises HostMemoryError where it is none that this process can write to.
    """
    path = Path(directory if directory is not None else tempfile.gettempdir())
    if not is_directory(path):
        raise HostMemoryError(f"offload_dir {str(path)!r} is not a directory; create it, or give another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise HostMemoryError(f"offload_dir {str(path)!r} cannot be written to; give another, or change its mode")
    return path


def without_file(mapping: mmap.mmap, descriptor: int) -> Chunk:
    """A chunk that needs no more than the mapping."""
    del descriptor
    return Chunk(mapping)


class FileChunk(Chunk):
    """A mapping that is also read and written as the file that it is, so that its pages need not stay in RAM.

    The kernel keeps one copy of a file: what is written here, the mapping shows, and the other way round. Offsets and lengths
    are at whole pages. The calls wait for the disk without the GIL, and raise OptimizerStateError where it fails.
    """

    def __init__(self, mapping: mmap.mmap, descriptor: int) -> None:
        super().__init__(mapping)
        self._file = os.dup(descriptor)
        weakref.finalize(self, os.close, self._file).atexit = False
        # Read what is asked for and no more; faults of the mapping still read ahead.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill the buffer. The pages leave RAM."""
        start, left = offset, into
        with _disk("read"):
            while left:
                if not (count := os.preadv(self._file, [left], start)):
                    raise OSError(errno.EIO, "the file is shorter than it was made")
                start, left = start + count, left[count:]
        self.drop(offset, len(into))

    def write(self, offset: int, out_of: memoryview) -> None:
        """Give the disk what the buffer holds."""
        start, left = offset, out_of
        with _disk("written"):
            while left:
                count = os.pwritev(self._file, [left], start)
                start, left = start + count, left[count:]
        self._sync(offset, len(out_of), _SYNC_FILE_RANGE_WRITE)

    def settle(self, offset: int, num_bytes: int) -> None:
        """Return when what was written is on the disk. The pages leave RAM."""
        self._sync(offset, num_bytes, _SYNC_FILE_RANGE_WRITE_AND_WAIT)
        self.drop(offset, num_bytes)

    def _sync(self, offset: int, num_bytes: int, how: int) -> None:
        with _disk("written"):
            if _libc().sync_file_range(self._file, offset, num_bytes, how):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def drop(self, offset: int, num_bytes: int) -> None:
        """Have pages leave RAM that are on the disk as they are; others stay."""
        self.mapping.madvise(mmap.MADV_DONTNEED, offset, num_bytes)
        begin = offset // _LARGEST_FOLIO_BYTES * _LARGEST_FOLIO_BYTES
        end = -(-(offset + num_bytes) // _LARGEST_FOLIO_BYTES) * _LARGEST_FOLIO_BYTES
        os.posix_fadvise(self._file, begin, end - begin, os.POSIX_FADV_DONTNEED)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return libc


@contextlib.contextmanager
def _disk(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptimizerStateError(
            f"optimizer states on disk could not be {what}: {error.strerror}; they are undefined. Look after the disk of"
            " offload_dir, then load the last checkpoint"
        ) from error


def map_file(num_bytes: int, directory: Path, make_chunk: MakeChunk = without_file) -> Chunk:
    """A shared mapping of an unnamed file of exactly ``num_bytes``, with its disk space allocated.

    Raises HostMemoryError where the directory's file system refuses: at this point, and not later as a SIGBUS on the
    first write to a page.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="autohete-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return make_chunk(mmap.mmap(file.fileno(), num_bytes), file.fileno())
    except OSError as error:
        raise HostMemoryError(
            f"asked for {bytes_text(num_bytes)} in offload_dir {str(directory)!r}, where {_free_text(directory)}: "
            f"{error.strerror}; free disk space there, give another offload_dir, or offload less"
        ) from error


def _free_text(directory: Path) -> str:
    try:
        stat = os.statvfs(directory)
    except OSError as error:
        return f"free space cannot be read ({error.strerror})"
    return f"{bytes_text(stat.f_bavail * stat.f_frsize)} are free"
