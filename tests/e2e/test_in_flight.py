"""Several forward passes before a backward, as in a pipeline's stage: the plan counts them, and the budget holds."""

from typing import Any

import pytest
import torch
from torch import Tensor

import autohete_fx
from autohete_fx.planner.model.figures import waiting_bytes
from autohete_fx.runtime.meter import device_live_bytes
from tests import training
from tests.references import ReferenceAdamW, adamw
from tests.training import Model, Sizes, assert_equal, batch, copied, make

SIZES, IN_FLIGHT, STEPS = Sizes(batch=16), 3, 3


def train(model: Model, optimizer: Any, peaks: list[int]) -> list[Tensor]:
    """Steps of some forwards and then their backwards: losses, gradients, weights."""
    seen: list[Tensor] = []
    for step in range(STEPS):
        with autohete_fx.MemoryMeter("cpu") as meter:
            losses = []
            for micro_batch in range(IN_FLIGHT):
                torch.manual_seed(100 * step + micro_batch)
                losses.append(model(batch("cpu", step, micro_batch, SIZES)))
            for loss in losses:
                loss.backward()
            seen.extend(copied(loss) for loss in losses)
            losses.clear()
            seen.extend(copied(p.grad) for p in model.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(meter.peak_bytes)
    return [*seen, *map(copied, model.parameters())]


def run(options: dict[str, Any] | None) -> tuple[list[Tensor], int]:
    """Everything that must agree, and the peak above what was there before; ``options`` None: plain."""
    torch._dynamo.reset()
    foreign_bytes, peaks = device_live_bytes("cpu"), list[int]()
    model = make("cpu", SIZES)
    optimizer = adamw(model) if options is not None else ReferenceAdamW(model, frozenset())
    if options is None:
        model.compile(backend="aot_eager")
    else:
        model.compile(
            backend="autohete",
            options={"inner_backend": "eager", "profile": "analytic", "solver_time_limit_s": 2, **options},
        )
    return train(model, optimizer, peaks), max(peaks) - foreign_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_cache")
def test_a_budget_holds_with_several_micro_batches_in_flight():
    training.warm_up("cpu")
    expected, plain_peak = run(None)
    budget = plain_peak * 6 // 10
    run(
        {"micro_batches": IN_FLIGHT, "memory_budget": budget}
    )  # whose plan, of one in flight, no other is to find in the cache
    found, peak = run({"micro_batches": IN_FLIGHT, "in_flight": IN_FLIGHT, "memory_budget": budget})
    assert_equal(found, expected, bitwise=True)
    compilation = training.training_compilation()
    assert peak <= budget and compilation.plan.peak_bytes <= budget
    assert compilation.problem is not None
    waiting = [waiting_bytes(compilation.problem, *each) for each in enumerate(compilation.plan.decisions)]
    assert peak == pytest.approx(compilation.plan.peak_bytes, rel=0.15) and sum(waiting) > 0
