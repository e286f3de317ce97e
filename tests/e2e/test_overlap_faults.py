"""What goes wrong while updates are under way, and what users may then rely on."""

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.runtime.placement import placement_of
from tests.held_updates import OPTIMIZER_ON_HOST, STEP, Gate, Stack, Training, labels, weight_of

ALL_OFFLOADED = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
X = torch.ones(8, 128)


def compiled(model: nn.Module, decision: BlockDecision = ALL_OFFLOADED, **options: Any) -> nn.Module:
    plan = Plan(labels=labels(), decisions=(decision,) * len(labels()), schedule=STEP)
    model.compile(
        backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan, **options}
    )
    return model


# -- a model that goes ---------------------------------------------------------------------------------------------------


def test_a_backward_outlives_its_compiled_model(gate: Gate):
    gradients = []
    for backend in ("autohete", "aot_eager"):
        model = Stack()
        if backend == "autohete":
            compiled(model)
        else:
            model.compile(backend=backend)
        params, loss = list(model.parameters()), model(X)
        del model
        torch._dynamo.reset()
        gc.collect()
        loss.backward()
        gradients.append([p.grad for p in params])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("behind", ["forward", "step"])
def test_a_model_dropped_in_mid_flight_leaves_nothing(behind: str, gate: Gate):
    state = Training(gate, ALL_OFFLOADED)
    tier = placement_of(weight_of(state.model)).tier  # type: ignore[union-attr]
    opening = gate.open_soon()
    if behind == "forward":
        state.model(X)
    del state
    torch._dynamo.reset()
    gc.collect()
    opening.join()
    deadline = time.monotonic() + 20
    while tier.in_use_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert tier.in_use_bytes == 0
    assert not [t for t in threading.enumerate() if t.name.startswith("autohete-") and t.is_alive()]


class Aliased(Stack):
    """A buffer that is a view of a weight is read before the weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("head", self.layers[3][0].weight.detach()[:64])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (x @ self.get_buffer("head").T).mean())


@pytest.mark.parametrize("given", ["buffer", "input"])
def test_compiled_code_waits_for_a_view_of_a_parameter(given: str, gate: Gate):
    losses = []
    for name in ("ours", "twin"):
        model: nn.Module = Aliased() if given == "buffer" else Stack()
        views = [model.layers[3][0].weight.detach()[:8], X]  # type: ignore[index]
        if name == "ours":
            optimizer: torch.optim.Optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
            compiled(model, OPTIMIZER_ON_HOST)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
            model.compile(backend="aot_eager")
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
