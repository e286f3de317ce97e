"""Models of which an optimizer of ours has a part, and another one or none the rest."""

from typing import Any

import pytest
import torch
from torch import nn

import autohete_fx
from tests import layers
from tests.references import copied

REST = ("layers.1.0.weight",)


def optimizers(model: nn.Module, rest: tuple[str, ...], kind: Any) -> list[torch.optim.Optimizer]:
    parts = [p for name, p in model.named_parameters() if name not in rest]
    others = [p for name, p in model.named_parameters() if name in rest]
    plain = [torch.optim.AdamW(others, lr=1e-3, fused=True)] if others else []
    how = {} if kind is autohete_fx.AdamW else {"fused": True}
    return [kind(parts, lr=1e-2, **how), *plain]


def train(budget: int | None) -> list[torch.Tensor]:
    """All values of four steps; without a budget eager code's."""
    torch._dynamo.reset()
    model = layers.make()
    made = optimizers(model, REST, torch.optim.AdamW if budget is None else autohete_fx.AdamW)
    if budget is not None:
        model.compile(backend="autohete", options={**layers.EAGER, "memory_budget": budget})
    seen = []
    for step in range(4):
        loss = model(torch.randn(256, 128, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        seen += [copied(loss), *(copied(p.grad) for p in model.parameters() if p.grad is not None)]
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
    states = [
        optimizer.state[p][name] for optimizer in made for p in optimizer.state for name in ("exp_avg", "exp_avg_sq")
    ]
    return [*seen, *map(copied, model.parameters()), *map(copied, states)]


def refusal(rest: tuple[str, ...]) -> autohete_fx.InfeasiblePlanError:
    torch._dynamo.reset()
    model = layers.make()
    made = optimizers(model, rest, autohete_fx.AdamW)
    with pytest.raises(autohete_fx.InfeasiblePlanError) as refused:
        autohete_fx.preview(model, torch.randn(256, 128), options={**layers.EAGER, "memory_budget": "64KiB"})
    assert made and refused.value.smallest_budget_bytes is not None
    return refused.value


def test_what_another_optimizer_updates_stays_and_stops_no_others():
    whole, part = refusal(()), refusal(REST)
    matrix = 128 * 128 * 4
    least, named = whole.smallest_budget_bytes, part.smallest_budget_bytes
    assert least is not None and named is not None
    assert named <= least + 5 * matrix, "its weight, gradient and two states, and what collects it"
    layers.assert_bitwise(train(named), train(None))
    moved = autohete_fx.compilations()[-1].moved
    assert moved and REST[0] not in moved


def test_where_most_have_no_optimizer_of_ours_the_error_names_them():
    rest = tuple(f"layers.{at}.0.weight" for at in range(3))
    message = str(refusal(rest))
    assert "holds layers.0.0.weight and 2 others, so no optimizer states may leave the device, where 384 KiB" in message
