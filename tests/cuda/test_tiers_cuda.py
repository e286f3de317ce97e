"""Homes, lanes and meter on a CUDA device: parameters, gradients and copies over pinned memory."""

import copy
import gc
import io
import os
import time
import warnings

import pytest
import torch

from autohete_fx.commands import doctor
from autohete_fx.errors import HostMemoryError
from autohete_fx.graph.ops import contiguous_stride
from autohete_fx.ir import Lane
from autohete_fx.machine.described import link_text, machine_text
from autohete_fx.machine.measure import measure_machine
from autohete_fx.runtime.lanes.lanes import COPY_LANES, Lanes
from autohete_fx.runtime.meter import MemoryMeter, device_live_bytes
from autohete_fx.runtime.tiers.host import HostTier, is_home, open_tier
from autohete_fx.runtime.tiers.pinned import pin

MIB = 2**20


@pytest.fixture
def tier() -> HostTier:
    return open_tier("cuda")


def home(tier: HostTier, *size: int) -> torch.Tensor:
    return tier.empty_strided(size, contiguous_stride(size), torch.float32)


def test_a_home_is_a_cuda_tensor_over_pinned_bytes(tier: HostTier) -> None:
    before = torch.cuda.memory_allocated()
    t = home(tier, 512, 256)
    assert t.is_cuda and tier.owns(t) and t.device == tier.device
    view = tier.host_view(t)
    assert view.device.type == "cpu" and view.is_pinned() and view.data_ptr() == t.data_ptr()
    view.normal_()
    assert torch.equal(t.cpu(), view)
    t.mul_(2)
    torch.cuda.synchronize()
    assert torch.equal(t.cpu(), view)
    assert torch.cuda.memory_allocated() == before


def test_eager_code_reads_and_writes_it(tier: HostTier) -> None:
    values = torch.randn(64, 64)
    t = home(tier, 64, 64)
    t.copy_(values)
    x = torch.randn(8, 64, device="cuda")
    assert torch.equal(x @ t, x @ values.cuda())
    assert torch.equal(copy.deepcopy(t).cpu(), values) and not is_home(copy.deepcopy(t))
    assert torch.equal(t.cpu(), values) and torch.equal(t.clone(), values.cuda())
    stream = io.BytesIO()
    torch.save(t, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream), values.cuda())
    assert torch.allclose(t.norm().cpu(), values.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_read_it_as_they_read_the_device(tier: HostTier, dtype: torch.dtype) -> None:
    """Hopper's kernels for 16-bit products bring tiles by a unit of their own, which must reach host memory too."""
    values, x = (torch.randn(size, 2048, device="cuda").to(dtype) for size in (2048, 512))
    t = tier.empty_like(values).copy_(values)
    assert torch.equal(x @ t, x @ values) and torch.equal(x @ t.T, x @ values.T)
    torch.mm(x, values, out=(into := tier.empty_like(x)))
    assert torch.equal(into, x @ values)


@pytest.mark.parametrize("compiled", [False, True])
def test_parameters_and_gradients_in_homes_train_as_on_the_device(tier: HostTier, compiled: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128)).cuda()
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        moved = tier.empty_like(parameter.data)
        moved.copy_(parameter.data)
        parameter.data = moved
        parameter.grad = tier.empty_like(parameter.data).zero_()

    def loss(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x).square().mean()

    run = torch.compile(loss) if compiled else loss
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):  # accumulated over different batches
        x = torch.randn(16, 128, device="cuda")
        run(model, x).backward()
        run(twin, x).backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and is_home(ours.grad) and is_home(ours)
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert torch.equal(ours, theirs)


def test_a_gradient_keeps_its_home_and_a_dropped_one_returns(tier: HostTier) -> None:
    p = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    p.grad = home(tier, 1000).fill_(7)
    address = p.grad.data_ptr()
    gc.collect()
    assert all(home(tier, 1000).fill_(1).data_ptr() != address for _ in range(4))
    assert p.grad is not None and bool((p.grad == 7).all())
    p.grad = None
    torch.cuda.synchronize()
    assert tier.in_use_bytes == 0 and home(tier, 1000).data_ptr() == address


def test_a_home_is_not_reused_while_a_kernel_reads_it(tier: HostTier) -> None:
    n = 4 * MIB
    torch.cuda.synchronize()
    tier.reserve(2 * 4 * n)
    t = home(tier, n).fill_(3)
    out = torch.empty(n, device="cuda")
    torch.cuda._sleep(200_000_000)
    out.copy_(t)  # behind the sleep
    del t
    for _ in range(4):
        view = tier.host_view(home(tier, n))
        view.fill_(9)  # by the CPU, which waits for no stream
    assert bool((out == 3).all())


def test_pinning_is_exact_and_refused_clearly(tier: HostTier) -> None:
    tier.reserve(130 * MIB + 5)
    assert 130 * MIB < tier.reserved_bytes < 130 * MIB + 2**16
    t = home(tier, 100 * MIB // 4)
    assert tier.reserved_bytes < 130 * MIB + 2**16
    del t
    tier.trim()
    assert tier.reserved_bytes == 0
    with pytest.raises(HostMemoryError, match="of RAM are available"):
        pin(2**60)
    with pytest.raises(HostMemoryError, match="allow more host memory"):
        home(open_tier("cuda", capacity_bytes=MIB), MIB)


@pytest.mark.parametrize("lane", COPY_LANES)
def test_copies_arrive_behind_what_made_their_source(tier: HostTier, lane: Lane) -> None:
    lanes = Lanes("cuda")
    n = 8 * MIB
    src = torch.zeros(n, device="cuda") if lane is Lane.D2H else home(tier, n).zero_()
    dst = home(tier, n).zero_() if lane is Lane.D2H else torch.zeros(n, device="cuda")
    torch.cuda._sleep(100_000_000)
    src.fill_(5)  # behind the sleep; the copy must wait for it
    ticket = lanes.submit(lane, 0, dst, src)
    ticket.wait()
    seen = dst.clone()  # on the current stream, which waits for the copy
    src.zero_()
    assert bool((seen == 5).all())
    lanes.drain()
    (record,) = lanes.records()
    assert (record.lane, record.num_bytes) == (lane, 4 * n) and record.begin_s < record.end_s
    lanes.close()


def test_a_dropped_ticket_keeps_its_tensors_until_the_copy_ended(tier: HostTier) -> None:
    lanes = Lanes("cuda")
    n = 8 * MIB
    for value in range(4):
        torch.cuda._sleep(50_000_000)
        dst = home(tier, n)
        lanes.submit(Lane.D2H, 0, dst, torch.full((n,), float(value), device="cuda"))
        torch.full((n,), -1.0, device="cuda")  # would take the source's memory if it were free
        lanes.drain()
        assert bool((tier.host_view(dst) == value).all())


def test_a_copy_runs_under_compute(tier: HostTier) -> None:
    lanes = Lanes("cuda")
    dst, src = torch.empty(MIB, device="cuda"), home(tier, MIB).fill_(4)
    torch.cuda.synchronize()
    ticket = lanes.submit(Lane.H2D, 0, dst, src)
    torch.cuda._sleep(2_000_000_000)  # about a second
    computed = torch.cuda.Event()
    computed.record()
    lanes.drain()
    assert not computed.query(), "the copy waited for compute that was submitted after it"
    ticket.wait()
    assert bool((dst == 4).all())


def test_the_meter_is_the_caching_allocators(tier: HostTier) -> None:
    torch.cuda.empty_cache()  # a free piece that is up to 1 MiB too large would be taken, and counted, as a whole
    old = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    with MemoryMeter("cuda") as meter:
        a = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
        kept = home(tier, MIB)
        del a, old
    assert meter.peak_bytes - meter.start_bytes == 8 * MIB and kept.is_cuda
    assert device_live_bytes("cuda") == meter.start_bytes - 3 * MIB == torch.cuda.memory_allocated()


def test_a_child_takes_no_page_from_the_device(tier: HostTier) -> None:
    """After a fork the kernel would give whoever writes first a copy of the page, and the device keeps the other."""
    t = home(tier, MIB)
    view = tier.host_view(t).fill_(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks in processes with threads; this child does nothing
        child = os.fork()
    if child == 0:
        time.sleep(1.0)
        os._exit(0)
    view.fill_(2)
    seen = t.clone()
    t.fill_(3)
    torch.cuda.synchronize()
    assert bool((seen == 2).all()) and bool((view == 3).all())
    os.waitpid(child, 0)


def test_the_doctor_times_the_link_over_homes(capsys: pytest.CaptureFixture[str]) -> None:
    """Rates of another order would be those of memory that is not pinned, or of a clock that did not wait."""
    machine, link = measure_machine(torch.device("cuda")), doctor.link_of(torch.device("cuda"))
    assert link is not None
    both = machine.h2d_bytes_per_s + machine.d2h_bytes_per_s
    print(machine_text(machine), link_text(link), sep="\n")
    assert 0.4 * both < link.both_ways_bytes_per_s < 1.1 * both
    assert link.kernel_reads_bytes_per_s > 0.1 * machine.h2d_bytes_per_s
    assert link.kernel_writes_bytes_per_s > 0.1 * machine.d2h_bytes_per_s
    # A lane that another all but stops would wait for the interpreter, or on the other's stream.
    assert all(kept > 0.2 for _, _, kept in machine.contention)


def test_memory_is_pinned_as_fast_as_it_is_found(tier: HostTier) -> None:
    """Page by page on one thread it takes a third of a second a GiB, and half a minute for a model of billions."""
    tier.reserve(1024 * MIB)
    print(f"1 GiB was mapped and pinned in {tier.mapped_s:.3f} s")
    assert tier.reserved_bytes >= 1024 * MIB and tier.mapped_s > 0
