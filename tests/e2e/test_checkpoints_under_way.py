"""Checkpoints of every kind taken and loaded while updates are held: what they hold is what the updates will give."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Plan
from tests.held_updates import ALL_ON_HOST, STEP, Gate, Stack, Training, labels

X = torch.ones(8, 128)


def through_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Callable[[Any, Any], None]:
    """Saved by ``torch.distributed.checkpoint`` in one process; returns what loads it into another model and optimizer."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    return load


def through_files(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Callable[[Any, Any], None]:
    """Weights by safetensors, states by ``torch.save``."""
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict(safetensors.load_file(folder / "model.safetensors"))
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))

    return load


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Tensor]:
    losses = []
    for step in range(steps):
        loss = model(X * (1 + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def results(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")
@pytest.mark.parametrize("how", [through_dcp, through_files])
def test_a_checkpoint_of_held_updates_resumes_bitwise(how: Any, gate: Gate, tmp_path: Path):
    """Saved by ours with updates under way; loaded by ours with others under way, and by PyTorch's."""
    state = Training(gate)
    timer = gate.open_soon()
    load = how(state.model, state.optimizer, tmp_path)
    assert gate.opened.is_set()
    timer.join()

    into = Training(gate)
    timer = gate.open_soon()
    load(into.model, into.optimizer)
    timer.join()
    fresh = Stack()
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-2, fused=True)
    load(fresh, optimizer)
    expected = train(state.twin, state.reference), results(state.twin, state.reference)
    for loaded in ((into.model, into.optimizer), (state.model, state.optimizer), (fresh, optimizer)):
        found = train(*loaded), results(*loaded)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_masters_go_through_torchs_optimizer_and_back(gate: Gate):
    """bf16 weights: PyTorch's AdamW goes on from the states of held updates for a step, and gives them back."""
    sides = []
    for overlap in ("step", None):
        gate.opened.set()
        model = Stack(width=256).bfloat16()
        ours = autohete_fx.AdamW(model.parameters(), lr=1e-2, overlap=overlap)
        plan = Plan(labels=labels(), decisions=(ALL_ON_HOST,) * len(labels()), schedule=STEP)
        model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan})
        optimizer: torch.optim.Optimizer = ours
        for step in range(6):
            model(torch.full((8, 256), 1.0 + step).bfloat16()).backward()
            if overlap:
                ours.synchronize()
                gate.opened.clear()
            optimizer.step()
            gate.open_soon()
            if step == 2:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                optimizer.load_state_dict(ours.state_dict())
            elif step == 3:
                assert all("master" in entry for entry in optimizer.state_dict()["state"].values())
                ours.load_state_dict(optimizer.state_dict())
                optimizer = ours
            optimizer.zero_grad()
        sides.append(results(model, ours))
    torch.testing.assert_close(*sides, rtol=0, atol=0)
