"""Buffers that forward reads, writes to and reads again: backward must not find the new value where forward read the old one.

Compared with eager mode, because ``torch.compile`` alone is wrong here: PyTorch's partitioner too makes values of such a buffer
again in backward (2.11 to 2.13).
"""

import copy

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Plan
from tests.main_job import slow
from tests.thorough import thorough
from tests.training import assert_equal, copied

WIDTH = 32


class Layer(nn.Module):
    """Divides by what it has seen so far, as spectral norms and running statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.ones(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        before = self.seen[0].sigmoid()
        hidden = self.up(self.norm(x))
        with torch.no_grad():
            self.seen[0].mul_(0.5).add_(hidden.detach().square().mean(0).sqrt())
        return x + self.down(torch.relu(hidden * before / self.seen[0]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trained(model: nn.Module) -> list[Tensor]:
    """Losses, gradients, and at the end parameters and buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    seen = []
    for step in range(3):
        loss = model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        seen += [copied(loss), *(copied(p.grad) for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *map(copied, model.state_dict().values())]


@pytest.mark.parametrize(
    ("activations", "inner"),
    [
        (Activations.OFFLOAD, "eager"),
        *(slow(activations, "eager") for activations in Activations if activations is not Activations.OFFLOAD),
        # KEEP and RECOMPUTE in turns: for Inductor, offloading is the one with copies, and SELECTIVE a part of the other.
        thorough(None, "inductor"),
    ],
)
def test_backward_uses_what_forward_read(activations: Activations | None, inner: str):
    options = {"inner_backend": inner, "profile": "analytic"}
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    traced = {**options, "inner_backend": "eager"}  # blocks are the same, and no code is generated
    labels = autohete_fx.preview(model, torch.ones(8, WIDTH), options=traced)[0].plan.labels
    assert len(labels) > 3
    in_turns = (Activations.KEEP, Activations.RECOMPUTE) if activations is None else (activations,)
    decisions = tuple(BlockDecision(activations=in_turns[at % len(in_turns)]) for at in range(len(labels)))
    plan = Plan(labels=labels, decisions=decisions)
    torch._dynamo.reset()
    model.compile(backend="autohete", options={**options, "plan": plan})
    assert_equal(trained(model), trained(twin), bitwise=inner == "eager")
