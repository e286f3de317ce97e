"""The rate of a disk: in comes a directory, out come bytes a second of a file in it."""

import errno
import mmap
import os
import tempfile
import time

_DISK_BYTES = 32 * 2**20
_DISK_WINDOW_BYTES = 4 * 2**20
_DISK_REPEATS = 3


def measure_disk(directory: str | None = None) -> float:
    """Bytes per second of a file in a directory that is written, and read when it has left RAM.

    They are rounded, for disks differ from moment to moment. 0 where there is no room for the file.
    """
    best = {"written": float("inf"), "read": float("inf")}
    try:
        with tempfile.TemporaryFile(dir=directory) as file, mmap.mmap(-1, _DISK_WINDOW_BYTES) as window:
            window.write(b"1" * len(window))
            os.posix_fallocate(file.fileno(), 0, _DISK_BYTES)
            for _ in range(_DISK_REPEATS):
                for what, seconds in _disk_seconds(file.fileno(), window).items():
                    best[what] = min(best[what], seconds)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return 0.0
    return float(f"{2 * _DISK_BYTES / sum(best.values()):.2g}")


def _disk_seconds(file: int, window: mmap.mmap) -> dict[str, float]:
    starts = range(0, _DISK_BYTES, len(window))
    begin = time.perf_counter()
    for start in starts:
        os.pwrite(file, window, start)
    os.fdatasync(file)
    written = time.perf_counter()
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    begin_reading = time.perf_counter()
    for start in starts:
        os.preadv(file, [window], start)
    return {"written": written - begin, "read": time.perf_counter() - begin_reading}
