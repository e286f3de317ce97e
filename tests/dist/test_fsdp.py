"""``fully_shard``: FSDP decides where its parameters are, and no plan of ours does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from tests.dist import ranks
from tests.layers import EAGER


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def sharded(is_by_layer: bool, **how: Any) -> Stack:
    """Compiled whole and sharded whole, or both layer by layer, as FSDP advises; only sharded, where no backend is named."""
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack()
    for layer in model.layers if is_by_layer else ():
        if how:
            layer.compile(**how)
        fully_shard(layer)
    if how and not is_by_layer:
        model.compile(**how)
    return fully_shard(model)


def train(model: nn.Module, **ours: Any) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if ours:
        optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2, **ours)
    seen, rank = [], torch.distributed.get_rank()
    for step in range(3):
        loss = model(torch.randn(1024, 128, generator=torch.Generator().manual_seed(10 * step + rank)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    return [*seen, *(p.detach().full_tensor().clone() for p in model.parameters())]


def answers(is_by_layer: bool) -> dict[str, Any]:
    """On one rank: what comes of plans that the solver makes, and of given ones."""
    expected = train(sharded(is_by_layer))

    def bitwise(**options: Any) -> bool:
        given = train(sharded(is_by_layer, backend="autohete", options={**EAGER, **options}))
        return all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))

    found: dict[str, Any] = {"free": bitwise()}
    labels = autohete_fx.compilations()[-1].plan.labels
    peak = max(c.plan.peak_bytes for c in autohete_fx.compilations() if c.training)
    # One layer by itself has next to nothing that it could do without.
    found["tight"] = bitwise(memory_budget=2 * peak if is_by_layer else peak * 7 // 8)
    tight = autohete_fx.compilations()[-1]
    found["moves"] = any(d != BlockDecision(activations=d.activations) for d in tight.plan.decisions)
    found["notes"] = tight.notes

    def given(decision: BlockDecision) -> Plan:
        return Plan(labels=labels, decisions=(decision,) * len(labels))

    found["recompute"] = bitwise(plan=given(BlockDecision(activations=Activations.RECOMPUTE)))
    decisions = {
        "params": BlockDecision(params=Params.HOST),
        "optimizer": BlockDecision(optimizer=Optimizer.HOST),
    }
    attempts: dict[str, Callable[[], object]] = {
        name: lambda decision=decision: bitwise(plan=given(decision)) for name, decision in decisions.items()
    }
    attempts["place"] = lambda: autohete_fx.place(sharded(is_by_layer, backend="autohete"), "cpu")
    for name, attempt in attempts.items():
        try:
            found[name] = attempt() and "went on"
        except autohete_fx.AutoHeteError as error:
            found[name] = f"{type(error).__name__}: {error}"
    seen = train(sharded(is_by_layer, backend="autohete", options=EAGER), max_grad_norm=1e9)
    found["AdamW"] = max(float((a - b).abs().max()) for a, b in zip(seen, expected, strict=True))
    return found


def check(found: dict[str, Any]) -> None:
    assert found["free"] and found["tight"] and found["recompute"] and not found["moves"]
    (note,) = found["notes"]
    assert note.startswith("FSDP (fully_shard) gathers these parameters")
    for name in ("params", "optimizer"):
        assert found[name].startswith("PlanError: the plan moves parameters or optimizer states of block"), found[name]
    assert found["AdamW"] == 0.0
    assert found["place"].startswith("OptionError: the parameter layers.0.up.weight is a DTensor")


def test_a_model_that_fsdp_shards_whole_trains_exactly_and_is_not_moved(tmp_path: Path):
    (found,) = ranks.run("tests.dist.test_fsdp.answers", tmp_path, False, num_ranks=1)
    check(found)


@pytest.mark.slow
def test_layers_that_fsdp_shards_one_by_one_on_two_ranks_likewise(tmp_path: Path):
    for found in ranks.run("tests.dist.test_fsdp.answers", tmp_path, True, num_ranks=2):
        check(found)
