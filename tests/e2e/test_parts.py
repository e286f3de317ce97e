"""Functions of one model that are compiled by themselves, and graphs that a call runs again: the budget counts them once each."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autohete_fx
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.runtime.meter import device_live_bytes
from tests import training as job
from tests.broken import ROWS, WIDTH, Block, budgeted, plainly, trained
from tests.thorough import thorough

OPTIONS = {"inner_backend": "eager", "profile": "analytic", "solver_time_limit_s": 1}
SLOW = pytest.mark.slow


class Parts(nn.Module):
    """An encoder and a decoder, which read one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block() for _ in range(2))

    def encode(self, x: Tensor) -> Tensor:
        x = x @ self.tied
        for block in self.encoder:
            x = block(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        for block in self.decoder:
            x = block(x)
        return (x @ self.tied.T).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


@pytest.fixture(autouse=True)
def _prepared() -> Iterator[None]:
    job.warm_up("cpu")
    yield
    torch._dynamo.reset()


def made(cls: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return cls()


def in_parts(model: Any, **how: Any) -> Any:
    for name in ("encode", "decode"):
        setattr(model, name, torch.compile(getattr(model, name), **how))
    return model


def budgeted_parts(budget: int) -> tuple[list[Tensor], list[int]]:
    model = in_parts(made(Parts), backend="autohete", options={**OPTIONS, "memory_budget": budget})
    return trained(model, autohete_fx.AdamW(model.parameters(), lr=1e-3))


@SLOW
def test_functions_that_share_a_tied_weight_are_planned_together():
    model = in_parts(made(Parts), backend="aot_eager")
    expected, peaks = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    torch._dynamo.reset()
    budget, earlier = int(0.45 * max(peaks)), autohete_fx.compilations()
    given, peaks = budgeted_parts(budget)
    job.assert_equal(given, expected, bitwise=True)
    assert max(peaks) <= budget
    found = [c for c in autohete_fx.compilations() if not any(c is other for other in earlier)]
    assert [c.unsettled is not None for c in found] == [True, False, False]
    assert all(c.plan.peak_bytes <= budget for c in found)
    torch._dynamo.reset()
    with pytest.raises(InfeasiblePlanError) as caught:
        budgeted_parts(budget // 6)
    torch._dynamo.reset()
    named = caught.value.smallest_budget_bytes
    assert named is not None and named < budget
    given, peaks = budgeted_parts(named)
    job.assert_equal(given, expected, bitwise=True)
    assert max(peaks) <= named


class Checkpointed(nn.Module):
    """Blocks that are compiled one by one, and computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square().mean()

    def compiled(self, **how: Any) -> "Checkpointed":
        for block in self.blocks:
            block.compile(**how)
        return self


@SLOW
def test_blocks_that_a_backward_computes_again_keep_the_code_of_their_forward():
    model = made(Checkpointed).compiled(backend="aot_eager")
    expected, peaks = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    torch._dynamo.reset()
    model = made(Checkpointed).compiled(backend="autohete", options={**OPTIONS, "memory_budget": max(peaks)})
    given, _ = trained(model, autohete_fx.AdamW(model.parameters(), lr=1e-3))
    job.assert_equal(given, expected, bitwise=True)


def in_loop(model: nn.Module, optimizer: Any, batches: list[Tensor], is_step: bool) -> None:
    """Several backward passes in one call, of a step each or of one."""
    for batch in batches:
        model(batch).backward()
        if is_step:
            optimizer.step()
            optimizer.zero_grad()


def looped(model: nn.Module, optimizer: Any, *, is_step: bool, **how: Any) -> tuple[list[Tensor], int]:
    """Gradients and parameters after each of some calls, and the highest peak of a call."""
    others = device_live_bytes("cpu") - sum(p.nbytes for p in model.parameters())
    run, seen, peak = torch.compile(in_loop, **how), [], 0
    for call in range(4):
        torch.manual_seed(call)
        batches = [torch.randn(ROWS, WIDTH) for _ in range(3)]
        with autohete_fx.MemoryMeter("cpu") as meter:
            run(model, optimizer, batches, is_step)
        peak = max(peak, meter.peak_bytes - others - sum(batch.nbytes for batch in batches[1:]))
        seen += [job.copied(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        seen += map(job.copied, model.parameters())
    return seen, peak


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@SLOW
@pytest.mark.parametrize("is_step", [thorough(False), True])
def test_backward_passes_within_a_call_hold_activations_one_after_the_other(is_step: bool):
    model = made(Whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    expected, peak = looped(model, optimizer, is_step=is_step, backend="aot_eager")
    torch._dynamo.reset()
    model, budget = made(Whole), int(0.46 * peak)
    options = {**OPTIONS, "memory_budget": budget}
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
    given, peak = looped(model, optimizer, is_step=is_step, backend="autohete", options=options)
    job.assert_equal(given, expected, bitwise=True)
    assert peak <= budget
    assert autohete_fx.compilations()[-1].unsettled is None, "once the call is over it is planned for all of the budget"


class Again(nn.Module):
    """One block of many parameters runs three times; a graph break in the loop makes it a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 16 * WIDTH), nn.GELU(), nn.Linear(16 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            torch._dynamo.graph_break()
            x = self.once(x)
        return x.square().mean()

    def once(self, x: Tensor) -> Tensor:
        return x + self.block(x)


@SLOW
def test_of_a_module_that_a_call_runs_again_parameters_count_once():
    """With another optimizer their states and gradients are on the device."""
    expected, peak = plainly(made(Again), "eager", rows=64)
    model = made(Again)
    model.compile(backend="autohete", options={**OPTIONS, "memory_budget": peak})
    given, peaks = trained(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), rows=64)
    job.assert_equal(given, expected, bitwise=True)
    assert max(peaks) <= peak


class Experts(nn.Module):
    """Layers of two experts each, which get the rows that are theirs by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.experts = nn.ParameterList(torch.randn(WIDTH, 4 * WIDTH) / WIDTH for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, block in enumerate(self.blocks):
            x = block(x)
            for number in range(2):
                (rows,) = torch.where((x.sum(1) > 0) == (number > 0))
                weight = self.experts[2 * layer + number]
                x = x.index_add(0, rows, x[rows] @ weight @ weight.T)
        return x.square().mean()


@SLOW
def test_gradients_and_states_of_experts_that_run_between_graphs_count_within_the_budget():
    expected, peak = plainly(made(Experts), "eager", rows=64)
    with pytest.raises(InfeasiblePlanError, match="parameters that eager code reads between graphs") as caught:
        budgeted(made(Experts), "eager", peak // 2, rows=64)
    torch._dynamo.reset()
    named = caught.value.smallest_budget_bytes
    assert named is not None and peak // 2 < named < 1.1 * peak
    given, peaks = budgeted(made(Experts), "eager", named, rows=64)
    job.assert_equal(given, expected, bitwise=True)
    assert max(peaks) <= named
