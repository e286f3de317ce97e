"""The key of a graph: other operations are another graph, wherever they stand in it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from autohete_fx.compiler.keys import described_code


class Checkpointed(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.activation = activation

    def body(self, x: Tensor) -> Tensor:
        return self.activation(self.inner(x))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


def described(activation: Callable[[Tensor], Tensor]) -> tuple[str, Any]:
    """Code of the graph itself, and all that tells it from others."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: object) -> fx.GraphModule:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(Checkpointed(activation), backend=keep)(torch.ones(2, 4))
    [gm] = graphs
    return gm.code, described_code(gm)


def test_checkpoints_of_other_operations_are_told_apart():
    (code, first), (other_code, other), (_, again) = map(described, (torch.relu, torch.tanh, torch.relu))
    assert code == other_code, "a graph does not show what its subgraphs do"
    assert first == again != other
