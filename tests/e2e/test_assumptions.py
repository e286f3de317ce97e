"""What plans assume of optimizers and of micro-batches: where it stops being so, models are planned again, or refused."""

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autohete_fx
from autohete_fx.errors import InfeasiblePlanError, PlanError
from autohete_fx.ir import Optimizer
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.runtime.meter import device_live_bytes
from autohete_fx.runtime.tiers.host import is_home
from tests import training as job

SIZES = job.Sizes(width=128, heads=4, layers=4, batch=2, time=128)
OPTIONS = {"inner_backend": "eager", "profile": "analytic", "solver_time_limit_s": 1}
BUDGET = 19 * 2**20
"""Enough for some optimizer states on the device beside everything else, or for gradients that are accumulated."""


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    job.warm_up("cpu")
    monkeypatch.setattr(job, "STEPS", 2)
    yield
    torch._dynamo.reset()


def compiled(budget: int) -> job.Model:
    model = job.make("cpu", SIZES)
    model.compile(backend="autohete", options={**OPTIONS, "memory_budget": budget})
    return model


def trained(model: job.Model, optimizer: Any, micro_batches: int = 1) -> tuple[list[torch.Tensor], int]:
    """What training gives, and the most bytes it had beyond those that other tests have."""
    peaks: list[int] = []
    weights = sum(p.nbytes for p in model.parameters() if p.untyped_storage().nbytes())
    foreign = device_live_bytes("cpu") - weights
    values = job.train(model, optimizer, sizes=SIZES, micro_batches=micro_batches, peaks=peaks)
    return values, max(peaks) - foreign


def num_since(earlier: list[autohete_fx.Compilation]) -> int:
    """Compilations of this process that are not among earlier ones; of which the oldest are dropped."""
    return sum(not any(found is other for other in earlier) for found in autohete_fx.compilations())


@pytest.mark.slow
def test_accumulation_that_nobody_announced_is_planned_for(caplog: pytest.LogCaptureFixture):
    """The second micro-batch finds gradients: from then on their memory is counted. What is bitwise are CPU updates."""
    expected = job.plain(job.make("cpu", SIZES), "eager", sizes=SIZES, micro_batches=3)
    model = compiled(BUDGET)
    earlier = autohete_fx.compilations()
    values, peak = trained(model, autohete_fx.AdamW(model.parameters(), lr=1e-3), micro_batches=3)
    job.assert_equal(values, expected, bitwise=True)
    assert peak <= BUDGET
    told = [record for record in caplog.records if "Set the option micro_batches" in record.getMessage()]
    assert len(told) == 1
    assert num_since(earlier) == 3


@pytest.mark.slow
def test_states_that_a_plan_moves_leave_the_device_before_its_next_pass():
    """Here those of a step before anything was compiled. They once stayed until the step after, above the budget."""
    expected = job.plain(job.make("cpu", SIZES), "eager", sizes=SIZES, micro_batches=2)
    budget, model, peaks = 12 * 2**20, job.make("cpu", SIZES), list[int]()
    foreign = device_live_bytes("cpu") - sum(p.nbytes for p in model.parameters())

    def compile_once(model: job.Model) -> list[torch.Tensor]:
        if len(peaks) == 3:
            model.compile(backend="autohete", options={**OPTIONS, "memory_budget": budget, "micro_batches": 2})
        return []

    values = job.train(model, job.adamw(model), sizes=SIZES, micro_batches=2, between=compile_once, peaks=peaks)
    job.assert_equal(values, expected, bitwise=True)
    assert sum(where is Optimizer.HOST for where in autohete_fx.compilations()[-1].moved.values()) > 4
    _, _, uncompiled, _, *planned = (peak - foreign for peak in peaks)
    assert max(planned) <= budget < uncompiled


@pytest.mark.slow
@pytest.mark.parametrize("is_another_model", [True, False])
def test_code_planned_for_another_optimizer_is_planned_again_or_refused(is_another_model: bool):
    """As in a notebook whose cell runs again with PyTorch's optimizer: its states are all on the device."""
    expected = job.plain(job.make("cpu", SIZES), "eager", sizes=SIZES)
    model = compiled(BUDGET)
    values, peak = trained(model, autohete_fx.AdamW(model.parameters(), lr=1e-3))
    job.assert_equal(values, expected, bitwise=True)
    assert peak <= BUDGET
    states = sum(2 * p.nbytes for p in model.parameters())
    if is_another_model:
        del model
        gc.collect()
        model = compiled(BUDGET)
    values, peak = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    if is_another_model:
        job.assert_equal(values, expected, bitwise=True)
    assert peak <= BUDGET
    assert autohete_fx.compilations()[-1].footprint.resident_bytes >= states


@pytest.mark.slow
def test_states_of_an_optimizer_that_steps_count_whatever_was_made_after_it():
    """Here one without states, meant for a later phase."""
    expected = job.plain(job.make("cpu", SIZES), "eager", sizes=SIZES)
    model = compiled(BUDGET)
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
    later = autohete_fx.SGD(model.parameters(), lr=1e-3)
    earlier = autohete_fx.compilations()
    values, peak = trained(model, optimizer)
    job.assert_equal(values, expected, bitwise=True)
    assert peak <= BUDGET and num_since(earlier) == 2
    assert optimizer_of(next(model.parameters())) is optimizer and not later.state


@pytest.mark.slow
def test_what_does_not_fit_with_another_optimizer_is_refused():
    budget = 8 * 2**20
    model = compiled(budget)
    trained(model, autohete_fx.AdamW(model.parameters(), lr=1e-3))
    model = compiled(budget)
    with pytest.raises(InfeasiblePlanError):
        trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


@pytest.mark.slow
def test_a_function_that_is_given_another_model_is_refused_once_and_then_plans_for_it():
    """Nothing tells beforehand which model a function will use."""

    @torch.compile(backend="autohete", options={**OPTIONS, "memory_budget": BUDGET // 4 * 3})
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    x = job.batch("cpu", 0, sizes=SIZES)
    models = [job.make("cpu", SIZES) for _ in range(2)]
    optimizer = autohete_fx.AdamW(models[0].parameters(), lr=1e-3)
    torch.manual_seed(0)
    loss_of(models[0], x).backward()
    expected = models[0].head.weight.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(PlanError, match="Call the function again"):
        loss_of(models[1], x)
    earlier = autohete_fx.compilations()
    torch.manual_seed(0)
    loss_of(models[1], x).backward()
    assert num_since(earlier) == 1
    assert torch.equal(models[1].head.weight.grad, expected)


@pytest.mark.slow
def test_evaluation_beside_training_counts_its_states_and_says_what_is_above_the_budget(
    caplog: pytest.LogCaptureFixture,
):
    """With a batch many times as large as that of training."""
    budget = 12 * 2**20
    model = compiled(budget)
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
    trained(model, optimizer)
    weights = sum(p.nbytes for p in model.parameters() if not is_home(p))
    sizes = [(2, False), (48, True)]
    for batch, is_above in sizes:
        gc.collect()
        foreign = device_live_bytes("cpu") - weights - _state_bytes_on_device(model)
        tokens = job.batch("cpu", 0, sizes=dataclasses.replace(SIZES, batch=batch))
        with torch.no_grad(), autohete_fx.MemoryMeter("cpu") as meter:
            model(tokens)
        found = autohete_fx.compilations()[-1]
        assert not found.training
        peak = meter.peak_bytes - foreign
        assert 0.9 * found.plan.peak_bytes <= peak <= 1.01 * found.plan.peak_bytes
        assert (found.plan.peak_bytes > budget) == is_above
        assert sum("Evaluate in smaller batches" in r.getMessage() for r in caplog.records) == is_above


def _state_bytes_on_device(model: nn.Module) -> int:
    owners = {id(o): o for p in model.parameters() if (o := optimizer_of(p)) is not None}
    states = [t for o in owners.values() for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in states if not is_home(t))
