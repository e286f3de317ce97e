"""AdamW on a CUDA device: device states step there, host states on the CPU, whatever side the parameter is on."""

import copy

import pytest
import torch
from torch.nn import Parameter

from autohete_fx.ir import Optimizer, Params
from autohete_fx.optim import AdamW
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers import is_home, open_tier

SHAPES = ((256, 512), (512,), (), (1000, 333))


@pytest.mark.parametrize("params_at", list(Params), ids=str)
@pytest.mark.parametrize("states_at", (Optimizer.DEVICE, Optimizer.HOST), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_equal_the_fused_kernel_of_the_processor(
    dtype: torch.dtype, states_at: Optimizer, params_at: Params
) -> None:
    tier = open_tier("cuda")
    torch.manual_seed(0)
    params = [Parameter(torch.randn(s, device="cuda").to(dtype)) for s in SHAPES]
    processor = "cuda" if states_at is Optimizer.DEVICE else "cpu"
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
            assert tier.owns(state["exp_avg"]) == (states_at is Optimizer.HOST)
            tolerance = {"rtol": 0.0, "atol": 0.0} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 1e-6}
            exact = state.get("master", p).detach()
            torch.testing.assert_close(exact, r.detach().cuda(), **tolerance)
            torch.testing.assert_close(state["exp_avg"], wanted["exp_avg"].cuda(), **tolerance)
            torch.testing.assert_close(state["exp_avg_sq"], wanted["exp_avg_sq"].cuda(), **tolerance)
            assert torch.equal(p, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_host_states_take_no_device_memory(dtype: torch.dtype) -> None:
    tier = open_tier("cuda")
    p = Parameter(torch.randn(4096, 1024, device="cuda").to(dtype))
    p.grad = torch.randn_like(p)
    optimizer = AdamW([p])
    place_param(p, Placement(params=Params.DEVICE, optimizer=Optimizer.HOST, tier=tier, block=0))
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
    for where in (Optimizer.HOST, Optimizer.DEVICE, Optimizer.HOST):
        place_param(p, Placement(params=Params.DEVICE, optimizer=where, tier=tier, block=0))
        torch.testing.assert_close(optimizer.state_dict()["state"], kept["state"], rtol=0, atol=0)
        assert tier.owns(optimizer.state[p]["master"]) == (where is Optimizer.HOST)
