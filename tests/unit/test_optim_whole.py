"""A rule that is not element-wise is never cut: what it needs whole matrices for, it gets wherever its states live."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import autohete_fx
from autohete_fx.compiler.problem import is_elementwise
from autohete_fx.ir import Lane, Optimizer, Overlap, Params, Schedule
from autohete_fx.optim import AdamW
from autohete_fx.optim.base import PlannedOptimizer
from autohete_fx.optim.rule import Rule
from autohete_fx.runtime import disk
from autohete_fx.runtime.disk import DiskTier, Walk
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.pending.fence import lower_fences
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, is_home, open_tier
from tests.held_updates import Stack

SHAPES = ((300, 40), (70001,), (5,), (), (1,), (0, 3), (64, 300))
PLACES = [Optimizer.DEVICE, Optimizer.HOST, Optimizer.STREAMED, Optimizer.DISK]


def advance(value: Tensor, grad: Tensor, moments: Sequence[Tensor], group: Any, workspace: Tensor) -> None:
    """A step of the length ``lr``, whatever the gradient: no part of a matrix tells how long another one's is."""
    assert workspace.numel() >= 8 * value.numel() and workspace.dtype == torch.uint8
    workspace.fill_(255)  # of nobody else
    moments[0].mul_(group["kept"]).add_(grad.to(value.dtype))
    value.sub_(group["lr"] * moments[0] / moments[0].norm())


WHOLE = Rule(
    name="Whole",
    moments=("momentum",),
    hyperparameters=(("lr", 0.1), ("kept", 0.9)),
    checked=lambda group: {},
    whole=advance,
    workspace_bytes=lambda param: 8 * param.numel(),
)


class Whole(PlannedOptimizer):
    rule = WHOLE

    def __init__(self, params: Iterable[Any], lr: float = 0.1, overlap: str | None = "step") -> None:
        super().__init__(params, {"lr": lr, "kept": 0.9}, overlap=overlap, max_grad_norm=None)


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


@contextlib.contextmanager
def two_memories(is_host: bool) -> Iterator[Lanes]:
    lanes = Lanes("cpu", is_host=is_host, in_background=True)
    yield lanes
    lower_fences()
    lanes.close()


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("params_at", list(Params), ids=str)
@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_updated_whole_wherever_its_states_live(
    dtype: torch.dtype,
    where: Optimizer,
    params_at: Params,
    is_host: bool,
    tier: HostTier,
    monkeypatch: pytest.MonkeyPatch,
):
    """Bitwise what its formulas give, for parameters that any other rule is cut in."""
    monkeypatch.setattr(disk, "WINDOW_BYTES", 2**15)
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    params[0].data = params[0].data.t().contiguous().t()
    masters = [p.detach().to(torch.float32, copy=True) for p in params]
    momenta = list(map(torch.zeros_like, masters))  # laid out as the parameters, for a norm adds in the order of memory
    spare, group = torch.empty(8 * 70001, dtype=torch.uint8), {"lr": 0.1, "kept": 0.9}
    optimizer = Whole(params)
    with two_memories(is_host) as lanes:
        updates = Updates(lanes)
        updates.schedule = Schedule(overlap=Overlap.STEP)
        on_disk = DiskTier() if where is Optimizer.DISK else None
        for block, p in enumerate(params):
            own = {"tier": tier, "block": block, "updates": updates, "disk": on_disk}
            place_param(p, Placement(params=params_at, optimizer=where, **own))
        for _ in range(3):
            for n, p in enumerate(params):
                p.grad = torch.randn(p.shape).to(dtype)
                grad = torch.empty_like(masters[n]).copy_(p.grad)
                advance(masters[n], grad, [momenta[n]], group, spare)
            optimizer.step()
            optimizer.zero_grad()
        for p, master, momentum in zip(params, masters, momenta, strict=True):
            state = optimizer.state[p]
            assert torch.equal(state["momentum"], momentum) and torch.equal(state.get("master", p), master)
            assert torch.equal(p, master.to(dtype))
            assert is_home(state["momentum"]) == (where is not Optimizer.DEVICE) or not p.numel()
        copied = [r.num_bytes for r in lanes.records() if r.label == "states" and r.lane is Lane.H2D]
        if is_host or where is not Optimizer.STREAMED:
            assert not copied
        else:  # all states of the largest parameter, and itself where it lives on the host, in one piece
            is_mixed = dtype != torch.float32
            each = 4 + 4 * is_mixed + dtype.itemsize * (params_at is Params.HOST)
            assert max(copied) == each * 70001


def test_states_on_disk_come_in_one_window(tier: HostTier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "WINDOW_BYTES", 2**15)
    walked: list[int] = []
    run = Walk.run
    monkeypatch.setattr(Walk, "run", lambda walk, work: walked.append(len(walk._windows)) or run(walk, work))
    counts = []
    for kind in (Whole, AdamW):
        p = Parameter(torch.randn(300, 300))
        place_param(p, Placement(params=Params.DEVICE, optimizer=Optimizer.DISK, tier=tier, block=0, disk=DiskTier()))
        optimizer = kind([p])
        p.grad = torch.randn_like(p)
        optimizer.step()
        counts.append(walked[-1])
    assert counts[0] == 1 < counts[1]


def test_no_solved_plan_cuts_it():
    """Plans count the memory of pieces and windows, so they are not made for what needs more."""
    params = [Parameter(torch.randn(3, 3)) for _ in range(2)]
    assert is_elementwise(params)
    first, second = AdamW(params[:1]), Whole(params[1:])
    assert not is_elementwise(params) and is_elementwise(params[:1])
    del first, second


def test_a_model_trains_with_it():
    seen = []
    for compiled in (False, True):
        model = Stack()
        optimizer = Whole(model.parameters())
        if compiled:
            model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic"})
        for step in range(3):
            model(torch.full((4, 128), 1.0 + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *seen))
    assert autohete_fx.compilations()[-1].training
