"""The main job on a GPU, and models that are larger than it."""

import dataclasses

import pytest
import torch

import autohete_fx
from autohete_fx.machine.budgets import device_budget_bytes
from autohete_fx.options import Options
from autohete_fx.runtime.meter import device_live_bytes
from autohete_fx.runtime.placement import is_movable
from autohete_fx.runtime.tiers.host import is_home
from tests.main_job import MainJob
from tests.training import Model, Sizes, batch, copied, make


class TestOnCuda(MainJob):
    device = "cuda"
    # The caching allocator rounds a block up by as much as 1 MiB, and benchmarks Triton's kernels in a buffer of the
    # size of its L2 cache: a budget is a matter of gigabytes here. Sequences of more than 64 keys would be split in the backward
    # of fp32 attention, whose parts add up in any order: no two runs of plain PyTorch would agree in every bit.
    large = Sizes(width=1024, heads=16, layers=6, batch=160, time=64)
    deep = dataclasses.replace(large, layers=10)


WIDE = Sizes(width=1024, heads=16, layers=20)


def losses_of(model: Model, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    seen = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(batch("cuda", step, sizes=WIDE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(copied(loss))
    return seen


@pytest.fixture(scope="module")
def expected_losses() -> list[torch.Tensor]:
    """Of the model on the whole card."""
    model = make("cuda", WIDE)
    return losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def test_a_model_larger_than_the_card_trains(expected_losses: list[torch.Tensor], small_card: int):
    budget_bytes = 512 * 2**20  # the rest is for cuBLAS, and for what the caching allocator cannot use
    foreign_bytes = device_live_bytes("cuda")
    model = make("cpu", WIDE)
    assert sum(p.nbytes for p in model.parameters()) > small_card
    autohete_fx.place(model, "cuda")
    assert all(p.is_cuda and is_home(p) for p in model.parameters() if is_movable(p))
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-4)
    options = {"memory_budget": budget_bytes, "inner_backend": "eager", "profile": "analytic"}
    model.compile(backend="autohete", options=options)
    with autohete_fx.MemoryMeter("cuda") as meter:
        losses = losses_of(model, optimizer)
    torch.testing.assert_close(losses, expected_losses, atol=1e-4, rtol=1e-3)
    assert meter.peak_bytes - foreign_bytes <= budget_bytes


def test_without_a_budget_it_is_what_the_process_may_take(small_card: int):
    budget_bytes = device_budget_bytes(torch.device("cuda", 0), Options())
    assert budget_bytes is not None and 0 < budget_bytes <= small_card


def test_eager_code_reads_and_runs_a_model_larger_than_the_card(small_card: int):
    model = make("cpu", WIDE)
    norms = [p.double().norm().float() for p in model.parameters()]  # fp32 sums of a CPU are 4e-5 off
    tokens = batch("cpu", 0, sizes=WIDE)
    with torch.no_grad():
        expected = model.eval()(tokens)
    autohete_fx.place(model, "cuda")
    torch.testing.assert_close([p.norm().cpu() for p in model.parameters()], norms, atol=0.0, rtol=1e-5)
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        given = model(tokens.cuda())
    torch.testing.assert_close(given.cpu(), expected, atol=1e-4, rtol=1e-3)
    assert torch.cuda.memory_allocated() - before < 128 * 2**20
