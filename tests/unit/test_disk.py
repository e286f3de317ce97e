"""Homes on disk: in RAM only window by window, read by anyone, and failing before they could lie."""

import ctypes
import errno
import gc
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autohete_fx.errors import HostMemoryError, OptimizerStateError
from autohete_fx.ir import Lane
from autohete_fx.runtime import disk
from autohete_fx.runtime.disk import DiskTier, Walk
from autohete_fx.runtime.lanes.lanes import Lanes

WINDOW = 64 * mmap.PAGESIZE
WINDOWS_IN_RAM = disk.RESIDENT_BYTES // disk.WINDOW_BYTES


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "WINDOW_BYTES", WINDOW)


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(str(tmp_path))


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    found = Lanes("cpu", in_background=False)
    yield found
    found.close()


def homes(tier: DiskTier, length: int, count: int = 2) -> list[Tensor]:
    return [tier.empty_strided((length,), (1,), torch.float32) for _ in range(count)]


def fill(tier: DiskTier, lanes: Lanes, found: list[Tensor]) -> None:
    def work(window: slice, parts: list[Tensor]) -> None:
        for number, part in enumerate(parts):
            torch.arange(window.start, window.stop, out=part).add_(number)

    Walk(tier, lanes, found, reads=False).run(work)


def pages_in_ram(t: Tensor) -> int:
    """Of the tensor's pages, how many the kernel has in RAM, in bytes."""
    count = -(-t.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(t.data_ptr()), ctypes.c_size_t(t.nbytes), found)
    return sum(page & 1 for page in found) * mmap.PAGESIZE


@pytest.mark.parametrize("length", [0, 1, 4096, 100_003])
def test_a_walk_sees_and_changes_every_element_once(length: int, tier: DiskTier, lanes: Lanes) -> None:
    found = homes(tier, length)
    fill(tier, lanes, found)
    seen = torch.zeros(length)

    def work(window: slice, parts: list[Tensor]) -> None:
        seen[window] += 1
        parts[0].add_(parts[1])

    walk = Walk(tier, lanes, found)
    walk.read_ahead()
    walk.run(work)
    assert bool((seen == 1).all())
    expected = torch.arange(length, dtype=torch.float32)
    assert torch.equal(found[0], 2 * expected + 1) and torch.equal(found[1], expected + 1)


def test_at_most_the_stated_bytes_are_in_ram(
    monkeypatch: pytest.MonkeyPatch, tier: DiskTier, lanes: Lanes, tmp_path: Path
) -> None:
    """Of states twenty times as large as a window, while they are walked over with the next one read ahead, and none afterwards."""
    if pages_in_ram(homes(tier, 2**14, 1)[0]) or os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("files of this directory are kept in RAM")
    states = [homes(tier, 20 * WINDOW // 8) for _ in range(3)]
    most = []

    def work(window: slice, parts: list[Tensor]) -> None:
        for part in parts:
            part.add_(1)
        kept = sum(pages_in_ram(home) for found in states for home in found)
        most.append(kept + len(buffers) * WINDOW)

    buffers: list[mmap.mmap] = []
    take = tier.take_buffer

    def counted(num_bytes: int) -> mmap.mmap:
        buffer = take(num_bytes)
        if not any(buffer is known for known in buffers):
            buffers.append(buffer)
        return buffer

    monkeypatch.setattr(tier, "take_buffer", counted)
    for found in states:
        fill(tier, lanes, found)
    walks = [Walk(tier, lanes, found) for found in states]
    for walk, upcoming in zip(walks, [*walks[1:], None], strict=True):
        walk.read_ahead()
        if upcoming is not None:
            upcoming.read_ahead()
        walk.run(work)
    assert len(most) == 3 * 20 and 0 < max(most) <= WINDOWS_IN_RAM * WINDOW
    assert sum(pages_in_ram(home) for found in states for home in found) == 0
    assert states[2][0][-1] == states[2][0].numel()


def test_who_reads_between_walks_reads_what_the_last_one_left(tier: DiskTier, lanes: Lanes) -> None:
    (home,) = homes(tier, 50_000, 1)
    fill(tier, lanes, [home])
    for number in range(3):
        assert torch.equal(home, torch.arange(50_000, dtype=torch.float32) + number)  # its pages come to RAM
        home[::7] += 1  # and change there
        Walk(tier, lanes, [home]).run(lambda window, parts: parts[0].add_(1))
        home[::7] -= 1


def test_the_disk_works_while_a_window_is_worked_on(tier: DiskTier, lanes: Lanes) -> None:
    found = homes(tier, 10 * WINDOW // 8)
    fill(tier, lanes, found)
    before = len(lanes.records())
    seen: list[int] = []

    def work(window: slice, parts: list[Tensor]) -> None:
        lanes._disk.drain()  # hangs if the next window were read only when this one is done
        seen.append(sum(record.label == "read" for record in lanes.records()[before:]))

    Walk(tier, lanes, found).run(work)
    assert seen == [*range(2, 11), 10]
    records = [record for record in lanes.records()[before:] if record.lane is Lane.DISK]
    assert sum(record.num_bytes for record in records) == 2 * sum(t.nbytes for t in found)


def test_a_walk_that_was_overtaken_reads_again(tier: DiskTier, lanes: Lanes) -> None:
    states = [homes(tier, 5000) for _ in range(4)]
    for found in states:
        fill(tier, lanes, found)
    walks = [Walk(tier, lanes, found) for found in states]
    for walk in walks:
        walk.read_ahead()
    lanes._disk.drain()
    for walk in walks:
        walk.run(lambda window, parts: parts[0].add_(1))
    assert all(torch.equal(found[0], found[1]) for found in states)
    assert len(tier._buffers) <= 3, "an overtaken walk keeps its window"


# -- faults -------------------------------------------------------------------------------------------------------------


def failing(call: Callable[..., Any], after: int) -> Callable[..., Any]:
    calls = iter(range(10**9))

    def fail(*args: Any) -> Any:
        if next(calls) >= after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*args)

    return fail


@pytest.mark.parametrize(("call", "what"), [("preadv", "read"), ("pwritev", "written")])
def test_a_disk_that_fails_is_told(
    call: str, what: str, tier: DiskTier, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = homes(tier, 10 * WINDOW // 8)
    fill(tier, lanes, found)
    monkeypatch.setattr(os, call, failing(getattr(os, call), after=5))
    with pytest.raises(OptimizerStateError, match=rf"could not be {what}: Input/output error.* last checkpoint"):
        Walk(tier, lanes, found).run(lambda window, parts: None)
    monkeypatch.undo()
    fill(tier, lanes, found)
    assert torch.equal(found[1], found[0] + 1)


def test_work_that_fails_leaves_its_window_as_it_was(tier: DiskTier, lanes: Lanes) -> None:
    (home,) = homes(tier, 1000, 1)
    fill(tier, lanes, [home])

    def work(window: slice, parts: list[Tensor]) -> None:
        parts[0].zero_()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        Walk(tier, lanes, [home]).run(work)
    assert torch.equal(home, torch.arange(1000, dtype=torch.float32))


def test_homes_outlive_their_directory_which_has_no_room_for_more(tmp_path: Path, lanes: Lanes) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    tier = DiskTier(str(folder))
    (home,) = homes(tier, 10_000, 1)
    assert list(folder.iterdir()) == []
    shutil.rmtree(folder)
    fill(tier, lanes, [home])
    assert home[-1] == 9999
    tier.trim()
    with pytest.raises(HostMemoryError, match="No such file"):
        homes(tier, 100 * 2**20, 1)


def test_the_disk_space_comes_back(tier: DiskTier) -> None:
    before = set(os.listdir("/proc/self/fd"))
    found = homes(tier, 10_000)
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2, "one of the mapping, one to read and write"
    del found
    gc.collect()
    tier.close()
    gc.collect()
    assert not set(os.listdir("/proc/self/fd")) - before
