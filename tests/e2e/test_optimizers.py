"""Training with Lion, Adam, SGD and Muon: equal to their references wherever states are, planned with their bytes and seconds."""

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
from tests.references import REFERENCES, adam, adamw, lion, momentum, muon, sgd
from tests.thorough import thorough
from tests.training import Sizes, assert_equal, make, ours


def plain(made: Any, **how: Any) -> list[torch.Tensor]:
    """What the reference gives without our backend."""
    return training.plain(make("cpu"), "eager", REFERENCES[made], **how)


def planned(name: str, overlap: str | None) -> autohete_fx.Plan:
    schedule = Schedule(overlap=Overlap.NONE if overlap is None else Overlap(overlap))
    return autohete_fx.Plan(labels=training.LABELS, decisions=training.PLANS[name], schedule=schedule)


CLIPPING: dict[str, Any] = {"clip": True, "micro_batches": 2}


@pytest.mark.parametrize(
    ("made", "name", "overlap", "how"),
    [  # edits and a second backward come too late for updates that start in backward
        thorough(lion, "streamed", "step", {}),
        slow(lion, "disk", "step", CLIPPING),
        thorough(lion, "mixed", "backward", {}),
        thorough(lion, "host-optimizer", None, CLIPPING),
        slow(adam, "streamed", "step", CLIPPING),
        thorough(adam, "disk", "backward", {}),
        slow(momentum, "streamed", "step", {}),
        thorough(momentum, "disk", "step", CLIPPING),
        thorough(momentum, "mixed", "backward", {}),
        slow(sgd, "disk", "backward", {}),
        (muon, "mixed", "backward", {}),
        thorough(muon, "streamed", "step", CLIPPING),
        thorough(muon, "disk", "step", {}),
    ],
)
def test_training_is_bitwise_exact_under_random_delays(
    made: Any, name: str, overlap: str | None, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """With dropout and fresh data. Losses, norms, gradients, parameters and states are compared. In each plan some states are on
    the device, and some on the host, too."""
    monkeypatch.setattr(disk, "WINDOW_BYTES", 2**15)
    use_lanes(monkeypatch, is_host=False, pace=random_delays(0.002))
    options = {"plan": planned(name, overlap), "micro_batches": how.get("micro_batches", 1)}
    given = ours(make("cpu"), "eager", options, overlap, made, **how)
    assert_equal(given, plain(made, **how), bitwise=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (lion, "streamed"),
        thorough(lion, "disk"),
        thorough(adam, "mixed"),
        thorough(momentum, "streamed"),
        thorough(sgd, "disk"),
        (muon, "streamed"),
    ],
)
def test_a_bf16_model_trains_as_eager_code_does(made: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    """Without dropout, which rounds otherwise in graphs; `test_streamed.py` has it, beside a plan that keeps everything."""
    sizes = Sizes(width=128)  # 16-bit parameters of narrower layers are too small to move
    model = make("cpu", sizes).bfloat16().eval()
    expected = training.uncompiled(model, made, sizes=sizes)
    use_lanes(monkeypatch, is_host=False, pace=random_delays(0.002))
    model = make("cpu", sizes).bfloat16().eval()
    given = ours(model, "eager", {"plan": planned(name, "step")}, "step", made, sizes=sizes)
    assert_equal(given, expected, bitwise=True)


SIZES = Sizes(width=256, batch=4, time=32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "update_params_per_s", "share", "expected"),
    [
        thorough(lion, 1e6, 0.65, Optimizer.STREAMED),
        (sgd, 1e9, 0.65, Optimizer.HOST),
        (muon, 1e6, 0.9, Optimizer.STREAMED),  # its slots are an eighth of the peak
        thorough(muon, 1e9, 0.65, Optimizer.HOST),
    ],
)
def test_solved_plans_keep_their_budgets(made: Any, update_params_per_s: float, share: float, expected: Optimizer):
    """On an emulated machine, whose host is slow enough that it pays to stream, or fast enough that it does not. Without states
    there is nothing to stream: gradients go to the host, and parameters come from there. Budgets are of eager training's peak."""
    training.warm_up("cpu")
    foreign, plain_peaks = device_live_bytes("cpu"), []
    model = make("cpu", SIZES)
    values = training.train(model, REFERENCES[made](model), sizes=SIZES, peaks=plain_peaks)
    del model
    gc.collect()
    budget = int(share * (max(plain_peaks) - foreign))
    speeds = Speeds(forward_s=2e-3, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, update_params_per_s=update_params_per_s)
    peaks = []
    with Emulation(speeds).running() as emulation:
        foreign = device_live_bytes("cpu")
        options = {**emulation.options, "memory_budget": budget}
        given = ours(make("cpu", SIZES), "eager", options, "step", made, sizes=SIZES, peaks=peaks)
    found = training.training_compilation()
    peak = max(peaks) - foreign
    places = {place for decision in found.plan.decisions for place in (decision.optimizer, decision.other_states)}
    assert expected in places, places
    assert peak <= budget and 0.9 * peak <= found.plan.peak_bytes <= (1.1 if made is not muon else 1.15) * peak
    assert_equal(given, values, bitwise=True)


@pytest.mark.slow
def test_plans_count_states_and_what_updates_move(monkeypatch: pytest.MonkeyPatch):
    """One moment for two, and 20 bytes moved for 28; without a moment 12."""
    problems: list[Problem] = []
    monkeypatch.setattr(
        captured, "make_problem", lambda *args, **how: problems.append(make_problem(*args, **how)) or problems[-1]
    )
    costs = []
    for made in (adamw, lion, momentum, sgd):
        model = make("cpu", SIZES)
        optimizer = made(model)
        autohete_fx.preview(
            model, training.batch("cpu", 0, sizes=SIZES), options={"profile": "analytic", "inner_backend": "eager"}
        )
        costs.append(problems[-1].costs)
        torch._dynamo.reset()
        del optimizer
    for adamw_, lion_, momentum_, sgd_ in zip(*costs, strict=True):
        assert adamw_.num_params == lion_.num_params == sgd_.num_params
        assert adamw_.optimizer_bytes == 2 * lion_.optimizer_bytes == 2 * momentum_.optimizer_bytes
        assert sgd_.optimizer_bytes == 0 and sgd_.grad_bytes == adamw_.grad_bytes
        trains = bool(adamw_.num_params)
        assert adamw_.update_share == 1.0 and lion_.update_share == momentum_.update_share == (
            20 / 28 if trains else 1.0
        )
        assert sgd_.update_share == (12 / 28 if trains else 1.0)


@pytest.mark.parametrize(
    ("made", "dtype", "expected"),
    [
        slow(adamw, torch.float32, {0.0}),
        (adamw, torch.bfloat16, {1.0}),
        slow(lion, torch.float16, {1.0}),
        (muon, torch.bfloat16, {0.0, 1.0}),  # matrices are updated whole
        slow(None, torch.bfloat16, {0.0}),
    ],
)
def test_plans_know_which_kernel_updates(
    made: Any, dtype: torch.dtype, expected: set[float], monkeypatch: pytest.MonkeyPatch
):
    problems: list[Problem] = []

    monkeypatch.setattr(
        captured, "make_problem", lambda *args, **how: problems.append(make_problem(*args, **how)) or problems[-1]
    )
    model = make("cpu", SIZES).to(dtype)
    optimizer = made(model) if made is not None else None
    options = {"profile": "analytic", "inner_backend": "eager"}
    autohete_fx.preview(model, training.batch("cpu", 0, sizes=SIZES), options=options)
    assert {cost.mixed_share for cost in problems[-1].costs if cost.num_params} == expected
    del optimizer


def test_plans_count_the_products_and_the_workspace_of_muon(monkeypatch: pytest.MonkeyPatch):
    """Four matrices a layer, of 256 x 256 to 256 x 1024, with a state each; the embedding and the head have two."""
    problems: list[Problem] = []
    monkeypatch.setattr(
        captured, "make_problem", lambda *args, **how: problems.append(make_problem(*args, **how)) or problems[-1]
    )
    model, batch = make("cpu", SIZES), training.batch("cpu", 0, sizes=SIZES)
    optimizer = muon(model)
    autohete_fx.preview(model, batch, options={"profile": "analytic", "inner_backend": "eager"})
    [*_, problem] = problems
    width, gram = 256, 2 * 256**3
    first, *layers, last = problem.costs
    for cost in layers:
        flops = tuple(5 * (4 * width * width * most + gram) for most in (width, 3 * width, 4 * width, 4 * width))
        assert cost.product_flops == flops and cost.optimizer_bytes == 4 * cost.num_params == 4 * 12 * width * width
    assert first.optimizer_bytes == 8 * first.num_params and last.optimizer_bytes == 8 * last.num_params
    assert not any((*first.product_flops, *last.product_flops))
    largest = 4 * width * width
    assert 6 * largest <= problem.update_workspace_bytes <= 12 * largest + 2**18
    # Two slots, each for a momentum and a parameter of fp32, and another workspace.
    assert problem.slot_bytes == 2 * (4 + 4) * largest + problem.update_workspace_bytes
    del optimizer
