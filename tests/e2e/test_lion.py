"""Training with Lion: equal to the paper's formulas wherever its states are, and planned with its own bytes and seconds."""

import gc
from typing import Any

import pytest
import torch

import autohete_fx
from autohete_fx import Optimizer
from autohete_fx.compiler import captured
from autohete_fx.compiler.problem import make_problem
from autohete_fx.ir import Overlap, Problem, Schedule
from autohete_fx.runtime import disk
from autohete_fx.runtime.meter import device_live_bytes
from examples.benchmarks.emulated import Emulation, Speeds
from tests import training
from tests.held_updates import random_delays, use_lanes
from tests.main_job import slow
from tests.training import ReferenceLion, Sizes, assert_equal, lion, make, ours, train


def plain(model: training.Model, **how: Any) -> list[torch.Tensor]:
    """What the formulas give without our backend."""
    model.compile(backend="aot_eager")
    result = train(model, ReferenceLion(model.parameters()), **how)
    torch._dynamo.reset()
    return result


def planned(name: str, overlap: str | None) -> autohete_fx.Plan:
    schedule = Schedule(overlap=Overlap.NONE if overlap is None else Overlap(overlap))
    return autohete_fx.Plan(labels=training.LABELS, decisions=training.PLANS[name], schedule=schedule)


@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        ("streamed", "step"),
        ("disk", "backward"),
        ("mixed", "backward"),
        slow("mixed", "step"),
        slow("host-optimizer", None),
        slow("streamed", None),
        slow("disk", "step"),
    ],
)
def test_training_is_bitwise_exact_under_random_delays(name: str, overlap: str | None, monkeypatch: pytest.MonkeyPatch):
    """With dropout and fresh data. Losses, gradients, parameters and states are compared."""
    monkeypatch.setattr(disk, "WINDOW_BYTES", 2**15)
    use_lanes(monkeypatch, is_host=False, pace=random_delays(0.002))
    given = ours(make("cpu"), "eager", {"plan": planned(name, overlap)}, overlap, lion)
    assert_equal(given, plain(make("cpu")), bitwise=True)


@pytest.mark.parametrize("name", ["streamed", slow("disk"), slow("mixed")])
def test_clipping_and_micro_batches(name: str, monkeypatch: pytest.MonkeyPatch):
    use_lanes(monkeypatch, is_host=False)
    how = {"clip": True, "micro_batches": 2}
    options = {"plan": planned(name, "step"), "micro_batches": 2}
    given = ours(make("cpu"), "eager", options, "step", lion, **how)
    assert_equal(given, plain(make("cpu"), **how), bitwise=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "streamed", "disk"])
def test_a_bf16_model_trains_as_with_states_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch):
    sizes = Sizes(width=128)  # 16-bit parameters of narrower layers are too small to move
    seen = []
    for plan in ("keep", name):
        use_lanes(monkeypatch, is_host=False, pace=random_delays(0.002))
        model = make("cpu", sizes).bfloat16()
        seen.append(ours(model, "eager", {"plan": planned(plan, "step")}, "step", lion, sizes=sizes))
    assert_equal(seen[1], seen[0], bitwise=True)


SIZES = Sizes(width=256, batch=4, time=32, layers=4)


@pytest.mark.parametrize(
    ("update_params_per_s", "expected"), [(1e6, Optimizer.STREAMED), slow(1e9, Optimizer.HOST)], ids=["slow", "fast"]
)
def test_solved_plans_keep_their_budgets(update_params_per_s: float, expected: Optimizer):
    """On an emulated machine, whose host is slow enough that it pays to stream, or fast enough that it does not."""
    training.warm_up("cpu")
    foreign, peaks = device_live_bytes("cpu"), []
    values = plain(make("cpu", SIZES), sizes=SIZES, peaks=peaks)
    gc.collect()
    budget = int(0.6 * (max(peaks) - foreign))
    speeds = Speeds(forward_s=2e-3, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, update_params_per_s=update_params_per_s)
    peaks = []
    with Emulation(speeds).running() as emulation:
        foreign = device_live_bytes("cpu")
        options = {**emulation.options, "memory_budget": budget}
        given = ours(make("cpu", SIZES), "eager", options, "step", lion, sizes=SIZES, peaks=peaks)
    found = training.training_compilation()
    peak = max(peaks) - foreign
    places = {place for decision in found.plan.decisions for place in (decision.optimizer, decision.other_states)}
    assert expected in places, places
    assert peak <= budget and found.plan.peak_bytes == pytest.approx(peak, rel=0.1)
    assert_equal(given, values, bitwise=True)


def test_plans_count_its_states_and_what_its_updates_move(monkeypatch: pytest.MonkeyPatch):
    """One moment for two, and 20 bytes moved for 28."""
    problems: list[Problem] = []
    monkeypatch.setattr(
        captured, "make_problem", lambda *args, **how: problems.append(make_problem(*args, **how)) or problems[-1]
    )
    costs = {}
    for kind in (autohete_fx.AdamW, autohete_fx.Lion):
        model = make("cpu", SIZES)
        optimizer = kind(model.parameters())
        autohete_fx.explain(
            model, training.batch("cpu", 0, sizes=SIZES), options={"profile": "analytic", "inner_backend": "eager"}
        )
        costs[kind] = problems[-1].costs
        torch._dynamo.reset()
        del optimizer
    for adamw, lion_ in zip(costs[autohete_fx.AdamW], costs[autohete_fx.Lion], strict=True):
        assert adamw.num_params == lion_.num_params and adamw.optimizer_bytes == 2 * lion_.optimizer_bytes
        assert adamw.update_share == 1.0 and lion_.update_share == (20 / 28 if lion_.num_params else 1.0)
