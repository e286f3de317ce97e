"""Mappings of unnamed files: the memory below a CPU device's RAM.

In: byte counts and a directory. Out: chunks for the arena. Why files: their pages are neither anonymous memory
(``RssAnon``) nor known to PyTorch's CPU allocator, so that a CPU device has a tier below the memory that a budget
limits. The files have no name from the start (``O_TMPFILE``, or created and unlinked at once where the file system
lacks that), so the kernel frees them with the process however it ends. In a directory on tmpfs the pages are RAM:
correct, but nothing is saved.
"""

import mmap
import os
import tempfile
from pathlib import Path

from autohete_fx.errors import HostMemoryError
from autohete_fx.runtime.arena import Chunk, bytes_text


def check_directory(directory: str | None) -> Path:
    """The directory for homes, default the system's for temporary files.

    Raises HostMemoryError where it is none that this process can write to.
    """
    path = Path(directory if directory is not None else tempfile.gettempdir())
    if not path.is_dir():
        raise HostMemoryError(f"offload_dir {str(path)!r} is not a directory; create it, or give another")
    if not os.access(path, os.W_OK | os.X_OK):
        raise HostMemoryError(f"offload_dir {str(path)!r} cannot be written to; give another, or change its mode")
    return path


def map_file(num_bytes: int, directory: Path) -> Chunk:
    """A shared mapping of an unnamed file of exactly ``num_bytes``, with its disk space allocated.

    Raises HostMemoryError where the directory's file system refuses: at this point, and not later as a SIGBUS on the
    first write to a page.
    """
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="autohete-") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return Chunk(mmap.mmap(file.fileno(), num_bytes))
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
