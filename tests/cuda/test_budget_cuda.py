"""Device memory of whole trainings on a GPU: what is promised of the budget, at the process's cap, and beyond it."""

import gc
import re

import pytest
import torch

import autohete_fx
from autohete_fx.runtime.tiers import host, pinned
from tests import training
from tests.training import Model, Sizes, batch, make

SIZES = Sizes(width=1024, heads=16, layers=10, batch=24, time=256)
MIB = 2**20


def steps(model: Model, optimizer: torch.optim.Optimizer, count: int, sizes: Sizes = SIZES) -> None:
    for step in range(count):
        model(batch("cuda", step, sizes=sizes)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("share", [0.8, pytest.param(0.45, marks=pytest.mark.slow)])
def test_measured_peak_is_within_the_budget_and_as_predicted(share: float):
    training.warm_up("cuda")
    gc.collect()
    _, plain_peak = training.plain_run("cuda", "inductor", SIZES)
    gc.collect()
    _, peak = training.budgeted_run("cuda", "inductor", SIZES, budget := int(share * plain_peak))
    predicted = training.training_compilation().plan.peak_bytes
    assert peak <= budget and predicted == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
def test_at_the_process_cap_no_step_of_fifty_runs_out_of_memory(small_card: int):
    """No budget is given: it is what the process may take."""
    model = autohete_fx.place(make("cpu", sizes := Sizes(width=1024, heads=16, layers=20, batch=4, time=128)), "cuda")
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-4)
    model.compile(backend="autohete")
    steps(model, optimizer, 50, sizes)
    optimizer.synchronize()
    assert torch.cuda.memory_reserved() <= small_card


def dropped() -> None:
    """Nothing of a model that was let go of is left."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def trained(budget_bytes: int | None) -> int:
    """Train a model and let it go; returns its plan's peak."""
    model = make("cuda", SIZES)
    model.compile(backend="autohete", options={"profile": "analytic", "memory_budget": budget_bytes})
    steps(model, autohete_fx.AdamW(model.parameters(), lr=1e-4), 2)
    return training.training_compilation().plan.peak_bytes


def test_an_allocator_that_runs_out_says_which_budget_to_ask_for_and_that_leads_to_one_that_does():
    training.warm_up("cuda")
    peak = trained(None)
    dropped()
    _, total = torch.cuda.mem_get_info()
    budget, asked = 2 * peak, []
    try:
        torch.cuda.set_per_process_memory_fraction(0.8 * peak / total)
        for _ in range(4):
            try:
                trained(budget)
                break
            except torch.OutOfMemoryError as error:
                note = "\n".join(getattr(error, "__notes__", []))
                found = re.search(r"memory_budget='(\d+)MiB'", note)
                assert found is not None and "predicts a peak of" in note, note or error
                asked.append(budget := int(found[1]) * MIB)
            dropped()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1 <= len(asked) <= 3 and asked == sorted(set(asked), reverse=True)


def test_a_step_that_finds_no_room_for_states_says_which_budget_to_ask_for():
    training.warm_up("cuda")
    model = make("cuda", SIZES)
    model.compile(backend="autohete", options={"profile": "analytic", "inner_backend": "eager"})
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-4)
    model(batch("cuda", 0, sizes=SIZES)).backward()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 32 * MIB) / total)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "predicts a peak of" in "\n".join(caught.value.__notes__)
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_arena_is_pinned_in_pieces_where_the_driver_refuses_a_large_one():
    """The driver's own refusal is simulated; every piece is really pinned."""
    asked: list[int] = []

    def register(address: int, num_bytes: int) -> int:
        asked.append(num_bytes)
        return 2 if num_bytes > 100 * MIB else pinned.cuda_register(address, num_bytes)

    arena = host.Arena(lambda n: pinned.pin(n, register), growth_bytes=MIB)
    arena.reserve(300 * MIB)
    assert asked[0] == 300 * MIB and 300 * MIB <= arena.reserved_bytes < 301 * MIB
    tier = host.PinnedTier(torch.device("cuda", torch.cuda.current_device()), arena=arena)
    t = tier.empty_strided((50 * MIB // 4,), (1,), torch.float32).fill_(3)
    torch.cuda.synchronize()
    assert bool((tier.host_view(t) == 3).all()) and torch.zeros(1, device="cuda").item() == 0


def test_what_a_refusal_leaves_behind_does_not_fail_the_next_kernel():
    chunk = pinned.pin(MIB)
    assert pinned.cuda_register(chunk.address, MIB) != 0, "a second registration is refused by the driver itself"
    assert torch.ones(4, device="cuda").sum().item() == 4


def test_pinned_memory_is_pinned_in_the_first_step_and_goes_with_its_model(monkeypatch: pytest.MonkeyPatch):
    training.warm_up("cuda")  # measures the machine, in memory that goes at once
    dropped()
    held: set[int] = set()
    runtime = pinned._cudart()

    class Counting:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            held.add(address)
            return int(runtime.cudaHostRegister(address, num_bytes, flags))

        def cudaHostUnregister(self, address: int) -> int:
            held.discard(address)
            return int(runtime.cudaHostUnregister(address))

    monkeypatch.setattr(pinned, "_cudart", Counting)
    model = make("cuda")
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
    options = {"inner_backend": "eager", "profile": "analytic", "plan": training.plan("mixed")}
    model.compile(backend="autohete", options=options)
    steps(model, optimizer, 1, training.SMALL)
    optimizer.synchronize()
    in_first = set(held)
    steps(model, optimizer, 3, training.SMALL)
    optimizer.synchronize()
    assert held == in_first != set()
    del model, optimizer
    dropped()
    assert not held
