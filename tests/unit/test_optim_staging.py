"""Host memory that updates of parameters on a device of its own need for staging: bounded, whichever lane is late."""

import time
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from autohete_fx.ir import Lane, Optimizer, Overlap, Params, Schedule
from autohete_fx.optim import AdamW
from autohete_fx.runtime.arena import ALIGNMENT_BYTES
from autohete_fx.runtime.fence import lower_fences
from autohete_fx.runtime.lanes import Lanes
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.ticket import Ticket
from autohete_fx.runtime.tiers import open_tier
from autohete_fx.runtime.updates import Updates

COUNT, LENGTH = 12, 1 << 16
KEPT_BYTES, STAGED_BYTES = COUNT * LENGTH * 12, 2 * LENGTH * 4 + ALIGNMENT_BYTES
"""Two moments and the host's copy of every parameter; two gradients at a time, and what says which parameters were edited."""


@pytest.mark.parametrize("late", [Lane.H2D, Lane.D2H, Lane.UPDATE])
def test_staging_is_bounded_where_a_lane_is_late(late: Lane, tmp_path: Path):
    tier = open_tier("cpu", str(tmp_path), KEPT_BYTES + STAGED_BYTES)
    peak_bytes = 0

    def pace(ticket: Ticket) -> float:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, tier.in_use_bytes)
        return 0.005 if ticket.lane is late else 0.0

    lanes = Lanes("cpu", in_background=True, is_host=False, pace=pace)
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
        assert updates.is_pending
        lower_fences()
        while not all(ticket.is_complete for p in params for ticket in updates.tickets_of(p)):  # nobody waits for one
            time.sleep(1e-3)
        reference.step()
        assert all(map(torch.equal, params, others))
    assert KEPT_BYTES < peak_bytes <= KEPT_BYTES + STAGED_BYTES
    lanes.close()
