"""Homes: whose bytes they are, when they are reused, and what they leave behind."""

import contextlib
import ctypes
import gc
import mmap
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autohete_fx.errors import HostMemoryError
from autohete_fx.graph.ops import contiguous_stride, is_dense
from autohete_fx.runtime.tiers.arena import ALIGNMENT_BYTES as LINE
from autohete_fx.runtime.tiers.arena import Arena, Chunk
from autohete_fx.runtime.tiers.host import HostTier, PinnedTier, is_home, lease_view, open_tier, span
from autohete_fx.runtime.tiers.mapped_files import map_file
from autohete_fx.runtime.tiers.pinned import cuda_register, cuda_unregister, pin

MIB = 2**20


@pytest.fixture(params=["files", "pinned"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> HostTier:
    """Both tiers; the pinned one presents itself on the CPU, with a driver that accepts everything."""
    if request.param == "files":
        return open_tier("cpu", str(tmp_path))
    arena = Arena(lambda n: pin(n, lambda address, size: 0, lambda address: None), growth_bytes=MIB)
    return PinnedTier(torch.device("cpu"), arena=arena)


def home(tier: HostTier, *size: int) -> torch.Tensor:
    return tier.empty_strided(size, contiguous_stride(size), torch.float32)


def test_a_home_is_an_ordinary_tensor(tier: HostTier) -> None:
    t = tier.empty_strided((3, 4), (1, 3), torch.bfloat16)
    assert (t.shape, t.stride(), t.dtype, t.device.type) == ((3, 4), (1, 3), torch.bfloat16, "cpu")
    assert t.data_ptr() % LINE == 0 and t.untyped_storage().nbytes() == 24
    values = torch.randn(3, 4).bfloat16()
    t.copy_(values)
    assert torch.equal(t.clone(), values) and tier.owns(t) and tier.owns(t[1:]) and not tier.owns(values)


def test_empty_like_keeps_the_order_of_dimensions(tier: HostTier) -> None:
    dense = torch.empty(4, 6, 5).permute(2, 0, 1)
    assert tier.empty_like(dense).stride() == dense.stride()
    assert tier.empty_like(torch.empty(4, 10)[:, ::2]).stride() == (5, 1)
    assert tier.empty_like(torch.empty(1, 3).expand(4, 3)).stride() == (3, 1)
    # Attention's backward lays out gradients like its queries.
    queries = torch.empty(2, 5, 24)[..., :8].view(2, 5, 2, 4).transpose(1, 2)
    assert tier.empty_like(queries).stride() == torch.empty_like(queries).stride() == (40, 4, 8, 1)
    assert tier.empty_like(torch.empty(0, 3)).shape == (0, 3)
    assert tier.empty_like(torch.tensor(1.0)).shape == ()


def test_layout_arithmetic() -> None:
    assert span((3, 4), (10, 2)) == 27 and span((3, 0), (1, 1)) == 0 and span((), ()) == 1
    assert is_dense((2, 3, 1), (1, 2, 99)) and not is_dense((2, 3), (6, 2)) and not is_dense((2, 3), (0, 1))
    for size in [(2, 3, 4), (0, 3), (3, 0, 2), (), (1,)]:
        assert contiguous_stride(size) == torch.empty(size).stride()


def test_a_home_returns_with_its_last_reference(tier: HostTier) -> None:
    t = home(tier, 100)
    address, view = t.data_ptr(), t[3:]
    assert tier.in_use_bytes == -(-400 // LINE) * LINE
    del t
    assert tier.in_use_bytes == -(-400 // LINE) * LINE
    other = home(tier, 100)
    assert other.data_ptr() != address
    del view, other
    assert tier.in_use_bytes == 0
    assert home(tier, 100).data_ptr() == address


def test_a_gradient_keeps_its_home(tier: HostTier) -> None:
    p = torch.nn.Parameter(torch.zeros(50))
    p.grad = home(tier, 50).fill_(7)
    address = p.grad.data_ptr()
    gc.collect()
    others = [home(tier, 50).fill_(1) for _ in range(4)]
    assert all(other.data_ptr() != address for other in others)
    assert p.grad is not None and torch.equal(p.grad, torch.full((50,), 7.0)) and is_home(p.grad)
    p.grad = None
    assert home(tier, 50).data_ptr() == address


def test_what_autograd_saved_keeps_its_home(tier: HostTier) -> None:
    x = torch.ones(50, requires_grad=True)
    factor = home(tier, 50).fill_(3)
    address = factor.data_ptr()
    loss = (x * factor).sum()  # saves the factor
    del factor
    gc.collect()
    assert home(tier, 50).fill_(9).data_ptr() != address
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((50,), 3.0))
    assert home(tier, 50).data_ptr() == address


def test_param_data_keeps_its_home_across_threads(tier: HostTier) -> None:
    p = torch.nn.Parameter(torch.zeros(50))
    p.data = home(tier, 50).fill_(2)
    address = p.data_ptr()
    assert home(tier, 50).data_ptr() != address

    def drop() -> None:
        p.data = torch.zeros(50)

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert tier.in_use_bytes == 0 and home(tier, 50).data_ptr() == address


def test_a_host_view_shares_bytes_and_keeps_the_home(tier: HostTier) -> None:
    t = home(tier, 8, 8).zero_()
    view = lease_view(t.t()[2:])  # what host_view makes of a CUDA home
    t[1, 3] = 5
    assert view.shape == (6, 8) and view[1, 1] == 5 and tier.owns(view)
    address = t.data_ptr()
    del t
    gc.collect()
    assert home(tier, 8, 8).data_ptr() != address and view[1, 1] == 5
    assert tier.host_view(view) is view


def test_homes_outlive_their_tier(tmp_path: Path) -> None:
    tier = open_tier("cpu", str(tmp_path))
    t = home(tier, 1000).fill_(4)
    tier.close()
    with pytest.raises(HostMemoryError, match="after close"):
        home(tier, 1)
    del tier
    gc.collect()
    assert t.sum() == 4000


def test_homes_made_in_odd_modes_are_ordinary(tier: HostTier) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert type(home(tier, 2)) is torch.Tensor
    with torch.inference_mode():
        t = home(tier, 2)
    with torch.device("meta"):
        assert home(tier, 2).device.type == "cpu"
    assert not t.is_inference()
    torch.nn.Parameter(t).sum().backward()


def test_many_threads_get_distinct_homes(tier: HostTier) -> None:
    errors: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        held: list[tuple[torch.Tensor, int]] = []
        for step in range(200):
            size = int(torch.randint(1, 5000, (), generator=generator))
            held.append((home(tier, size).fill_(seed * 1000 + step), seed * 1000 + step))
            if len(held) > 5:
                t, value = held.pop(int(torch.randint(0, 5, (), generator=generator)))
                if not bool((t == value).all()):
                    errors.append(f"a home of thread {seed} was overwritten at step {step}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and tier.in_use_bytes == 0
    tier.trim()
    assert tier.reserved_bytes == 0


def test_capacity_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tier = open_tier("cpu", str(tmp_path), capacity_bytes=MIB)
    held = home(tier, 200_000)
    with pytest.raises(HostMemoryError, match=r"asked for .* allowed 1\.0 MiB .* offload less"):
        home(tier, 100_000)
    assert tier.reserved_bytes <= MIB
    del held
    assert home(tier, 250_000).numel() == 250_000  # trims what is free and too small


def test_a_full_disk_is_refused_before_use(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match=r"asked for .* are free: .*; free disk space there") as caught:
        map_file(2**60, tmp_path)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_bad_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match="is not a directory; create it"):
        open_tier("cpu", str(tmp_path / "missing"))
    with pytest.raises(HostMemoryError, match="expected cpu or cuda"):
        open_tier("meta")


def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HostMemoryError, match="'cuda:0' was given, but PyTorch finds no CUDA device; expected cpu"):
        open_tier("cuda:0")


def test_pinning_registers_each_chunk_once_and_undoes_it() -> None:
    calls: list[tuple[str, int]] = []

    def register(address: int, num_bytes: int) -> int:
        calls.append(("register", address))
        return 0 if num_bytes < 4 * MIB else 2

    arena = Arena(lambda n: pin(n, register, lambda a: calls.append(("unregister", a))), growth_bytes=MIB)
    lease = arena.lease(100)
    address = ctypes.addressof(lease)
    with pytest.raises(HostMemoryError, match=r"asked to pin 4\.0 MiB .*cudaError 2; lower the host budget"):
        arena.lease(4 * MIB)
    del arena
    gc.collect()
    assert ("unregister", address) not in calls
    lease[0] = b"x"  # still mapped
    del lease
    assert calls.count(("register", address)) == calls.count(("unregister", address)) == 1
    with pytest.raises(HostMemoryError, match="of RAM are available"):
        pin(2**60)


def test_what_is_pinned_is_there_in_large_pages_if_there_are_any_and_stays_with_this_process() -> None:
    """The driver finds no page missing, and a fork copies none."""
    seen: list[dict[str, str]] = []

    def register(address: int, num_bytes: int) -> int:
        seen.append(mapping_of(address))
        return 0

    chunk = pin(8 * MIB, register, lambda address: None)
    assert bytes(chunk.mapping[:: mmap.PAGESIZE]) == bytes(8 * MIB // mmap.PAGESIZE)
    (found,) = seen
    # The kernel may have joined the mapping with its neighbours.
    assert int(found["Rss"].split()[0]) >= 8 * 1024 and "dc" in found["VmFlags"].split()
    assert "hg" in found["VmFlags"].split() or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def mapping_of(address: int) -> dict[str, str]:
    """What the kernel tells of the mapping that an address is in."""
    inside, found = False, {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split()[0]:  # the range that begins a mapping
            begin, end = (int(text, 16) for text in line.split()[0].split("-"))
            inside = begin <= address < end
        elif inside:
            found[name] = value
    return found


class _Fence:
    def __init__(self) -> None:
        self.passed = False
        self.waits = 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        time.sleep(0.002)
        self.waits += 1
        self.passed = True


def test_a_range_is_reused_only_behind_its_fence() -> None:
    fences: list[_Fence] = []

    def fence() -> _Fence:
        fences.append(_Fence())
        return fences[-1]

    arena = Arena(lambda n: Chunk(mmap.mmap(-1, n)), growth_bytes=4 * LINE, fence=fence)
    first, rest = arena.lease(2 * LINE), arena.lease(LINE)
    address = ctypes.addressof(first)
    del first
    small = arena.lease(LINE)  # what is free serves it: nobody waits
    assert len(fences) == 1 and fences[0].waits == 0 and ctypes.addressof(small) != address and arena.waited_s == 0.0
    again = arena.lease(2 * LINE)  # only the fenced range would do without another mapping
    assert fences[0].passed and ctypes.addressof(again) == address and arena.reserved_bytes == 4 * LINE
    assert arena.waited_s >= 0.002 and arena.mapped_s > 0.0
    del rest


def test_a_home_is_reused_behind_every_stream_that_homes_were_asked_for_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update lane's thread asks on its default stream, and the user may train on another."""
    recorded: list[str] = []
    events: list[_Fence] = []

    class Event(_Fence):
        def __init__(self, device: object) -> None:
            super().__init__()
            events.append(self)

        def record(self, stream: str) -> None:
            recorded.append(stream)

    streams = {threading.get_ident(): "the user's"}
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: streams.get(threading.get_ident(), "default"))
    arena = Arena(lambda n: pin(n, lambda address, size: 0, lambda address: None), growth_bytes=MIB)
    tier = PinnedTier(torch.device("cuda", 0), arena=arena)
    monkeypatch.setattr(HostTier, "empty_strided", lambda self, *layout: None)  # which takes a device
    thread = threading.Thread(target=tier.empty_strided, args=((4,), (1,), torch.float32))
    thread.start()
    thread.join()
    tier.empty_strided((4,), (1,), torch.float32)
    fence = tier._streams.fence()
    assert sorted(recorded) == ["default", "the user's"] and not fence.query()
    events[0].passed = True
    assert not fence.query()
    fence.synchronize()
    assert fence.query()


def test_what_is_pinned_goes_with_the_last_reference_to_its_tier() -> None:
    """It may be most of the RAM, and garbage collections of so few objects are rare."""
    tier = PinnedTier(torch.device("cuda", 0))
    arena = weakref.ref(tier._arena)
    gc.disable()
    try:
        del tier
        assert arena() is None
    finally:
        gc.enable()


def test_unpinning_waits_for_the_device_and_neither_it_nor_pinning_is_done_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model may be dropped while a kernel still reads a home of its."""
    calls: list[object] = []

    class Runtime:
        def cudaHostUnregister(self, address: int) -> int:
            calls.append(address)
            return 0

        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            calls.append((address, num_bytes))
            return 0

    @contextlib.contextmanager
    def selected(device: torch.device) -> Iterator[None]:
        calls.append(device)
        yield
        calls.append("back")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", selected)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    second = torch.device("cuda", 1)
    assert cuda_register(4096, 8192, second) == 0
    cuda_unregister(4096, second)
    assert calls == [second, (4096, 8192), "back", second, "synchronize", 4096, "back"]


_CHILD = """
import os, sys, torch
from autohete_fx.runtime.tiers.host import open_tier
def rss_anon():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("RssAnon"))
tier = open_tier("cpu", sys.argv[1])
before = rss_anon()
homes = [tier.empty_strided((2**22,), (1,), torch.float32) for _ in range(4)]
for h in homes: h.fill_(1)
print(rss_anon() - before, sum(int(h.sum()) for h in homes), len(os.listdir(sys.argv[1])), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_nothing_is_left_on_disk_and_homes_are_not_anonymous_memory(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdin is not None
    with child, child.stdout, child.stdin:
        grown, total, files = map(int, child.stdout.readline().split())
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert total == 4 * 2**22 and files == 0
    assert grown < 16 * MIB, "64 MiB of homes showed up as anonymous memory"
    assert child.returncode == -signal.SIGKILL and list(tmp_path.iterdir()) == []
