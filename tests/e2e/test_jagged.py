"""A model of jagged tensors, whose rows differ in length: its plans count the tokens that there are."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autohete_fx
from tests import training as job
from tests.steps import Steps, equal_to_plain


@pytest.fixture(autouse=True)
def _prepared() -> Iterator[None]:
    job.warm_up("cpu")
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """Of operations that jagged tensors have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Jagged(job.Model):
    """Called with a batch of equal rows, it makes four of them that differ, the first of so many tokens as the batch has rows."""

    def __init__(self, sizes: job.Sizes) -> None:
        super().__init__(sizes)
        self.layers = nn.ModuleList(Layer(sizes.width) for _ in range(sizes.layers))

    def __call__(self, tokens: Tensor) -> Tensor:
        rows = tokens.flatten().tensor_split((tokens.shape[0], 60, 80))  # the shortest one grows, too
        return super().__call__(torch.nested.nested_tensor(list(rows), layout=torch.jagged))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).values().float(), tokens.values())


def test_more_tokens_than_were_planned_for_are_planned_again():
    budget, num_compiled = 13 * 2**19, list[int]()

    def story(steps: Steps) -> None:
        steps.compile(memory_budget=budget)
        before = autohete_fx.compilations()
        for step, batch in enumerate((1, 1, 2, 4, 3, 4)):
            steps.train(step, batch=batch)
            num_compiled.append(sum(each not in before for each in autohete_fx.compilations()))

    ours = equal_to_plain(story, Jagged)
    assert max(ours.peaks) <= budget, ours.peaks
    assert num_compiled[6:] == [1, 1, 2, 3, 3, 3]
