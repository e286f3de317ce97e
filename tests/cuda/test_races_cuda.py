"""The silent bugs that offloading frameworks have had, one regression test each, at the level of the lanes.

Every one of them gives right results as long as the GPU keeps up, so each test makes something late: ``torch.cuda._sleep`` holds a
stream while the CPU goes on. What happens to whole models is in ``test_overlap_cuda.py``, with everything late at random.
"""

import gc

import pytest
import torch
from torch import Tensor

from autohete_fx.graph.ops import contiguous_stride
from autohete_fx.ir import Lane
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.tiers.host import HostTier, open_tier

COUNT = 4 * 2**20
LONG = 100_000_000  # cycles: some 50 milliseconds


@pytest.fixture
def tier() -> HostTier:
    tier = open_tier("cuda")
    tier.reserve(12 * COUNT * 4)
    return tier


@pytest.fixture
def lanes() -> Lanes:
    return Lanes("cuda")


def home(tier: HostTier) -> Tensor:
    return tier.empty_strided((COUNT,), contiguous_stride((COUNT,)), torch.float32)


def full(value: float) -> Tensor:
    return torch.full((COUNT,), value, device="cuda")


def test_a_copy_does_not_race_the_optimizers_writes(tier: HostTier, lanes: Lanes):
    """Gradient down, update of the home on the CPU, parameter up; then the next round, without the CPU ever waiting."""
    gradient, parameter = home(tier), home(tier).fill_(0)
    torch.cuda.synchronize()
    seen = []
    for n in range(1, 9):
        torch.cuda._sleep(LONG // 4)
        computed = full(float(n))
        down = lanes.submit(Lane.D2H, 0, gradient, computed)

        def update(down=down) -> None:
            down.synchronize()
            tier.host_view(parameter).add_(tier.host_view(gradient))

        updated = lanes.update(0, update, after=(down,))
        fetched = torch.empty(COUNT, device="cuda")
        up = lanes.submit(Lane.H2D, 0, fetched, parameter, (updated, lanes.now()))
        up.wait()
        seen.append(fetched.clone())
    assert [t.unique().tolist() for t in seen] == [[n * (n + 1) / 2] for n in range(1, 9)]
    lanes.close()


def test_a_buffer_is_not_reused_before_its_copy_ended(tier: HostTier, lanes: Lanes):
    """Freed right behind the wait, and written by whatever gets its memory next."""
    homes = []
    for n in range(6):
        source = full(float(n))
        stream_held(lanes, tier)
        ticket = lanes.submit(Lane.D2H, 0, into := home(tier), source)
        address = source.data_ptr()
        ticket.wait()
        del source
        overwriting = full(-1.0)
        assert overwriting.data_ptr() == address, "the memory was not reused, so nothing is tested"
        homes.append(into)
        del overwriting
    lanes.drain()
    torch.cuda.synchronize()
    assert [tier.host_view(t).unique().tolist() for t in homes] == [[float(n)] for n in range(6)]
    lanes.close()


def stream_held(lanes: Lanes, tier: HostTier) -> None:
    """Hold the copy lane for a while: a copy of its own behind a sleep of the computing stream does."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG // 4)
        lanes.submit(Lane.D2H, 0, home(tier), torch.zeros(COUNT, device="cuda")).wait()


def test_a_reload_does_not_start_before_compute_has_freed_its_buffer(tier: HostTier, lanes: Lanes):
    """The allocator gives memory away as soon as the CPU has let go of it; kernels that read it are still to come."""
    arriving = home(tier).fill_(7)
    torch.cuda.synchronize()
    for n in range(4):
        live = full(float(n))
        address = live.data_ptr()
        torch.cuda._sleep(LONG)
        read = live + 1  # behind the sleep
        del live
        destination = torch.empty(COUNT, device="cuda")
        assert destination.data_ptr() == address, "the memory was not reused, so nothing is tested"
        lanes.submit(Lane.H2D, 0, destination, arriving).wait()
        assert read.unique().tolist() == [n + 1], "the reload overwrote a live activation"
        assert destination.unique().tolist() == [7]
        del read, destination
    lanes.close()


def test_a_home_is_not_reused_while_a_copy_of_another_stream_reads_it(tier: HostTier, lanes: Lanes):
    """The user computes on a stream of their own; the thread that asks for the next home is on the default stream."""
    user = torch.cuda.Stream()
    with torch.cuda.stream(user):
        source = home(tier).fill_(3)
        user.synchronize()
        torch.cuda._sleep(LONG)
        read = source + 0
    del source
    gc.collect()
    others = [home(tier) for _ in range(12)]  # all that is reserved, the first one's memory too
    for other in others:
        tier.host_view(other).fill_(9)
    user.synchronize()
    assert read.unique().tolist() == [3]
    lanes.close()


def test_gradients_are_not_dropped_under_accumulation(tier: HostTier, lanes: Lanes):
    """The home of the first micro-batch is `.grad` when the second one's gradient comes down: it gets another home."""
    weight = torch.nn.Parameter(torch.zeros(COUNT, device="cuda"))
    for n in (1.0, 2.0, 4.0):
        torch.cuda._sleep(LONG // 4)
        into = home(tier)
        lanes.submit(Lane.D2H, 0, into, full(n)).wait()
        if weight.grad is None:
            weight.grad = into  # as autograd does: it takes the home
        else:
            weight.grad.add_(into)
        del into
    assert weight.grad is not None and weight.grad.unique().tolist() == [7]
    lanes.close()


def test_from_home_to_home_the_copy_is_behind_what_made_its_source(tier: HostTier, lanes: Lanes):
    source, destination = home(tier).fill_(1), home(tier).fill_(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    source.fill_(5)
    lanes.submit(Lane.D2H, 0, destination, source).synchronize()
    assert tier.host_view(destination).unique().tolist() == [5]
    lanes.close()
