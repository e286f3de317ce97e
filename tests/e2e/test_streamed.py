"""Training whose optimizer states are streamed through the device: exact, within the budget, and waited for by every read."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autohete_fx
from autohete_fx import BlockDecision, Optimizer, Params
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.optim.streamed import AHEAD
from autohete_fx.runtime.meter import device_live_bytes
from examples.benchmarks.emulated import Emulation, Speeds
from tests import training
from tests.e2e.test_overlap import READS
from tests.held_updates import Gate, Training, random_delays, trained_under, use_lanes, weight_of
from tests.main_job import slow
from tests.thorough import thorough
from tests.training import STREAMED, Sizes, assert_equal, make, ours, plain

AT_HOME = BlockDecision(params=Params.HOST, optimizer=Optimizer.STREAMED)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    gate = Gate()
    use_lanes(monkeypatch, pace=gate, is_host=False)
    yield gate
    gate.opened.set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "how"),
    [
        thorough(1, {"clip": True}, id="1-clipping"),
        pytest.param(4, {"micro_batches": 2, "between": training.evaluate}, id="4-evaluating"),
    ],
)
def test_training_without_overlap_is_bitwise_exact_under_random_delays(
    num_workers: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """test_overlap.py and test_overlap_backward.py have the same plan with updates that begin at the step and in backward."""
    use_lanes(monkeypatch, num_update_workers=num_workers, is_host=False, pace=random_delays())
    options = {"plan": planned(None), "micro_batches": how.get("micro_batches", 1)}
    given = ours(make("cpu"), "eager", options, None, **how)
    assert_equal(given, plain(make("cpu"), "eager", **how), bitwise=True)


def planned(overlap: str | None) -> autohete_fx.Plan:
    schedule = Schedule(overlap=Overlap.NONE if overlap is None else Overlap(overlap))
    return autohete_fx.Plan(labels=training.LABELS, decisions=training.PLANS["streamed"], schedule=schedule)


@pytest.mark.slow
def test_a_bf16_model_trains_as_with_states_on_the_device(monkeypatch: pytest.MonkeyPatch):
    sizes = Sizes(width=128)  # 16-bit parameters of narrower layers are too small to move
    keep = {"plan": training.plan("keep")}
    expected = ours(make("cpu", sizes).bfloat16(), "eager", keep, sizes=sizes)
    use_lanes(monkeypatch, is_host=False, pace=random_delays())
    given = ours(make("cpu", sizes).bfloat16(), "eager", {"plan": planned("step")}, sizes=sizes)
    assert_equal(given, expected, bitwise=True)


@pytest.fixture(scope="module")
def held(request: pytest.FixtureRequest) -> Iterator[Training]:
    """One for all reads of a plan."""
    with trained_under(request.param, is_host=False) as state:
        yield state


@pytest.mark.keeps_compiled
@pytest.mark.parametrize("held", [STREAMED, slow(AT_HOME)], ids=["device", "host"], indirect=True)
@pytest.mark.parametrize("name", ["operator", "view", "state_dict", "optimizer state", "eager forward", "save"])
def test_a_read_waits_for_the_update(name: str, held: Training):
    held.hold()
    held.assert_waits(READS[name])


def test_the_step_returns_before_and_the_compiled_forward_waits(gate: Gate):
    state = Training(gate, STREAMED)
    before = autohete_fx.compilations()[-1]
    timer = gate.open_soon()
    state.step()
    assert gate.opened.is_set()
    timer.join()
    assert autohete_fx.compilations()[-1] is before and torch.equal(*state.weights)


def test_edits_between_steps_count(gate: Gate):
    state = Training(gate, STREAMED)
    timer = gate.open_soon()
    for model, optimizer in ((state.model, state.optimizer), (state.twin, state.reference)):
        with torch.no_grad():
            weight_of(model).mul_(2)
            optimizer.state[weight_of(model)]["exp_avg_sq"].mul_(3)
    timer.join()
    for _ in range(2):
        state.step()
    assert torch.equal(*state.weights)


SIZES = Sizes(width=256, batch=4, time=32)
SPEEDS = Speeds(forward_s=2e-3, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, update_params_per_s=1e6)
"""A host so slow that it pays to bring states to the device."""


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["step", thorough(None)])
def test_solved_plans_stream_and_keep_their_budgets(overlap: str | None):
    training.warm_up("cpu")
    expected, plain_bytes = training.plain_run("cpu", "eager", SIZES)
    gc.collect()
    budget, peaks = int(0.6 * plain_bytes), []
    with Emulation(SPEEDS).running() as emulation:
        foreign = device_live_bytes("cpu")
        options = {**emulation.options, "memory_budget": budget}
        given = ours(make("cpu", SIZES), "eager", options, overlap, sizes=SIZES, peaks=peaks)
    found = training.training_compilation()
    peak = max(peaks) - foreign
    assert any(decision.optimizer is Optimizer.STREAMED for decision in found.plan.decisions)
    assert peak <= budget and found.plan.peak_bytes == pytest.approx(peak, rel=0.1)
    assert_equal(given, expected, bitwise=True)
    assert "streamed" in found.plan_table() and "streamed" in found.why()
    labels = {(record.lane, record.label) for record in emulation.records()}
    assert {(Lane.H2D, "states"), (Lane.D2H, "states")} <= labels


@pytest.mark.slow
def test_a_new_shape_is_planned_with_states_that_are_streamed_already():
    training.warm_up("cpu")
    _, plain_bytes = training.plain_run("cpu", "eager", SIZES)
    gc.collect()
    model, twin = make("cpu", SIZES).eval(), make("cpu", SIZES).eval()
    with Emulation(SPEEDS).running() as emulation:
        options = {**emulation.options, "memory_budget": int(0.6 * plain_bytes), "solver_time_limit_s": 2}
        model.compile(backend="autohete", options=options)
        optimizers = (
            autohete_fx.AdamW(model.parameters(), lr=1e-3),
            torch.optim.AdamW(twin.parameters(), lr=1e-3, fused=True),
        )
        for rows in (4, 2, 4):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                each(training.batch("cpu", rows, sizes=SIZES)[:rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
    first, *later = [c.plan.decisions for c in autohete_fx.compilations()[-2:]]
    assert any(decision.streams for decision in first)
    assert later and all([places(d) for d in decisions] == [places(d) for d in first] for decisions in later)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def places(decision: BlockDecision) -> tuple[object, ...]:
    return decision.params, decision.optimizer, decision.num_moved_states, decision.other_states


def test_states_pass_in_the_simulators_order():
    with Emulation(SPEEDS).running() as emulation:
        ours(make("cpu", SIZES), "eager", {**emulation.options, "plan": streams_all()}, sizes=SIZES)
    compilation, num_steps = training.training_compilation(), training.STEPS
    for lane in (Lane.H2D, Lane.D2H):
        served = [r.priority % AHEAD for r in emulation.records() if r.lane is lane and r.label == "states"]
        in_runs = [block for n, block in enumerate(served) if not n or served[n - 1] != block]
        planned = [e.block for e in compilation.events if e.lane is lane and e.label == "states"]
        assert in_runs == num_steps * sorted(planned)


def streams_all() -> autohete_fx.Plan:
    labels = ("prologue", *(f"layers.{n}" for n in range(SIZES.layers)), "epilogue")
    return autohete_fx.Plan(labels=labels, decisions=(STREAMED,) * len(labels), schedule=Schedule(overlap=Overlap.STEP))
