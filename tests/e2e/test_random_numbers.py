"""Random numbers that depend on nothing in the graph, as of stochastic depth: every draw is that of eager mode."""

import copy

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from tests.main_job import slow
from tests.training import assert_equal, copied

WIDTH = 128


class Layer(nn.Module):
    """Drops its own part of some rows, and elements of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        is_kept = (torch.rand(len(x), 1, device=x.device) + 0.5).floor()
        hidden = torch.relu(self.up(x)) * torch.bernoulli(torch.full((2 * WIDTH,), 0.8, device=x.device))
        return x + is_kept * nn.functional.dropout(self.down(hidden), 0.2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


RECOMPUTE = BlockDecision(activations=Activations.RECOMPUTE)
OFFLOAD = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
SELECTIVE = BlockDecision(activations=Activations.SELECTIVE, params=Params.HOST)
PLANS = {
    "some recomputed": (BlockDecision(), RECOMPUTE),
    "all kinds": (OFFLOAD, SELECTIVE, RECOMPUTE, BlockDecision()),
    "all recomputed": (RECOMPUTE,),
}


def trained(model: nn.Module) -> list[Tensor]:
    """Losses, gradients, and parameters at the end; and what is drawn behind each step."""
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for step in range(4):
        torch.manual_seed(step)
        loss = model(torch.randn(16, WIDTH))
        loss.backward()
        seen += [copied(loss), *(copied(p.grad) for p in model.parameters() if p.grad is not None), torch.rand(1)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *map(copied, model.parameters())]


@pytest.mark.parametrize("name", ["all kinds", slow("some recomputed"), slow("all recomputed")])
def test_every_draw_is_that_of_eager_mode(name: str):
    options = {"inner_backend": "eager", "profile": "analytic"}
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    labels = autohete_fx.preview(model, torch.ones(16, WIDTH), options=options)[0].plan.labels
    assert len(labels) >= 5
    decisions = [PLANS[name][i % len(PLANS[name])] for i in range(len(labels))]
    torch._dynamo.reset()
    model.compile(backend="autohete", options={**options, "plan": Plan(labels=labels, decisions=tuple(decisions))})
    assert_equal(trained(model), trained(twin), bitwise=True)
