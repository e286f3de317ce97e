"""Models that no job can train are told why."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autohete_fx.cluster.model.batches import batch_of
from autohete_fx.cluster.model.layers import map_layers
from autohete_fx.errors import ClusterError


class Skips(nn.Module):
    """A hidden state goes around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first) + first)


class Collects(nn.Module):
    """The loss reads every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x = layer(x)
            total = total + x.sum()
        return total


class Narrows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Skips, "from layer 1 to layer 3"),
        (Collects, "past the layers between"),
        (Narrows, "Expected were equal shapes"),
        (Branches, "do not depend on values"),
        (lambda: nn.Linear(4, 4), "no list of layers"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            "'1' of Sequential is a BatchNorm1d, whose statistics",
        ),
        (
            lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)),
            "'0' of Sequential has sparse=True",
        ),
        (lambda: 3, "build_model returned int"),
    ],
)
def test_a_model_that_cannot_be_cut_is_told_why(model: Callable[[], nn.Module], words: str):
    with pytest.raises(ClusterError, match=words):
        map_layers(model, batch_of(torch.zeros(2, 4)))
