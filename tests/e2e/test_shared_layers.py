"""Layers that are called several times with the same weights, as ALBERT's: what a budget buys, and that it is kept."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import autohete_fx
from autohete_fx.runtime.meter import device_live_bytes
from tests import training
from tests.thorough import thorough

pytestmark = pytest.mark.slow
WIDTH = 192


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class CalledFourTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, seed: Tensor) -> Tensor:
        x = seed
        for _ in range(4):
            x = self.block(x)
        return self.head(x).square().mean()


class Albert(nn.Module):
    """The loss alone is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = hf.AlbertForMaskedLM(
            hf.AlbertConfig(
                vocab_size=256,
                embedding_size=32,
                hidden_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=512,
                max_position_embeddings=128,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, labels=tokens).loss


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": CalledFourTimes, "albert": Albert}


def batch(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if name == "mlp":
        return torch.randn(1024, WIDTH, generator=generator)
    return torch.randint(3, 256, (8, 64), generator=generator)


def train(name: str, inner: str, options: dict[str, Any] | None = None) -> tuple[list[Tensor], int]:
    """Losses and parameters of three steps, and the peak of all of them; without options those of Inductor or eager code."""
    gc.collect()
    foreign_bytes, peak, seen = device_live_bytes("cpu"), 0, []
    torch.manual_seed(0)
    model = MODELS[name]()
    kind: Any = torch.optim.AdamW if options is None else autohete_fx.AdamW
    optimizer = kind(model.parameters(), lr=1e-3, **({"fused": True} if options is None else {}))
    if options is None and inner == "inductor":
        model.compile(backend="inductor")
    elif options is not None:
        ours = {"profile": "analytic", "solver_time_limit_s": 2, "inner_backend": inner, **options}
        model.compile(backend="autohete", options=ours)
    for step in range(3):
        torch.manual_seed(step)
        with autohete_fx.MemoryMeter("cpu") as meter:
            loss = model(batch(name, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = max(peak, meter.peak_bytes)
        seen.append(training.copied(loss))
        del loss
    seen.extend(map(training.copied, model.parameters()))
    torch._dynamo.reset()
    return seen, peak - foreign_bytes


@pytest.mark.parametrize(("name", "inner"), [thorough("mlp", "inductor"), ("albert", "eager")], ids=MODELS)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_60_percent_of_plains_peak_are_enough(name: str, inner: str):
    training.warm_up("cpu")
    expected, plain_peak = train(name, inner)
    budget = int(0.6 * plain_peak)
    given, peak = train(name, inner, {"memory_budget": budget})
    assert peak <= budget
    training.assert_equal(given, expected, bitwise=False)


def test_a_named_budget_is_kept():
    """Node by node; test_lifecycle.py has budgets that compiled code names."""
    training.warm_up("cpu")
    expected, plain_peak = train("mlp", "eager")
    with pytest.raises(autohete_fx.InfeasiblePlanError) as caught:
        train("mlp", "eager", {"memory_budget": plain_peak // 10})
    named = caught.value.smallest_budget_bytes
    del caught
    torch._dynamo.reset()
    given, peak = train("mlp", "eager", {"memory_budget": named})
    assert named is not None and peak <= named < 0.6 * plain_peak
    training.assert_equal(given, expected, bitwise=True)
