"""Training with optimizer states on disk: exact, chosen where the host budget is short, saved and loaded, and safe in faults."""

import copy
import dataclasses
import errno
import itertools
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autohete_fx
from autohete_fx import (
    BlockDecision,
    HostMemoryError,
    InfeasiblePlanError,
    Optimizer,
    OptimizerStateError,
    Params,
    Plan,
)
from autohete_fx.compiler.problem import with_disk
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.optim.adamw import ADAMW
from autohete_fx.runtime import disk
from autohete_fx.runtime.disk import DiskTier, Walk
from autohete_fx.runtime.pending.backward import Early
from autohete_fx.runtime.placement import Placement, place_param, placement_of
from autohete_fx.runtime.tiers.host import is_home, open_tier
from tests import training
from tests.held_updates import Stack, labels, use_lanes, weight_of
from tests.planner_problems import MACHINE, cost, problem
from tests.thorough import thorough
from tests.training import PLANS, assert_equal, make, ours, plain

ON_DISK = BlockDecision(optimizer=Optimizer.DISK)
X = torch.ones(8, 128)


@pytest.fixture(autouse=True)
def _several_windows_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "WINDOW_BYTES", 2**15)


def compiled(model: nn.Module, decision: BlockDecision = ON_DISK, **options: Any) -> nn.Module:
    plan = Plan(labels=labels(), decisions=(decision,) * len(labels()))
    model.compile(
        backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan, **options}
    )
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(X * (1 + step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pair() -> tuple[Stack, autohete_fx.AdamW, Stack, torch.optim.AdamW]:
    """Ours, and a twin that eager PyTorch trains."""
    model, twin = Stack(), Stack()
    return (
        model,
        autohete_fx.AdamW(model.parameters(), lr=1e-2),
        twin,
        torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True),
    )


def assert_alike(model: nn.Module, optimizer: Any, twin: nn.Module, reference: Any) -> None:
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        for name in (*ADAMW.moments, "step"):
            assert torch.equal(optimizer.state[p][name].cpu(), reference.state[q][name])


def tier_of(model: Stack) -> DiskTier:
    placement = placement_of(weight_of(model))
    assert placement is not None and placement.disk is not None
    return placement.disk


# -- exactness ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each node that might have started an update whether it did."""
    found: list[bool] = []
    start = Early.start
    monkeypatch.setattr(Early, "start", lambda early, *args: found.append(start(early, *args)) or found[-1])
    yield found


@pytest.mark.parametrize(
    ("overlap", "is_host"),
    [
        ("backward", False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((None, True), ("step", False))),
        *(thorough(*each) for each in ((None, False), ("step", True), ("backward", True))),
    ],
)
def test_training_is_bitwise_exact_under_random_delays(
    overlap: str | None, is_host: bool, monkeypatch: pytest.MonkeyPatch, started: list[bool]
):
    """With dropout, and other plans of other blocks. Losses, gradients, parameters and states are compared."""
    chance = random.Random(0)
    use_lanes(monkeypatch, is_host=is_host, pace=lambda ticket: chance.uniform(0, 0.002))
    walked: list[int] = []
    monkeypatch.setattr(
        Walk, "run", lambda walk, work, run=Walk.run: walked.append(len(walk._windows)) or run(walk, work)
    )
    schedule = Schedule(overlap=Overlap.NONE if overlap is None else Overlap(overlap))
    plan = Plan(labels=training.LABELS, decisions=PLANS["disk"], schedule=schedule)
    given = ours(make("cpu"), "eager", {"plan": plan}, overlap=overlap)
    assert any(started) == (overlap == "backward")
    assert len(walked) > training.STEPS * 4 and min(walked) > 1
    assert_equal(given, plain(make("cpu"), "eager"), bitwise=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_spare_core_states_on_disk_are_those_on_the_host(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """16-bit parameters have masters there too."""
    monkeypatch.setattr("autohete_fx.runtime.lanes.lanes.has_spare_core", lambda: False)
    sizes = training.Sizes(width=128, layers=2)
    names = ("prologue", "layers.0", "layers.1", "epilogue")
    seen = []
    for place in (Optimizer.DISK, Optimizer.HOST):
        plan = Plan(labels=names, decisions=(BlockDecision(optimizer=place),) * len(names))
        seen.append(ours(make("cpu", sizes).to(dtype), "eager", {"plan": plan}, sizes=sizes))
    assert_equal(*seen, bitwise=dtype == torch.float32)


@pytest.mark.slow
def test_clipping_and_micro_batches():
    plan = Plan(labels=training.LABELS, decisions=PLANS["disk"])
    given = ours(make("cpu"), "eager", {"plan": plan, "micro_batches": 2}, clip=True, micro_batches=2)
    assert_equal(given, plain(make("cpu"), "eager", clip=True, micro_batches=2), bitwise=True)


# -- states come and go -------------------------------------------------------------------------------------------------


def test_a_state_dict_goes_to_torch_and_comes_back():
    model, optimizer, twin, reference = pair()
    compiled(model)
    train(model, optimizer, range(2))
    other = Stack()
    other.load_state_dict(model.state_dict())
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, fused=True)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(other, theirs, range(2, 3))
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    weights = [p for p in model.parameters() if p.dim() == 2]
    assert len(weights) == 4 and all(tier_of(model).owns(optimizer.state[w]["exp_avg"]) for w in weights)
    train(model, optimizer, range(3, 4))
    train(twin, reference, range(4))
    assert_alike(model, optimizer, twin, reference)


def test_states_move_wherever_a_placement_sends_them(tmp_path: Path):
    model, optimizer, twin, reference = pair()
    tiers: dict[str, Any] = {"tier": open_tier("cpu", str(tmp_path)), "disk": DiskTier(str(tmp_path))}
    way = (Optimizer.HOST, Optimizer.DISK, Optimizer.DEVICE, Optimizer.DISK, Optimizer.HOST, Optimizer.DEVICE)
    for step, optimizer_place in enumerate(way):
        for block, p in enumerate(model.parameters()):
            place_param(p, Placement(params=Params.DEVICE, optimizer=optimizer_place, block=block, **tiers))
        assert train(model, optimizer, range(step, step + 1)) == train(twin, reference, range(step, step + 1))
        for p in model.parameters():
            for name in ADAMW.moments:
                home = optimizer.state[p][name]
                assert tiers["disk"].owns(home) == (optimizer_place is Optimizer.DISK)
                assert is_home(home) == (optimizer_place is not Optimizer.DEVICE)
    assert_alike(model, optimizer, twin, reference)
    assert tiers["disk"].in_use_bytes == tiers["tier"].in_use_bytes == 0
    assert list(tmp_path.iterdir()) == []


# -- the planner --------------------------------------------------------------------------------------------------------


def solved(host_budget: int, **options: Any) -> tuple[Stack, autohete_fx.AdamW]:
    """A stack whose states, 512 KiB, and gradients, 256 KiB, may hardly be on the device."""
    model = Stack()
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
    given = {"memory_budget": 384 * 1024, "host_budget": host_budget, **options}
    model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic", **given})
    return model, optimizer


def test_states_spill_to_disk_where_the_host_budget_is_short(fresh_cache: Path):
    """The machine is measured anew, which takes more than these budgets."""
    decided = {}
    for host_budget in (2**22, 2**19):
        model, optimizer = solved(host_budget)
        twin = Stack()
        reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
        assert train(model, optimizer, range(3)) == train(twin, reference, range(3))
        assert_alike(model, optimizer, twin, reference)
        compilation = training.training_compilation()
        decided[host_budget] = {decision.optimizer for decision in compilation.plan.decisions}
        assert compilation.plan.host_bytes <= host_budget
        assert (compilation.plan.disk_bytes > 0) == (Optimizer.DISK in decided[host_budget])
        torch._dynamo.reset()
    assert Optimizer.DISK not in decided[2**22] and Optimizer.DISK in decided[2**19]


def test_the_disk_is_weighed_only_where_the_host_may_be_short():
    costs = [cost(), cost()]
    everything = 2 * (50 + 30 + 20 + 40 + 20)  # activations, parameters, states, gradients
    assert with_disk(problem(costs, host_budget_bytes=everything - 1)).allow_disk_optimizer
    no_disk = dataclasses.replace(MACHINE, disk_bytes=0)
    for budget, machine in ((everything, MACHINE), (None, MACHINE), (1, no_disk)):
        assert not with_disk(problem(costs, host_budget_bytes=budget, machine=machine)).allow_disk_optimizer


def test_who_forbids_the_disk_is_told_what_would_do_without():
    model, _ = solved(2**19, allow=["recompute", "offload_activations", "host_params", "host_optimizer"])
    with pytest.raises(
        InfeasiblePlanError,
        match=r"Set memory_budget to at least \d+ or host_budget to at least \d+",
    ):
        model(X)


# -- faults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["full", "deleted"])
def test_a_disk_without_room_is_told_and_loses_nothing(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    folder = tmp_path / "states"
    folder.mkdir()
    model, optimizer, twin, reference = pair()
    compiled(model, offload_dir=str(folder))
    model(X).backward()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if fault == "full":
        monkeypatch.setattr("os.posix_fallocate", full)
    else:
        shutil.rmtree(folder)
    with pytest.raises(HostMemoryError, match="No space left" if fault == "full" else "No such file"):
        optimizer.step()
    assert not any(optimizer.state.values())
    monkeypatch.undo()
    folder.mkdir(exist_ok=True)
    assert train(model, optimizer, range(3)) == train(twin, reference, range(3))
    if fault == "deleted":  # what is there has no name, and stays
        shutil.rmtree(folder)
    assert train(model, optimizer, range(3, 5)) == train(twin, reference, range(3, 5))
    assert_alike(model, optimizer, twin, reference)
    assert fault == "deleted" or list(folder.iterdir()) == []


@pytest.mark.parametrize("overlap", [Overlap.NONE, Overlap.STEP])
def test_a_disk_that_fails_in_an_update_is_told_until_a_checkpoint_is_loaded(
    overlap: Overlap, monkeypatch: pytest.MonkeyPatch
):
    use_lanes(monkeypatch)
    model, optimizer, twin, reference = pair()
    plan = Plan(labels=labels(), decisions=(ON_DISK,) * len(labels()), schedule=Schedule(overlap=overlap))
    compiled(model, plan=plan)
    train(model, optimizer, range(2))
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    real, written = os.pwritev, itertools.count()

    def broken() -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    # Some windows of the states get there, and some do not.
    monkeypatch.setattr(os, "pwritev", lambda *args: real(*args) if next(written) < 3 else broken())
    with pytest.raises(OptimizerStateError, match=r"Input/output error.*last checkpoint"):
        train(model, optimizer, range(2, 3))
        optimizer.synchronize()
    monkeypatch.undo()
    use_lanes(monkeypatch)
    with pytest.raises(OptimizerStateError, match="0 groups of"):  # which changes nothing
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    for use in (model.state_dict, optimizer.state_dict, optimizer.step, lambda: model(X)):
        with pytest.raises(OptimizerStateError, match=r"update of a parameter.*Load the last checkpoint"):
            use()
    optimizer.load_state_dict(checkpoint[1])
    model.load_state_dict(checkpoint[0])
    train(model, optimizer, range(2, 4))
    train(twin, reference, range(4))
    optimizer.synchronize()
    assert_alike(model, optimizer, twin, reference)


def test_the_states_of_a_model_that_is_gone_take_no_disk_space(tmp_path: Path):
    model, optimizer, *_ = pair()
    compiled(model, offload_dir=str(tmp_path))
    train(model, optimizer, range(2))
    tier, moment = tier_of(model), optimizer.state[weight_of(model)]["exp_avg"]
    kept = moment.clone()
    del model, optimizer, _
    torch._dynamo.reset()
    assert torch.equal(moment, kept) and tier.in_use_bytes == -(-moment.nbytes // 4096) * 4096
    del moment
    assert tier.in_use_bytes == 0


def test_a_plan_for_a_disk_without_room_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path))  # the machine is measured anew
    monkeypatch.setattr("autohete_fx.machine.measure.measure_disk", lambda *args: 0.0)
    with pytest.raises(autohete_fx.PlanError, match=r"optimizer 'disk' for block .* had no room"):
        compiled(Stack())(X)


def test_the_disk_that_is_measured_is_that_of_the_states(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path / "cache"))
    measured: list[str | None] = []
    monkeypatch.setattr("autohete_fx.machine.measure.measure_disk", lambda directory: measured.append(directory) or 1e9)
    compiled(Stack(), offload_dir=str(tmp_path))(X)
    assert measured == [str(tmp_path)]
