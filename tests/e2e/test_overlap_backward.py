"""Updates that start while backward runs: exact where they start, and left to ``step()`` where that would not be."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import BlockDecision
from autohete_fx.compiler.problem import schedule_of
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.runtime.pending.backward import Early
from tests import training
from tests.early_updates import Loop, X, overlapping
from tests.held_updates import ALL_ON_HOST, OPTIMIZER_ON_HOST, Gate, Stack, random_delays, use_lanes
from tests.main_job import slow
from tests.planner_problems import MACHINE
from tests.thorough import thorough
from tests.training import PLANS, WITHOUT_UPDATES, assert_equal, make, ours, plain


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each node that might have started an update whether it did."""
    found: list[bool] = []
    start = Early.start

    def note(early: Early, *args: Any) -> bool:
        found.append(start(early, *args))
        return found[-1]

    monkeypatch.setattr(Early, "start", note)
    yield found


# -- exactness ----------------------------------------------------------------------------------------------------------


OPPOSITES = [((4, False), (1, True)), ((4, True), (1, False)), ((1, True), (4, False)), ((1, False), (4, True))]


def under_delays() -> Iterator[Any]:
    """Every plan with updates, with each number of workers and each number of memories; of those without, that start none, one:
    elsewhere they are the same as with updates that begin at the step. The second case of a plan is thorough, but for the
    mixed one."""
    names = sorted(set(PLANS) - set(WITHOUT_UPDATES), key=lambda name: (name != "mixed", name))
    cases = [(name, *lanes, at) for index, name in enumerate(names) for at, lanes in enumerate(OPPOSITES[index % 4])]
    for name, num_workers, is_host, at in [*cases, ("offload", 4, False, 0)]:
        label = f"{name}-{num_workers}-{'one memory' if is_host else 'two memories'}"
        is_quick = name == "mixed" and not is_host
        rest = pytest.mark.thorough if at and name != "mixed" else pytest.mark.slow
        yield pytest.param(name, num_workers, is_host, id=label, marks=[] if is_quick else [rest])


@pytest.mark.parametrize(("name", "num_workers", "is_host"), list(under_delays()))
def test_training_is_bitwise_exact_under_random_delays(
    name: str, num_workers: int, is_host: bool, monkeypatch: pytest.MonkeyPatch, started: list[bool]
):
    use_lanes(monkeypatch, num_update_workers=num_workers, is_host=is_host, pace=random_delays())
    plan = overlapping(PLANS[name], training.LABELS)
    given = ours(make("cpu"), "eager", {"plan": plan}, overlap="backward")
    assert_equal(given, plain(make("cpu"), "eager"), bitwise=True)
    updated_on_host = any(d.optimizer is autohete_fx.Optimizer.HOST for d in PLANS[name])
    assert any(started) == updated_on_host, "no update has started in backward"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_training_with_inductor_is_that_of_eager_code_and_bitwise_that_of_updates_that_start_at_the_step(
    monkeypatch: pytest.MonkeyPatch, started: list[bool]
):
    """In one memory and in two, the second time with the code of the first. What they are compared with is in two.

    Without dropout Inductor's kernels are compared with eager ones. In test_main_job.py Inductor has dropout, and above it is in
    updates that start in backward.
    """
    sizes = training.Sizes(layers=2)
    prologue, offloading, recomputing, _, epilogue = PLANS["mixed"]
    labels = tuple(label for label in training.LABELS if label != "layers.2")
    plan = overlapping((prologue, offloading, recomputing, epilogue), labels)
    at_the_step = dataclasses.replace(plan, schedule=Schedule(overlap=Overlap.STEP))
    use_lanes(monkeypatch, is_host=False, pace=random_delays())
    clipped = ours(make("cpu", sizes).eval(), "inductor", {"plan": at_the_step}, clip=True)
    assert_equal(clipped, plain(make("cpu", sizes).eval(), "eager", clip=True), bitwise=False)
    expected = ours(make("cpu", sizes).eval(), "inductor", {"plan": at_the_step})
    assert training.training_compilation().cached and not any(started)
    for is_host in (True, False):
        use_lanes(monkeypatch, is_host=is_host, pace=random_delays())
        started.clear()
        given = ours(make("cpu", sizes).eval(), "inductor", {"plan": plan}, overlap="backward")
        assert sum(started) >= 3 * 4
        assert training.training_compilation().cached == (not is_host)
        assert_equal(given, expected, bitwise=True)


@pytest.mark.slow
def test_a_bf16_model_trains_as_eager_code_does(monkeypatch: pytest.MonkeyPatch, started: list[bool]):
    sizes = training.Sizes(width=128)  # 16-bit parameters of narrower layers are too small to move
    expected = training.uncompiled(make("cpu", sizes).bfloat16().eval(), sizes=sizes)
    use_lanes(monkeypatch, pace=random_delays(), is_host=False)
    plan = dataclasses.replace(training.plan("mixed"), schedule=Schedule(overlap=Overlap.BACKWARD))
    model = make("cpu", sizes).bfloat16().eval()
    given = ours(model, "eager", {"plan": plan}, overlap="backward", sizes=sizes)
    assert_equal(given, expected, bitwise=True)
    assert any(started)


# -- when they start ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _fresh_code() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("decision", [OPTIMIZER_ON_HOST, slow(ALL_ON_HOST)], ids=["device", "host"])
def test_updates_start_before_the_step_and_the_first_block_goes_first(
    decision: BlockDecision, gate: Gate, started: list[bool]
):
    loop = Loop(gate, decision)
    started.clear()
    gate.opened.clear()
    model, optimizer = loop.model, loop.optimizer
    model(X).backward()
    assert started == [True] * 4 and loop.updates.is_pending
    optimizer.step()
    gate.opened.set()
    optimizer.synchronize()
    latest = [r.priority for r in loop.updates.lanes.records() if r.lane is Lane.UPDATE][-4:]
    assert sorted(latest) == [1, 2, 3, 4]
    assert latest[1:] == sorted(latest[1:]), "one has begun when the others come; of these the first block goes first"


def test_a_graph_whose_sizes_are_symbolic_updates_what_its_gradients_are_of(gate: Gate, started: list[bool]):
    """As a last batch that is smaller makes Dynamo compile: sizes come before parameters then, and are no tensors."""
    loop = Loop(gate)
    started.clear()

    def smaller(model: Stack, optimizer: torch.optim.Optimizer) -> None:
        for num_rows in (7, 5):
            model(X[:num_rows]).backward()
            optimizer.step()
            optimizer.zero_grad()

    loop.both(smaller)
    assert len(started) == 3 * 4 and all(started)


@pytest.mark.slow
def test_the_first_step_and_the_first_one_after_loading_start_at_the_step(gate: Gate, started: list[bool]):
    loop = Loop(gate)
    assert started[-4:] == [True] * 4, "the second step's"
    assert not any(started[:-4])
    started.clear()
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    loop.step()
    assert started == [False] * 4
    loop.both(lambda model, optimizer: None)


def test_plans_know_when_the_optimizer_starts_updates():
    params = list(Stack().parameters())
    gpu = dataclasses.replace(MACHINE, device_type="cuda")
    for asked in Overlap:
        optimizer = autohete_fx.AdamW(params, overlap=None if asked is Overlap.NONE else asked.value)
        assert schedule_of(params, gpu).overlap is asked is optimizer.overlap
        assert schedule_of(params, dataclasses.replace(gpu, device_type="cpu")).overlap is Overlap.NONE


# -- what is left to the step -------------------------------------------------------------------------------------------


def backward_and_step(loss: Tensor, optimizer: torch.optim.Optimizer, sets_to_none: bool = True, **how: Any) -> None:
    loss.backward(**how)
    optimizer.step()
    optimizer.zero_grad(set_to_none=sets_to_none)


def sum_of_two_batches(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    backward_and_step(model(X) + model(2 * X), optimizer)


def parameter_used_outside(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    penalty = sum(p.square().sum() for p in model.parameters() if p.ndim == 2)
    backward_and_step(model(X) + 0.1 * penalty, optimizer)


def hooked(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    hooks = [p.register_hook(lambda grad: grad * 0.5) for p in model.parameters()]
    backward_and_step(model(X), optimizer)
    for hook in hooks:
        hook.remove()


def named_inputs(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    backward_and_step(model(X), optimizer, inputs=list(model.parameters()))


def gradients_asked_for(model: Stack, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(torch.autograd.grad(model(X), list(model.parameters())))


def gradients_in_one_memory(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    weights = [p for p in model.parameters() if p.ndim == 2]
    both = torch.ones(len(weights), *weights[0].shape)
    for p, grad in zip(weights, both, strict=True):
        p.grad = grad
    backward_and_step(model(X), optimizer)


def parameters_in_one_memory(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    for _ in range(2):
        backward_and_step(model(X), optimizer)


LEFT = [
    sum_of_two_batches,
    parameter_used_outside,
    hooked,
    named_inputs,
    gradients_asked_for,
    gradients_in_one_memory,
    parameters_in_one_memory,
]


@pytest.mark.parametrize("act", [sum_of_two_batches, *map(slow, LEFT[1:])], ids=lambda act: act.__name__)
def test_what_is_not_all_of_a_gradient_starts_no_update(
    act: Callable[[Stack, torch.optim.Optimizer], Any], gate: Gate, started: list[bool]
):
    loop = Loop(gate)
    started.clear()
    loop.both(act)
    starts = [True] * 4  # of the step behind it, unless parameters are no longer where they were
    assert started[-4:] == starts or act is parameters_in_one_memory
    assert not any(started[:-4])


@pytest.mark.slow
def test_a_graph_that_is_kept_starts_updates_in_its_last_pass(gate: Gate, started: list[bool]):
    def act(model: Stack, optimizer: torch.optim.Optimizer) -> None:
        loss = model(X)
        loss.backward(retain_graph=True)
        assert not any(started) or model is loop.twin
        backward_and_step(loss, optimizer)

    with torch._functorch.config.patch(donated_buffer=False):  # else PyTorch refuses to keep the graph
        loop = Loop(gate)
        started.clear()
        loop.both(act)
    assert started == [True] * 8


@pytest.mark.slow
def test_a_step_within_backward_is_over_when_it_returns(gate: Gate, started: list[bool]):
    loop = Loop(gate)
    started.clear()

    def act(model: Stack, optimizer: torch.optim.Optimizer) -> None:
        x = X.clone().requires_grad_()
        x.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        model(x).backward()
        optimizer.zero_grad()

    act(loop.model, loop.optimizer)
    assert not loop.updates.is_pending and not any(started)


# -- micro-batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_host", [True, slow(False)], ids=["one memory", "two memories"])
@pytest.mark.parametrize("decision", [OPTIMIZER_ON_HOST, slow(ALL_ON_HOST)], ids=["device", "host"])
def test_the_last_micro_batch_adds_and_updates(
    decision: BlockDecision, is_host: bool, gate: Gate, monkeypatch: pytest.MonkeyPatch, started: list[bool]
):
    use_lanes(monkeypatch, is_host=is_host, pace=gate)
    loop = Loop(gate, decision)
    started.clear()

    def act(model: Stack, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        seen: list[Tensor] = []
        with training.collecting(optimizer):
            for scale in (0.5, 2.0):
                seen.append(model(scale * X))
                seen[-1].backward()
        collected = [p.grad for p in model.parameters()]
        seen.append(model(3 * X))
        seen[-1].backward()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), collected, strict=True))
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        return [t.detach() for t in seen]

    loop.both(act)
    assert started == [False] * 8 + [True] * 8


@pytest.mark.parametrize("is_host", [slow(True), False], ids=["one memory", "two memories"])
@pytest.mark.parametrize("how", [slow("zeroed in place"), "given"])
def test_gradients_that_are_there_are_added_to(
    how: str, is_host: bool, gate: Gate, monkeypatch: pytest.MonkeyPatch, started: list[bool]
):
    """Those that somebody put on a device with memory of its own are left to the step."""
    use_lanes(monkeypatch, is_host=is_host, pace=gate)
    loop = Loop(gate)
    started.clear()

    def act(model: Stack, optimizer: torch.optim.Optimizer) -> None:
        if how == "given":
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1)
        else:
            backward_and_step(model(X), optimizer, sets_to_none=False)
        backward_and_step(model(2 * X), optimizer)

    loop.both(act)
    assert started[-8:] == [is_host or how != "given"] * 4 + [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "is_host"), [(torch.float32, False), thorough(torch.bfloat16, True)], ids=["fp32", "bf16"]
)
def test_training_with_micro_batches_is_bitwise_exact_under_random_delays(
    dtype: torch.dtype, is_host: bool, monkeypatch: pytest.MonkeyPatch, started: list[bool]
):
    """In two memories and in one. With dropout, but for 16-bit parameters."""
    sizes = training.SMALL if dtype is torch.float32 else training.Sizes(width=128)
    how: dict[str, Any] = {"micro_batches": 3, "sizes": sizes}
    use_lanes(monkeypatch, is_host=is_host, pace=random_delays())
    options = {"plan": overlapping(PLANS["mixed"], training.LABELS), "micro_batches": 3}
    model, twin = (make("cpu", sizes).to(dtype).train(dtype is torch.float32) for _ in range(2))
    given = ours(model, "eager", options, overlap="backward", **how)
    assert any(started)
    expected = plain(twin, "eager", **how) if twin.training else training.uncompiled(twin, **how)
    assert_equal(given, expected, bitwise=True)
