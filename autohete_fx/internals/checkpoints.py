"""Readers and writers of distributed checkpoints on any file system that fsspec knows."""

import contextlib
import io
import pickle
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

from fsspec.implementations.local import LocalFileSystem

from autohete_fx.internals.versions import fsspec_filesystem

__all__ = ["FsspecReader", "FsspecWriter", "alone", "metadata_of"]

checkpoints: Any = fsspec_filesystem()
_RANGE_BYTES, _AT_ONCE_BYTES = 64 * 2**20, 512 * 2**20


class FsspecWriter(checkpoints.FsspecWriter):
    """PyTorch's. Object stores have no file to flush; there PyTorch would flush every disk of the machine instead."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.sync_files = isinstance(self.fs.fs, LocalFileSystem)


class FsspecReader(checkpoints.FsspecReader):
    """PyTorch's, but for remote file systems, where it reads the ranges of the wanted tensors and no byte beside them.

    PyTorch reads them through a file that reads ahead, megabytes for a small tensor. Here, ranges that touch are one request,
    and requests run at the same time, within `_AT_ONCE_BYTES` of memory.
    """

    _ranges: dict[tuple[str, int], bytes] | None = None

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read the items of a plan."""
        if isinstance(self.fs.fs, LocalFileSystem):
            return super().read_data(plan, planner)
        items = sorted(plan.items, key=lambda item: (self._saved(item).relative_path, self._saved(item).offset))
        done: Any = None
        while items or done is None:
            taken, size = 0, 0
            while taken < len(items) and (not taken or size + self._saved(items[taken]).length <= _AT_ONCE_BYTES):
                size += self._saved(items[taken]).length
                taken += 1
            self._ranges = self._fetched(items[:taken])
            done = super().read_data(replace(plan, items=items[:taken]), planner)
            items = items[taken:]
        self._ranges = None
        return done

    def _saved(self, item: Any) -> Any:
        return self.storage_data[item.storage_index]

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        if self._ranges is None:
            return super()._slice_file(file, sinfo)
        return io.BytesIO(self._ranges[sinfo.relative_path, sinfo.offset])

    def _fetched(self, items: list[Any]) -> dict[tuple[str, int], bytes]:
        """By file and offset the bytes of items, which are in the order of their files."""
        runs: list[list[Any]] = []
        for saved in map(self._saved, items):
            last = runs[-1] if runs else []
            touches = last and (last[-1].relative_path, last[-1].offset + last[-1].length) == (
                saved.relative_path,
                saved.offset,
            )
            if touches and saved.offset + saved.length - last[0].offset <= _RANGE_BYTES:
                last.append(saved)
            else:
                runs.append([saved])
        paths = [self.fs.concat_path(self.path, run[0].relative_path) for run in runs]
        starts, ends = [run[0].offset for run in runs], [run[-1].offset + run[-1].length for run in runs]
        system: Any = self.fs.fs
        read = system.cat_ranges(paths, starts, ends, on_error="raise")
        for data in read:
            if isinstance(data, BaseException):  # some versions return it all the same
                raise data
        return {
            (saved.relative_path, saved.offset): bytes(data)[saved.offset - start :][: saved.length]
            for run, start, data in zip(runs, starts, read, strict=True)
            for saved in run
        }


def metadata_of(raw: bytes) -> Any:
    """Metadata that PyTorch wrote to a file of these bytes. Damaged ones raise many kinds of errors."""
    return pickle.loads(raw)


_quiet = contextlib.ExitStack()
_quiet_lock, _num_alone = threading.Lock(), 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without PyTorch's warning that a part is saved and loaded by one process: it is.

    Filters of warnings belong to the process. A thread that is done leaves them to others that still write.
    """
    global _num_alone
    with _quiet_lock:
        if not _num_alone:
            _quiet.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        _num_alone += 1
    try:
        yield
    finally:
        with _quiet_lock:
            _num_alone -= 1
            if not _num_alone:
                _quiet.close()
