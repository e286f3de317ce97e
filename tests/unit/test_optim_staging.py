"""Host memory that updates of parameters on a device of its own need for staging: bounded, whichever lane is late."""

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from autohete_fx.errors import HostMemoryError
from autohete_fx.ir import Lane, Optimizer, Overlap, Params, Schedule
from autohete_fx.optim import AdamW
from autohete_fx.optim import updates as step_updates
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.fence import lower_fences
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.arena import ALIGNMENT_BYTES
from autohete_fx.runtime.tiers.host import HostTier, open_tier

COUNT, LENGTH = 12, 1 << 16
KEPT_BYTES, STAGED_BYTES = COUNT * LENGTH * 12, 2 * LENGTH * 4 + ALIGNMENT_BYTES
"""Two moments and the host's copy of every parameter; two gradients at a time, and what says which parameters were edited."""


def train(tier: HostTier, lanes: Lanes) -> None:
    """Three steps of parameters on the device, whose gradients are there too, beside PyTorch's."""
    updates = Updates(lanes)
    updates.schedule = Schedule(overlap=Overlap.STEP)
    params = [Parameter(torch.randn(LENGTH)) for _ in range(COUNT)]
    others = [Parameter(p.detach().clone()) for p in params]
    optimizer, reference = AdamW(params), torch.optim.AdamW(others, fused=True)
    for block, p in enumerate(params):
        place = Placement(params=Params.DEVICE, optimizer=Optimizer.HOST, tier=tier, block=block, updates=updates)
        place_param(p, place)
    for _ in range(3):
        for p, other in zip(params, others, strict=True):
            p.grad = torch.randn(LENGTH)
            other.grad = p.grad.clone()
        optimizer.step()
        lower_fences()
        while not all(ticket.is_complete for p in params for ticket in updates.tickets_of(p)):  # nobody waits for one
            time.sleep(1e-3)
        reference.step()
        assert all(map(torch.equal, params, others))


@pytest.mark.parametrize("late", [Lane.H2D, Lane.D2H, Lane.UPDATE])
def test_staging_is_bounded_where_a_lane_is_late(late: Lane, tmp_path: Path):
    tier = open_tier("cpu", str(tmp_path), KEPT_BYTES + STAGED_BYTES)
    peak_bytes = 0

    def pace(ticket: Ticket) -> float:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, tier.in_use_bytes)
        return 0.005 if ticket.lane is late else 0.0

    lanes = Lanes("cpu", in_background=True, is_host=False, pace=pace)
    train(tier, lanes)
    assert KEPT_BYTES < peak_bytes <= KEPT_BYTES + STAGED_BYTES
    lanes.close()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_memory_that_others_take_meanwhile_is_not_that_of_updates(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once a step has begun to change parameters all that is left may go."""
    staged_bytes = (num_workers + 1) * LENGTH * 4 + ALIGNMENT_BYTES
    tier = open_tier("cpu", str(tmp_path), KEPT_BYTES + staged_bytes)
    taken: list[Tensor] = []
    tickets: list[Ticket] = []
    update = Lanes.update

    def update_without_room(lanes: Lanes, priority: int, *args: Any, **how: Any) -> Ticket:
        size = LENGTH * 4 if priority == 0 else 0
        while size >= ALIGNMENT_BYTES:
            try:
                taken.append(tier.empty_strided((size,), (1,), torch.uint8))
            except HostMemoryError:
                size //= 2
        tickets.append(update(lanes, priority, *args, **how))
        if priority == COUNT - 1:
            for ticket in tickets[-COUNT:]:
                ticket.wait()
            taken.clear()
        return tickets[-1]

    monkeypatch.setattr(Lanes, "update", update_without_room)
    lanes = Lanes("cpu", in_background=True, is_host=False, num_update_workers=num_workers)
    train(tier, lanes)
    lanes.close()


@pytest.fixture
def cpu_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: the CPU reaches only homes, and lanes run beside the caller."""
    monkeypatch.setattr(step_updates, "lanes_of", functools.partial(Lanes, in_background=True, is_host=False))


@pytest.mark.usefixtures("cpu_apart")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", list(Params), ids=str)
def test_staging_through_homes_is_exact(dtype: torch.dtype, where: Params, tmp_path: Path) -> None:
    """The way of an accelerator's host states, with some gradients in homes already, and an edit between steps."""
    tier, generator = open_tier("cpu", str(tmp_path)), torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator).to(dtype) for s in ((40, 30), (9,), (30, 40), (200, 300))]
    values[2] = values[2].t().contiguous().t()
    params = [Parameter(v.clone()) for v in values]
    others = [Parameter(v.clone()) for v in values]
    hosted, plain = AdamW(params, weight_decay=0.1), AdamW(others, weight_decay=0.1)
    for block, p in enumerate(reversed(params)):
        place_param(p, Placement(params=where, optimizer=Optimizer.HOST, tier=tier, block=block))
    for step in range(4):
        for p, o in zip(params, others, strict=True):
            grad = torch.randn(p.shape, generator=generator).to(dtype)
            o.grad = grad.clone()
            p.grad = tier.empty_like(grad).copy_(grad) if p.dim() == 1 else grad
            if step == 2:
                p.data.mul_(1.5)
                o.data.mul_(1.5)
        hosted.step()
        plain.step()
        for p, o in zip(params, others, strict=True):
            assert torch.equal(p, o) and tier.owns(p) == (where is Params.HOST)
            torch.testing.assert_close(dict(hosted.state[p]), dict(plain.state[o]), rtol=0, atol=0)


@pytest.mark.usefixtures("cpu_apart")
def test_staging_that_finds_no_room_changes_nothing(tmp_path: Path) -> None:
    tier = open_tier("cpu", str(tmp_path), 3 * 2**20)
    params = [Parameter(torch.ones(100)), Parameter(torch.ones(1 << 18))]
    optimizer = AdamW(params)
    for p in params:
        place_param(p, Placement(params=Params.DEVICE, optimizer=Optimizer.HOST, tier=tier, block=0))
        p.grad = torch.ones_like(p)
    with pytest.raises(HostMemoryError):
        optimizer.step()
    assert all(torch.equal(p, torch.ones_like(p)) and optimizer.state[p]["step"] == 0 for p in params)
