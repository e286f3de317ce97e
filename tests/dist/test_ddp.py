"""DistributedDataParallel around a compiled model, and compiled itself: one graph, which the budget counts whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autohete_fx
from autohete_fx.compiler.problem import note_on_reduction, reducing_after_backward
from autohete_fx.ir import Overlap, Schedule
from tests.dist import ranks
from tests.layers import EAGER
from tests.planner_problems import cost, problem

BUDGET = 20 * 2**20
OPTIONS = {**EAGER, "memory_budget": BUDGET, "solver_time_limit_s": 1}


class Wide(nn.Module):
    """Four buckets of gradients, of which Dynamo would make four graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def train(where: str, optimizer_of: Callable[..., Any], **how: Any) -> list[Tensor]:
    """Losses and parameters of a few steps, each rank with its own batches."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Wide()
    if where == "inside":
        model.compile(**how)
    called = DistributedDataParallel(model, bucket_cap_mb=1)
    if where == "outside":
        called = torch.compile(called, **how)
    optimizer = optimizer_of(model.parameters(), lr=1e-2)
    seen, rank = [], torch.distributed.get_rank()
    for step in range(3):
        loss = called(torch.randn(256, 512, generator=torch.Generator().manual_seed(10 * step + rank)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def plain(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


def both_ways() -> list[dict[str, Any]]:
    """On one rank: what training in and around DDP gives beside plain training."""
    found = []
    with torch._dynamo.config.patch(optimize_ddp=False):
        expected = train("inside", plain, backend="aot_eager")
    autohete_fx.preview(
        Wide(), torch.randn(256, 512), options=EAGER
    )  # times the machine, which takes scratch of its own
    for where in ("inside", "outside"):
        num_before = len(autohete_fx.compilations())
        with autohete_fx.MemoryMeter("cpu") as meter:
            others = meter.start_bytes
            given = train(where, autohete_fx.AdamW, backend="autohete", options=OPTIONS)
        compilations = [c for c in autohete_fx.compilations()[num_before:] if c.training]
        found.append(
            {
                "bitwise": all(torch.equal(a, b) for a, b in zip(given, expected, strict=True)),
                "sum": float(sum(p.double().sum() for p in given[3:])),
                "peak": meter.peak_bytes - others,
                "notes": [note for c in compilations for note in c.notes],
                "labels": [c.plan.labels for c in compilations],
                "moved": any(
                    d.params.value == "host" or d.optimizer.value == "host" for d in compilations[0].plan.decisions
                ),
            }
        )
    return found


@pytest.mark.slow
def test_ddp_trains_as_before_within_the_budget_from_one_graph(tmp_path: Path):
    found = ranks.run("tests.dist.test_ddp.both_ways", tmp_path)
    for one in (result for results in found for result in results):
        assert one["bitwise"] and one["moved"] and one["peak"] <= BUDGET
        assert len(one["labels"]) == 1 and len(one["labels"][0]) == 6
        (note,) = one["notes"]
        assert "buckets, 4.01 MiB, are counted on the device; the graph is compiled whole" in note
    assert len({result["sum"] for results in found for result in results}) == 1


def test_no_update_starts_and_no_norm_is_taken_before_gradients_are_reduced():
    given = problem([cost()], schedule=Schedule(overlap=Overlap.BACKWARD, takes_norms=True), clips_gradients=True)
    assert reducing_after_backward(given).schedule == Schedule(overlap=Overlap.STEP)
    parameter = nn.Parameter(torch.zeros(4))
    for overlap in ("backward", "step"):
        optimizer = autohete_fx.AdamW([parameter], overlap=overlap)
        note = note_on_reduction([parameter], 16)
        assert ("updates start at optimizer.step() in spite" in note) == (optimizer.overlap is Overlap.BACKWARD)
