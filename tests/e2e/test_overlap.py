"""Updates that overlap the next forward: exact whatever the timing, and read by nobody before they are done."""

import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext

import autohete_fx
from autohete_fx import OptimizerStateError, Plan
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.optim.in_place import Update
from autohete_fx.runtime.pending.updates import Updates
from tests import training
from tests.held_updates import (
    ALL_ON_HOST,
    OPTIMIZER_ON_HOST,
    STEP,
    Gate,
    Stack,
    Training,
    eagerly,
    random_delays,
    saved,
    trained_under,
    use_lanes,
    weight_of,
)
from tests.main_job import slow
from tests.training import IDLE, PLANS, WITHOUT_UPDATES, assert_equal, make, ours, plain


def overlapping(name: str, **schedule: Any) -> Plan:
    return dataclasses.replace(training.plan(name), schedule=Schedule(overlap=Overlap.STEP, **schedule))


# -- exactness ----------------------------------------------------------------------------------------------------------


CLIPPING: dict[str, Any] = {"clip": True}
EVALUATING: dict[str, Any] = {"micro_batches": 2, "between": training.evaluate}
OPPOSITES = [  # of all eight, in pairs that differ in each value
    ((CLIPPING, 1, True), (EVALUATING, 4, False)),
    ((CLIPPING, 4, False), (EVALUATING, 1, True)),
    ((EVALUATING, 1, False), (CLIPPING, 4, True)),
    ((EVALUATING, 4, True), (CLIPPING, 1, False)),
]


def under_delays() -> Iterator[Any]:
    """Every plan with updates with each loop, each number of workers and each number of memories; one of these with each of those
    without that copy something. Over all plans, with all of them together. test_main_job.py has plans that leave lanes idle. The
    second loop of a plan is thorough, but for the mixed one."""
    for index, name in enumerate(sorted(set(PLANS) - set(IDLE), key=lambda name: (name != "mixed", name))):
        cases = OPPOSITES[index % 4][: 1 if name in WITHOUT_UPDATES else 2]
        for number, (how, num_workers, is_host) in enumerate(cases):
            words = (
                "clipping" if how is CLIPPING else "evaluating",
                num_workers,
                "one memory" if is_host else "two memories",
            )
            is_quick = name == "mixed" and is_host
            label = "-".join(map(str, (name, *words)))
            rest = pytest.mark.thorough if number and name != "mixed" else pytest.mark.slow
            yield pytest.param(name, how, num_workers, is_host, id=label, marks=[] if is_quick else [rest])


@pytest.mark.parametrize(("name", "how", "num_workers", "is_host"), list(under_delays()))
def test_training_is_bitwise_exact_under_random_delays(
    name: str, how: dict[str, Any], num_workers: int, is_host: bool, monkeypatch: pytest.MonkeyPatch
):
    use_lanes(monkeypatch, num_update_workers=num_workers, is_host=is_host, pace=random_delays())
    options = {"plan": overlapping(name), "micro_batches": how.get("micro_batches", 1)}
    given = ours(make("cpu"), "eager", options, **how)
    training.assert_copies(name)
    assert_equal(given, plain(make("cpu"), "eager", **how), bitwise=True)


@pytest.mark.slow
def test_a_bf16_model_trains_as_eager_code_does(monkeypatch: pytest.MonkeyPatch):
    sizes = training.Sizes(width=128)  # 16-bit parameters of narrower layers are too small to move
    expected = training.uncompiled(make("cpu", sizes).bfloat16().eval(), sizes=sizes)
    use_lanes(monkeypatch, pace=random_delays(), is_host=False)
    given = ours(make("cpu", sizes).bfloat16().eval(), "eager", {"plan": overlapping("mixed")}, sizes=sizes)
    assert_equal(given, expected, bitwise=True)


# -- who waits ----------------------------------------------------------------------------------------------------------


def averaged(model: nn.Module) -> list[Tensor]:
    averages = [torch.zeros_like(p) for p in model.parameters()]
    torch._foreach_lerp_(averages, list(model.parameters()), 0.5)
    return averages


def ones(model: nn.Module) -> Tensor:
    return torch.ones(128, 128, device=weight_of(model).device)


READS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "operator": lambda model, optimizer: weight_of(model) * 2,
    "method": lambda model, optimizer: weight_of(model).norm(),
    "item": lambda model, optimizer: weight_of(model)[0, 0].item(),
    "tolist": lambda model, optimizer: weight_of(model).tolist(),
    "numpy": lambda model, optimizer: weight_of(model).numpy(force=True).copy(),
    "data": lambda model, optimizer: weight_of(model).data.clone(),
    "data_ptr": lambda model, optimizer: torch.tensor(weight_of(model).data_ptr() != 0),
    "view": lambda model, optimizer: weight_of(model).view(-1)[:3],
    "deepcopy": lambda model, optimizer: copy.deepcopy(weight_of(model)),
    "print": lambda model, optimizer: torch.tensor(list(str(weight_of(model)).encode())),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "save": lambda model, optimizer: saved(model.state_dict()),
    "save a parameter": lambda model, optimizer: saved(weight_of(model)),
    "optimizer state": lambda model, optimizer: optimizer.state[weight_of(model)]["exp_avg"] * 1,
    "optimizer state_dict": lambda model, optimizer: copy.deepcopy(optimizer.state_dict()["state"]),
    "average": lambda model, optimizer: averaged(model),
    "vector": lambda model, optimizer: nn.utils.parameters_to_vector(model.parameters()),
    "operator of a library": lambda model, optimizer: torch.ops.aten.mul.Tensor(weight_of(model), 2),
    "eager forward": lambda model, optimizer: eagerly(model),
    "to": lambda model, optimizer: weight_of(model).to(torch.float64),
    "out": lambda model, optimizer: torch.mul(
        ones(model), weight_of(model).detach(), out=torch.empty_like(ones(model))
    ),
    "keyword": lambda model, optimizer: torch.mul(input=ones(model), other=weight_of(model)),
}


@pytest.fixture(scope="module")
def held(request: pytest.FixtureRequest) -> Iterator[Training]:
    """One for all reads of a plan."""
    with trained_under(request.param) as state:
        yield state


@pytest.mark.keeps_compiled
@pytest.mark.parametrize("held", [OPTIMIZER_ON_HOST, slow(ALL_ON_HOST)], ids=["device", "host"], indirect=True)
@pytest.mark.parametrize("name", READS)
def test_a_read_waits_for_the_update(name: str, held: Training):
    held.hold()
    held.assert_waits(READS[name])


def test_views_made_before_the_step_wait_too(gate: Gate):
    state = Training(gate, warm_steps=1)
    gate.opened.set()
    views = [weight.detach()[1:, ::2] for weight in state.weights]
    state.hold()
    views_of = dict(zip((id(state.model), id(state.twin)), views, strict=True))
    state.assert_waits(lambda model, optimizer: views_of[id(model)].sum())


def test_a_write_between_steps_counts(gate: Gate):
    def write(model: nn.Module, optimizer: object) -> None:
        with torch.no_grad():
            weight_of(model).mul_(2)

    state = Training(gate)
    state.assert_waits(write)
    state.step()
    assert torch.equal(*state.weights)


def test_metadata_and_dropping_gradients_wait_for_nothing(gate: Gate):
    state = Training(gate)
    weight, _ = state.weights
    assert weight.shape == (128, 128) and weight.requires_grad and weight.is_leaf and weight.numel() == 128**2
    assert list(state.model.parameters()) and weight.grad is None
    state.optimizer.zero_grad()
    state.model.zero_grad()
    assert not gate.opened.is_set() and state.updates.is_pending


def test_zeroing_gradients_in_place_waits(gate: Gate):
    state = Training(gate)
    gate.opened.set()
    state.twin(torch.ones(8, 128)).backward()
    state.reference.step()
    state.model(torch.ones(8, 128)).backward()
    gate.opened.clear()
    state.optimizer.step()
    timer = gate.open_soon()
    state.optimizer.zero_grad(set_to_none=False)
    assert gate.opened.is_set()
    timer.join()
    assert torch.equal(*state.weights)


def test_a_rate_that_changes_behind_the_step_is_the_next_steps(gate: Gate):
    state = Training(gate)
    for group in (*state.optimizer.param_groups, *state.reference.param_groups):
        group["lr"] = 1e-4
    gate.opened.set()
    state.step()
    assert torch.equal(*state.weights)


def test_the_compiled_forward_waits_block_by_block(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    """While the gate holds the updates, forward gets as far as the first block and no further."""
    state = Training(gate)
    waited = threading.Event()
    wait_for = Updates.wait_for

    def note(updates: Updates, t: Tensor) -> None:
        waited.set()
        wait_for(updates, t)

    monkeypatch.setattr(Updates, "wait_for", note)
    timer = gate.open_soon()
    before = autohete_fx.compilations()[-1]
    state.step()
    assert waited.is_set() and gate.opened.is_set()
    timer.join()
    assert autohete_fx.compilations()[-1] is before, "the fence must not be seen by guards"
    assert torch.equal(*state.weights)


@pytest.mark.parametrize("backend", ["aot_eager", slow("autohete")])
def test_another_compiled_function_waits(backend: str, gate: Gate):
    state = Training(gate)

    def read(model: nn.Module, optimizer: object) -> Tensor:
        with torch.no_grad():
            return torch.compile(lambda w: w * 2, backend=backend)(weight_of(model))

    state.assert_waits(read)


@pytest.mark.slow
def test_a_function_that_was_compiled_before_waits(gate: Gate):
    doubled = torch.compile(lambda w: w * 2, backend="aot_eager")
    doubled(torch.ones(128, 128, requires_grad=True))
    Training(gate).assert_waits(lambda model, optimizer: doubled(weight_of(model)))


def test_an_evaluation_graph_waits(gate: Gate):
    def evaluate(model: nn.Module, optimizer: object) -> Tensor:
        with torch.no_grad():
            return model(torch.ones(8, 128))

    state = Training(gate)
    gate.opened.set()
    for model in (state.twin, state.model):
        evaluate(model, None)  # compiles
    state.hold()
    timer = gate.open_soon()
    found = evaluate(state.model, None)
    assert gate.opened.is_set()
    timer.join()
    assert torch.equal(found, evaluate(state.twin, None))


@pytest.mark.slow
def test_a_model_with_graph_breaks_is_exact_and_does_not_overlap_its_forward(
    gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("autohete_fx.ir.problem.Schedule", lambda: STEP)
    with caplog.at_level(logging.INFO, logger="autohete_fx"):
        gate.opened.set()
        state = Training(gate, breaks=True)
    assert "graph breaks" in caplog.text
    gate.opened.set()
    state.step()
    for ours_param, plain_param in zip(state.model.parameters(), state.twin.parameters(), strict=True):
        torch.testing.assert_close(ours_param, plain_param, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_training_step_is_exact(gate: Gate):
    """``step()`` inside a compiled function: what follows it in there is not guarded, so nothing overlaps."""
    gate.opened.set()
    results = []
    for backend in ("autohete", "aot_eager"):
        model = Stack()
        optimizer: torch.optim.Optimizer = (
            autohete_fx.AdamW(model.parameters(), lr=1e-2)
            if backend == "autohete"
            else torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        )

        def train_step(x: Tensor, model: Stack = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach() + sum(p.sum() for p in model.parameters()).detach()

        compiled = torch.compile(train_step, backend=backend)
        results.append([compiled(torch.full((8, 128), float(step))) for step in range(4)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_modes_of_the_user_stand_above_the_fence(gate: Gate):
    with torch.device("cpu"):
        state = Training(gate)
    state.assert_waits(READS["operator"])
    state.hold()
    torch.set_default_device("cpu")
    try:
        state.assert_waits(READS["operator"])
    finally:
        torch.set_default_device(None)
    with DeviceContext(torch.device("cpu")):
        state.hold()
    state.assert_waits(READS["method"])


@pytest.mark.slow
def test_synchronize_waits_and_no_overlap_is_asked_for_with_none(gate: Gate):
    state = Training(gate)
    timer = gate.open_soon()
    state.optimizer.synchronize()
    assert gate.opened.is_set() and not state.updates.is_pending
    timer.join()
    state.optimizer.overlap = Overlap.NONE
    gate.opened.clear()
    timer = gate.open_soon()
    state.step()
    assert gate.opened.is_set() or not state.updates.is_pending
    timer.join()
    with pytest.raises(OptimizerStateError, match="expected 'step', 'backward' or None"):
        autohete_fx.AdamW(state.model.parameters(), overlap="sometimes")


def test_updates_are_done_in_the_order_in_which_forward_needs_them(gate: Gate):
    state = Training(gate)
    gate.opened.set()
    state.optimizer.synchronize()
    latest = [r.priority for r in state.updates.lanes.records() if r.lane is Lane.UPDATE][-4:]
    assert latest == sorted(latest) and len(set(latest)) == 4


def test_the_trace_shows_what_the_lanes_did(gate: Gate):
    state = Training(gate)
    gate.opened.set()
    for _ in range(3):
        state.step()
    state.optimizer.synchronize()
    trace = training.training_compilation().trace()
    labels = {(r.lane, r.label) for r in trace.records}
    assert {(Lane.UPDATE, "update"), (Lane.D2H, "offload")} <= labels
    assert trace.num_steps >= 2 and (trace.busy_s(Lane.UPDATE) or 0) > 0
    assert "update" in trace.lanes_table() and trace.planned


def test_updates_on_the_host_begin_before_those_on_the_device(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    """They wait for gradients only. Biases are too small to leave the device."""
    state = Training(gate)
    gate.opened.set()
    state.optimizer.synchronize()
    begun: list[bool] = []

    def note(updates: Iterable[Update], _: object) -> None:
        begun.append(state.updates.is_pending and len(list(updates)) == 4)

    monkeypatch.setattr("autohete_fx.optim.updates.apply_in_place", note)
    gate.opened.clear()
    state.step()
    assert begun == [True]
