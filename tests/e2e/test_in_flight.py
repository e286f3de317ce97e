"""Several forward passes before a backward, as in a pipeline's stage: the plan counts them, and the budget holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autohete_fx
from autohete_fx.planner.model.figures import waiting_bytes
from autohete_fx.runtime.meter import device_live_bytes
from tests import layers, training
from tests.main_job import slow
from tests.references import ReferenceAdamW, adamw
from tests.training import Model, Sizes, assert_equal, batch, copied, make

SIZES, IN_FLIGHT, STEPS = Sizes(layers=2, batch=16), 3, 3


Forward = Callable[[int], Tensor]
"""Gives the loss of a micro-batch."""


def one_by_one(forward: Forward) -> list[Tensor]:
    """Some forwards and then their backwards."""
    losses = [forward(micro_batch) for micro_batch in range(IN_FLIGHT)]
    for loss in losses:
        loss.backward()
    return losses


def in_one(forward: Forward) -> list[Tensor]:
    """Some forwards and then one backward of all, as contrastive losses have it."""
    loss = torch.stack([forward(micro_batch) for micro_batch in range(IN_FLIGHT)]).sum()
    loss.backward()
    return [loss]


def in_turns(forward: Forward) -> list[Tensor]:
    """As in the first stage of a pipeline: when a forward runs, others wait for their backward."""
    losses = [forward(0), forward(1)]
    for micro_batch in range(2, 2 + IN_FLIGHT):
        losses[-2].backward()
        losses.append(forward(micro_batch))
    losses[-2].backward()
    losses[-1].backward()
    return losses


def train(
    model: Model, optimizer: Any, peaks: list[int], passes: Callable[[Forward], list[Tensor]] = one_by_one
) -> list[Tensor]:
    """Steps of so many passes each: losses, gradients, weights, optimizer states."""
    seen: list[Tensor] = []
    for step in range(STEPS):

        def forward(micro_batch: int, step: int = step) -> Tensor:
            torch.manual_seed(100 * step + micro_batch)
            return model(batch("cpu", step, micro_batch, SIZES))

        with autohete_fx.MemoryMeter("cpu") as meter:
            losses = passes(forward)
            seen.extend(copied(loss) for loss in losses)
            losses.clear()
            seen.extend(copied(p.grad) for p in model.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
        peaks.append(meter.peak_bytes)
    seen.extend(map(copied, model.parameters()))
    states = optimizer.state_dict()["state"]
    return [*seen, *(copied(states[number][name]) for number in sorted(states) for name in ("exp_avg", "exp_avg_sq"))]


def run(
    options: dict[str, Any] | None, passes: Callable[[Forward], list[Tensor]] = one_by_one, first: int = 0
) -> tuple[list[Tensor], int]:
    """Everything that must agree, and the peak above what was there before, of steps from ``first`` on; ``options`` None: plain."""
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
    return train(model, optimizer, peaks, passes), max(peaks[first:]) - foreign_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_plans")
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


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    return [message for message in messages if "before a backward of theirs began" in message]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize(("passes", "count"), [(one_by_one, IN_FLIGHT), (in_one, IN_FLIGHT), (in_turns, 2)])
def test_passes_in_flight_that_nobody_announced_are_told_once_and_planned_for(
    passes: Callable[[Forward], list[Tensor]], count: int, caplog: pytest.LogCaptureFixture
):
    training.warm_up("cpu")
    expected, plain_peak = run(None, passes)
    budget = plain_peak * 6 // 10
    found, peak = run({"memory_budget": budget}, passes, first=1)
    assert_equal(found, expected, bitwise=True)
    (told,) = warnings_of(caplog)
    assert told.startswith(f"{count} forward passes") and f"in_flight to {count}" in told
    problem = training.training_compilation().problem
    assert peak <= budget and problem is not None and problem.in_flight == count


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_plans")
def test_a_budget_that_passes_in_flight_do_not_fit_into_is_refused_with_one_that_works(
    caplog: pytest.LogCaptureFixture,
):
    training.warm_up("cpu")
    with pytest.raises(autohete_fx.InfeasiblePlanError) as refused:
        run({"memory_budget": 1000})
    least = refused.value.smallest_budget_bytes
    assert least is not None
    with pytest.raises(autohete_fx.InfeasiblePlanError) as refused:
        run({"memory_budget": least})
    assert len(warnings_of(caplog)) == 1 and refused.value.smallest_budget_bytes is not None
    _, peak = run({"memory_budget": refused.value.smallest_budget_bytes}, first=1)
    assert peak <= refused.value.smallest_budget_bytes


def checkpointed(reentrant: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss: Any = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        return loss

    return loss_of


def dropped(model: nn.Module, x: Tensor) -> Tensor:
    """After forwards that nobody takes the gradients of, such as those of an evaluation."""
    for _ in range(3):
        model(x)
    return model(x)


def kept(model: nn.Module, x: Tensor) -> Tensor:
    """A graph whose first backward was another one's."""
    loss = model(x)
    loss.backward(retain_graph=True)
    model.zero_grad()
    return loss


LOSSES = [checkpointed(True), slow(checkpointed(False)), dropped, kept, nn.Module.__call__]


@pytest.mark.parametrize("broken", [False, slow(True)])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_recomputation_dropped_losses_kept_graphs_and_graph_breaks_are_no_passes_in_flight(
    loss_of: Callable[[nn.Module, Tensor], Tensor], broken: bool, caplog: pytest.LogCaptureFixture
):
    """Nor are those of another model."""
    models = [layers.make(broken) for _ in range(2)]
    optimizers = [autohete_fx.AdamW(model.parameters()) for model in models]
    for model in models:
        model.compile(backend="autohete", options={**layers.EAGER, "memory_budget": "32MiB"})
    for _ in range(4):
        torch.stack([loss_of(model, torch.randn(64, 128)) for model in models]).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert warnings_of(caplog) == []
