"""AdamW on a CUDA device: device states step there, host states on the CPU, whatever side the parameter is on."""

import copy

import pytest
import torch
from torch.nn import Parameter

from autohete_fx.ir import Optimizer, Overlap, Params, Schedule, staging_bytes
from autohete_fx.optim import AdamW
from autohete_fx.optim.fingerprint import fingerprint
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.pending.fence import lower_fences
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, is_home, open_tier

SHAPES = ((256, 512), (512,), (), (1000, 333))


@pytest.mark.parametrize("params_at", list(Params), ids=str)
@pytest.mark.parametrize("states_at", (Optimizer.DEVICE, Optimizer.HOST, Optimizer.STREAMED), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_equal_the_fused_kernel_of_the_processor(
    dtype: torch.dtype, states_at: Optimizer, params_at: Params
) -> None:
    tier = open_tier("cuda")
    torch.manual_seed(0)
    params = [Parameter(torch.randn(s, device="cuda").to(dtype)) for s in SHAPES]
    processor = "cpu" if states_at is Optimizer.HOST else "cuda"
    reference = [Parameter(p.detach().float().to(processor)) for p in params]
    optimizer = AdamW(params, lr=1e-2, weight_decay=0.1)
    expected = torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.1, fused=True)
    for p in params:
        place_param(p, Placement(params=params_at, optimizer=states_at, tier=tier, block=0))
    for step in range(5):
        for p, r in zip(params, reference, strict=True):
            grad = torch.randn(p.shape, device="cuda").to(dtype)
            p.grad = tier.empty_like(grad).copy_(grad) if step % 2 else grad
            r.grad = grad.float().to(processor)
            if step == 3:
                p.data.mul_(2.0)
                r.data.copy_(p.detach() if dtype == torch.float32 else p.detach().float())
        optimizer.step()
        expected.step()
        for p, r in zip(params, reference, strict=True):
            state, wanted = optimizer.state[p], expected.state[r]
            assert is_home(p) == (params_at is Params.HOST)
            assert tier.owns(state["exp_avg"]) == (states_at is not Optimizer.DEVICE)
            tolerance = {"rtol": 0.0, "atol": 0.0} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 1e-6}
            exact = state.get("master", p).detach()
            torch.testing.assert_close(exact, r.detach().cuda(), **tolerance)
            torch.testing.assert_close(state["exp_avg"], wanted["exp_avg"].cuda(), **tolerance)
            torch.testing.assert_close(state["exp_avg_sq"], wanted["exp_avg_sq"].cuda(), **tolerance)
            assert torch.equal(p, exact.to(dtype))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_on_the_device_is_given_to_it_and_not_waited_for(dtype: torch.dtype) -> None:
    params = [Parameter(torch.randn(s, device="cuda").to(dtype)) for s in SHAPES]
    optimizer = AdamW(params, lr=1e-2)
    try:
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
            torch.cuda.set_sync_debug_mode("error")  # from the second step on: the first makes states and compiles
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_host_states_take_no_device_memory(dtype: torch.dtype) -> None:
    tier = open_tier("cuda")
    p = Parameter(torch.randn(4096, 1024, device="cuda").to(dtype))
    p.grad = torch.randn_like(p)
    optimizer = AdamW([p])
    place_param(p, Placement(params=Params.DEVICE, optimizer=Optimizer.HOST, tier=tier, block=0))
    fingerprint(p)  # a process compiles the kernel once, and tries it out in buffers of its own
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert torch.cuda.max_memory_allocated() - before <= 1 << 16


def test_states_move_between_device_and_host_without_loss() -> None:
    tier = open_tier("cuda")
    p = Parameter(torch.randn(300, 200, device="cuda", dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-2)
    p.grad = torch.randn_like(p)
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    for where in (Optimizer.HOST, Optimizer.DEVICE, Optimizer.STREAMED, Optimizer.HOST):
        place_param(p, Placement(params=Params.DEVICE, optimizer=where, tier=tier, block=0))
        torch.testing.assert_close(optimizer.state_dict()["state"], kept["state"], rtol=0, atol=0)
        assert tier.owns(optimizer.state[p]["master"]) == (where is not Optimizer.DEVICE)


class Streaming:
    """Parameters whose states are streamed under way, and twins with states on the device."""

    def __init__(self, tier: HostTier, dtype: torch.dtype, count: int = 8) -> None:
        self.updates = Updates(Lanes("cuda"))
        self.updates.schedule = Schedule(overlap=Overlap.STEP)
        torch.manual_seed(0)
        self.params = [Parameter(torch.randn(1024, 1021, device="cuda").to(dtype)) for _ in range(count)]
        self.twins = [Parameter(p.detach().clone()) for p in self.params]
        self.optimizer, self.reference = AdamW(self.params, lr=1e-2), AdamW(self.twins, lr=1e-2)
        for block, p in enumerate(self.params):
            place = Placement(Params.DEVICE, Optimizer.STREAMED, tier, block, self.updates)
            place_param(p, place)

    def step(self) -> None:
        """Gradients are late, let go of behind the step, and their memory is asked for again at once."""
        torch.cuda._sleep(20_000_000)
        for p, twin in zip(self.params, self.twins, strict=True):
            twin.grad = torch.randn_like(twin)
            p.grad = twin.grad.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        overwriting = [torch.full_like(twin, float("nan")) for twin in self.twins]
        self.reference.step()
        self.reference.zero_grad()
        del overwriting

    def assert_equal(self) -> None:
        assert all(map(torch.equal, self.params, self.twins))
        for p, twin in zip(self.params, self.twins, strict=True):
            ours, theirs = self.optimizer.state[p], self.reference.state[twin]
            assert all(torch.equal(ours[name], theirs[name].to(ours[name].device)) for name in theirs)


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "a stream of the user's"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_streamed_states_are_updated_as_the_devices_own_bit_by_bit(dtype: torch.dtype, own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        streaming = Streaming(open_tier("cuda"), dtype)
        for step in range(6):
            streaming.step()
            if step % 2:
                streaming.assert_equal()
        streaming.assert_equal()
    lower_fences()
    streaming.updates.lanes.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_streamed_states_take_the_device_memory_that_the_planner_counts(dtype: torch.dtype) -> None:
    streaming = Streaming(open_tier("cuda"), dtype)
    streaming.step()
    streaming.optimizer.synchronize()
    for p in streaming.params:
        p.grad = torch.randn_like(p)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    streaming.optimizer.step()
    streaming.optimizer.synchronize()
    counted = sum(staging_bytes(streaming.optimizer.state_bytes_of(p)) for p in streaming.params)
    assert torch.cuda.max_memory_allocated() - before <= counted + (1 << 16)
    streaming.updates.lanes.close()
