"""What goes wrong while updates are under way, and what users may then rely on."""

import contextlib
import copy
import dataclasses
import errno
import gc
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, HostMemoryError, Optimizer, OptimizerStateError, Params, Plan
from autohete_fx.runtime.pending import calls
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import placement_of
from autohete_fx.runtime.tiers.host import HostTier
from examples.benchmarks.emulated import Emulation, Speeds
from tests.held_updates import (
    ALL_ON_HOST,
    OPTIMIZER_ON_HOST,
    STEP,
    Cycle,
    Gate,
    Stack,
    Training,
    collecting_all_the_time,
    labels,
    tier_of,
    weight_of,
)
from tests.main_job import slow

ALL_OFFLOADED = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
X = torch.ones(8, 128)


def compiled(model: nn.Module, decision: BlockDecision = ALL_OFFLOADED, **options: Any) -> nn.Module:
    plan = Plan(labels=labels(), decisions=(decision,) * len(labels()), schedule=STEP)
    model.compile(
        backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan, **options}
    )
    return model


# -- a model that goes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_backward_outlives_its_compiled_model(gate: Gate):
    gradients = []
    for is_ours in (True, False):
        model: nn.Module = compiled(Stack()) if is_ours else Stack()
        params, loss = list(model.parameters()), model(X)
        del model
        torch._dynamo.reset()
        gc.collect()
        loss.backward()
        gradients.append([p.grad for p in params])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("states", [Optimizer.HOST, slow(Optimizer.DISK)], ids=str)
@pytest.mark.parametrize("behind", [slow("forward"), "step"])
def test_a_model_dropped_in_mid_flight_leaves_nothing(behind: str, states: Optimizer, gate: Gate):
    others = set(threading.enumerate())  # of models that other tests left alive
    state = Training(gate, dataclasses.replace(ALL_OFFLOADED, optimizer=states))
    placement = placement_of(weight_of(state.model))
    assert placement is not None and (placement.disk is not None) == (states is Optimizer.DISK)
    tiers = [tier for tier in (placement.tier, placement.disk) if tier is not None]
    opening = gate.open_soon()
    if behind == "forward":
        state.model(X)
    del state, placement
    torch._dynamo.reset()
    gc.collect()
    opening.join()
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("autohete-"):
            thread.join(20)
            assert not thread.is_alive()
    gc.collect()
    assert [tier.in_use_bytes for tier in tiers] == [0] * len(tiers)


class Aliased(Stack):
    """A buffer that is a view of a weight is read before the weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("head", self.layers[3][0].weight.detach()[:64])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x @ self.get_buffer("head").T).mean())


@pytest.mark.parametrize("given", ["buffer", slow("input")])
def test_compiled_code_waits_for_a_view_of_a_parameter(given: str, gate: Gate):
    losses = []
    for name in ("ours", "twin"):
        model: Any = Aliased() if given == "buffer" else Stack()
        views = [model.layers[3][0].weight.detach()[:8], X]
        if name == "ours":
            optimizer: torch.optim.Optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
            compiled(model, OPTIMIZER_ON_HOST)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        gate.opened.set()
        for _ in range(4):
            loss = model(views[0] if given == "input" else X)
            loss.backward()
            losses.append(loss.item())
            gate.opened.clear()
            optimizer.step()
            optimizer.zero_grad()
            gate.open_soon()
    assert losses[:4] == losses[4:]


# -- host memory that runs out ------------------------------------------------------------------------------------------


class Disk:
    """Of the host tier: it can be full."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        allocate: Callable[..., None] = os.posix_fallocate

        def refusing(*args: Any) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            allocate(*args)

        patch.setattr("os.posix_fallocate", refusing)


def test_host_memory_that_is_refused_is_told_before_the_first_step(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """For all that the plan counts, whether anything needs it yet or not; and when there is room the model trains."""
    gate.opened.set()
    disk, model, twin = Disk(monkeypatch), compiled(Stack(), OPTIMIZER_ON_HOST, offload_dir=str(tmp_path)), Stack()
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    disk.is_full = True
    with pytest.raises(HostMemoryError, match=r"0 bytes of .* could be reserved.*No space left"):
        model(X)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    disk.is_full = False
    for module, each in ((model, optimizer), (twin, reference)):
        for _ in range(2):
            module(X).backward()
            each.step()
            each.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("work", ["forward", slow("backward"), slow("step")])
@pytest.mark.parametrize("fault", ["full", slow("deleted")])
def test_host_memory_that_is_refused_is_told_and_loses_nothing(
    work: str, fault: str, gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """In the middle of training, with updates under way: the step can be taken again when there is room."""
    folder, disk = tmp_path / "homes", Disk(monkeypatch)
    rows = (
        X.repeat(32, 1) if work == "forward" else X
    )  # so many that activations leave the device, or so few that none does
    folder.mkdir()
    monkeypatch.setattr("autohete_fx.runtime.tiers.host._FILE_GROWTH_BYTES", 1)  # every home a file of its own
    monkeypatch.setattr(
        HostTier, "reserve", lambda tier, num_bytes: None
    )  # as where more is needed than the plan has counted
    model, twin = compiled(Stack(), offload_dir=str(folder)), Stack()
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = model(rows * (1 + step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    @contextlib.contextmanager
    def without_room(at: str) -> Iterator[None]:
        if at != work:
            yield
            return
        tier = tier_of(model)
        tier.trim()
        disk.is_full = fault == "full"
        if fault == "deleted":
            shutil.rmtree(folder)
        with pytest.raises(HostMemoryError, match="No space left" if fault == "full" else "No such file"):
            yield
        disk.is_full = False
        folder.mkdir(exist_ok=True)

    if work == "step":
        loss = model(rows)
        loss.backward()
        with without_room("step"):  # the first one makes the states
            optimizer.step()
        assert not any(optimizer.state.values())
    else:
        train(model, optimizer, range(2))
        optimizer.zero_grad()
        model(rows * 3).backward()
        optimizer.synchronize()
        gate.opened.clear()
        optimizer.step()
        optimizer.zero_grad()
        gate.open_soon()
        with without_room("forward"):
            loss = model(rows * 4)
        if work == "backward":
            with without_room("backward"):
                loss.backward()
    steps = range(0 if work == "step" else 3, 5)
    found = train(model, optimizer, steps)
    if work != "step":
        train(twin, reference, range(3))
    assert found == train(twin, reference, steps)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


def fail(*args: object) -> None:
    raise OSError("the host is out of luck")


@pytest.mark.parametrize("decision", [slow(OPTIMIZER_ON_HOST), ALL_ON_HOST], ids=["device", "host"])
def test_a_failed_update_is_told_by_whoever_needs_it_and_loading_recovers(
    decision: BlockDecision, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    state = Training(gate, decision)
    gate.opened.set()
    state.optimizer.synchronize()
    checkpoint = copy.deepcopy((state.model.state_dict(), state.optimizer.state_dict()))

    with monkeypatch.context() as patch:
        patch.setattr("autohete_fx.optim.updates._HostUpdate.run", fail)
        gate.opened.clear()
        state.step()
        timer = gate.open_soon()
        for use in (
            lambda: state.model(torch.ones(8, 128)),
            lambda: weight_of(state.model) * 2,
            lambda: state.model.state_dict(),
            lambda: state.optimizer.state_dict(),
            lambda: state.optimizer.synchronize(),
        ):
            with pytest.raises(OptimizerStateError, match=r"out of luck.*Load the last checkpoint"):
                use()
        timer.join()
    state.optimizer.load_state_dict(checkpoint[1])
    state.model.load_state_dict(checkpoint[0])
    for name, value in state.model.state_dict().items():
        assert torch.equal(value, checkpoint[0][name])
    state.model(torch.ones(8, 128)).backward()
    state.optimizer.step()
    state.optimizer.synchronize()


def test_a_failed_update_that_its_step_waited_for_is_told_until_a_checkpoint_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
):
    with Emulation(
        Speeds(forward_s=1e-3, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, update_params_per_s=1e9)
    ).running() as it:
        model = Stack()
        optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2, overlap=None)
        compiled(model, OPTIMIZER_ON_HOST, **it.options)

        def step() -> None:
            model(X).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with monkeypatch.context() as patch:
            patch.setattr("autohete_fx.optim.updates._HostUpdate.run", fail)
            with pytest.raises(OptimizerStateError, match=r"out of luck.*Load the last checkpoint"):
                step()
        for use in (model.state_dict, optimizer.state_dict, optimizer.step, lambda: model(X)):
            with pytest.raises(OptimizerStateError, match=r"out of luck.*Load the last checkpoint"):
                use()
        optimizer.load_state_dict(checkpoint[1])
        model.load_state_dict(checkpoint[0])
        torch.testing.assert_close(model.state_dict(), checkpoint[0], rtol=0, atol=0)
        step()


# -- collections of garbage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["callback", slow("__del__"), slow("finalize")])
def test_what_the_garbage_collector_runs_is_no_part_of_a_call(
    kind: str, gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """A collection may begin between the entry of a compiled function and its code, where Dynamo looks at every frame."""
    state = Training(gate)
    within: list[bool] = []
    waits: list[str] = []

    def note(*_: object) -> None:
        sys._getframe()  # which Dynamo cannot trace
        within.append(calls.is_within_call())

    class Closed(Cycle):
        def __del__(self) -> None:
            note()

    def on_collection() -> None:
        if kind == "callback":
            note()
        elif kind == "__del__":
            Closed()
        else:
            weakref.finalize(Cycle(), note)

    real = Updates.wait_all

    def wait_all(updates: Updates, but: Collection[int] = (), *, on_cpu: bool = False) -> None:
        waits.extend(["for all"] * (not but))
        real(updates, but, on_cpu=on_cpu)

    monkeypatch.setattr(Updates, "wait_all", wait_all)
    gate.open_soon()
    with collecting_all_the_time(on_collection):
        state.model(torch.ones(8, 128))
    assert any(within) and waits and not caplog.text
    state.hold()
    waits.clear()
    gate.open_soon()
    state.model(torch.ones(8, 128))
    assert not waits, "calls of the function no longer overlap with updates"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_failed_update_is_told_where_nobody_heard_its_error(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    """What Python drops, because a callback of a weak reference raised it."""
    state = Training(gate)
    gate.opened.set()
    references: list[weakref.ref[Cycle]] = []

    def on_collection() -> None:
        references.append(weakref.ref(Cycle(), lambda reference: None))

    monkeypatch.setattr("autohete_fx.optim.updates._HostUpdate.run", fail)
    state.step()
    with (
        collecting_all_the_time(on_collection),
        pytest.raises(OptimizerStateError, match=r"out of luck.*Load the last checkpoint"),
    ):
        state.model(torch.ones(8, 128))
    assert not calls.is_within_call()
