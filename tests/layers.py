"""A stack of layers with or without a graph break in the middle, and how it is trained."""

from typing import Any

import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import BlockDecision, Plan


class Layers(nn.Module):
    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        if self.broken:
            torch._dynamo.graph_break()  # not within a loop: Dynamo would run the whole frame in eager mode
        for layer in self.layers[2:]:
            x = layer(x)
        return x.square().mean()


def train(model: nn.Module, batch: int = 256, steps: int = 2, optimizer: Any = None) -> list[Tensor]:
    optimizer = optimizer or autohete_fx.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(steps):
        loss = model(torch.randn(batch, 128, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def make(broken: bool = False) -> Layers:
    torch.manual_seed(0)
    return Layers(broken)


def plain(broken: bool = False, **how: Any) -> list[Tensor]:
    """What eager code gives, which on a CPU computes bit by bit as graphs do node by node."""
    model = make(broken)
    result = train(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), **how)
    torch._dynamo.reset()
    return result


EAGER: dict[str, Any] = {"inner_backend": "eager", "profile": "analytic"}


def plan_of(decision: BlockDecision) -> Plan:
    """The same decision for every block of `Layers`."""
    labels = autohete_fx.preview(make(), torch.randn(256, 128), options=EAGER)[0].plan.labels
    torch._dynamo.reset()
    return Plan(labels=labels, decisions=(decision,) * len(labels))


def assert_bitwise(given: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
