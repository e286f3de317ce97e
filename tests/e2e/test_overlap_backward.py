"""Updates that start while backward runs: exact where they start, and left to ``step()`` where that would not be."""

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import BlockDecision, OptimizerStateError, Plan
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.planning import schedule_of
from autohete_fx.runtime.early import Early
from autohete_fx.runtime.fence import Fence
from autohete_fx.runtime.updates import Updates
from tests import training
from tests.held_updates import ALL_ON_HOST, OPTIMIZER_ON_HOST, Gate, Stack, labels, updates_of, use_lanes
from tests.main_job import slow
from tests.planner_problems import MACHINE
from tests.training import PLANS, assert_equal, make, ours, plain

X = torch.ones(8, 128)


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


def overlapping(decisions: tuple[BlockDecision, ...], names: tuple[str, ...], **schedule: Any) -> Plan:
    return Plan(labels=names, decisions=decisions, schedule=Schedule(overlap=Overlap.BACKWARD, **schedule))


# -- exactness ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_host", [slow(True), False], ids=["one memory", "two memories"])
@pytest.mark.parametrize("num_workers", [slow(1), 4])
@pytest.mark.parametrize("name", [n if n == "mixed" else slow(n) for n in PLANS])
def test_training_is_bitwise_exact_under_random_delays(
    name: str, num_workers: int, is_host: bool, monkeypatch: pytest.MonkeyPatch, started: list[bool]
):
    chance = random.Random(0)
    use_lanes(monkeypatch, num_update_workers=num_workers, is_host=is_host, pace=lambda ticket: chance.uniform(0, 0.02))
    plan = overlapping(PLANS[name], training.LABELS)
    given = ours(make("cpu"), "eager", {"plan": plan}, overlap="backward")
    assert_equal(given, plain(make("cpu"), "eager"), bitwise=True)
    updated_on_host = any(d.optimizer is autohete_fx.Optimizer.HOST for d in PLANS[name])
    assert any(started) == updated_on_host, "no update has started in backward"


@pytest.mark.slow
@pytest.mark.parametrize("is_host", [True, False], ids=["one memory", "two memories"])
def test_training_with_inductor_is_bitwise_that_of_updates_that_start_at_the_step(
    is_host: bool, monkeypatch: pytest.MonkeyPatch, started: list[bool]
):
    chance = random.Random(0)
    use_lanes(monkeypatch, is_host=is_host, pace=lambda ticket: chance.uniform(0, 0.02))
    plan = overlapping(PLANS["mixed"], training.LABELS)
    given = ours(make("cpu"), "inductor", {"plan": plan}, overlap="backward")
    assert sum(started) >= 3 * 4
    plan = dataclasses.replace(plan, schedule=Schedule(overlap=Overlap.STEP))
    assert_equal(given, ours(make("cpu"), "inductor", {"plan": plan}), bitwise=True)


@pytest.mark.slow
def test_a_bf16_model_trains_as_without_overlap(monkeypatch: pytest.MonkeyPatch, started: list[bool]):
    sizes = training.Sizes(width=128)  # 16-bit parameters of narrower layers are too small to move
    expected = ours(make("cpu", sizes).bfloat16(), "eager", {"plan": training.plan("mixed")}, sizes=sizes)
    chance = random.Random(0)
    use_lanes(monkeypatch, pace=lambda ticket: chance.uniform(0, 0.02), is_host=False)
    plan = dataclasses.replace(training.plan("mixed"), schedule=Schedule(overlap=Overlap.BACKWARD))
    given = ours(make("cpu", sizes).bfloat16(), "eager", {"plan": plan}, overlap="backward", sizes=sizes)
    assert_equal(given, expected, bitwise=True)
    assert any(started)


# -- when they start ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _fresh_code() -> None:
    torch._dynamo.reset()


class Loop:
    """A stack that has taken two steps, and a twin that takes the same without overlap."""

    def __init__(
        self, gate: Gate, decision: BlockDecision = OPTIMIZER_ON_HOST, options: dict[str, Any] | None = None, **how: Any
    ) -> None:
        self.gate = gate
        self.model, self.twin = Stack(), Stack()
        self.optimizer = autohete_fx.AdamW(self.model.parameters(), lr=1e-2, overlap="backward", **how)
        self.reference = torch.optim.AdamW(self.twin.parameters(), lr=1e-2, fused=True)
        names = labels()
        given = {
            "inner_backend": "eager",
            "profile": "analytic",
            "plan": overlapping((decision,) * len(names), names),
            **(options or {}),
        }
        self.model.compile(backend="autohete", options=given)
        for _ in range(2):
            self.step()
        self.optimizer.synchronize()

    def pairs(self) -> list[tuple[Stack, torch.optim.Optimizer]]:
        return [(self.twin, self.reference), (self.model, self.optimizer)]

    def step(self) -> None:
        for model, optimizer in self.pairs():
            model(X).backward()
            optimizer.step()
            optimizer.zero_grad()

    @property
    def updates(self) -> Updates:
        return updates_of(self.model)

    def both(self, act: Callable[[Stack, torch.optim.Optimizer], Any]) -> None:
        """The same with the model and its twin, and then another step of both; parameters and states agree."""
        found, expected = (act(model, optimizer) for model, optimizer in reversed(self.pairs()))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        self.step()
        torch.testing.assert_close(self.model.state_dict(), self.twin.state_dict(), rtol=0, atol=0)
        states = [optimizer.state_dict()["state"] for _, optimizer in self.pairs()]
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


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


@pytest.mark.slow
def test_the_first_step_and_the_first_one_after_loading_start_at_the_step(gate: Gate, started: list[bool]):
    loop = Loop(gate)
    assert started == [True] * 4, "the second step's"
    loop.optimizer.load_state_dict(loop.optimizer.state_dict())
    loop.step()
    assert started == [True] * 4 + [False] * 4
    loop.both(lambda model, optimizer: None)


def test_plans_know_when_the_optimizer_starts_updates():
    params = list(Stack().parameters())
    gpu = dataclasses.replace(MACHINE, device_type="cuda")
    for asked in Overlap:
        optimizer = autohete_fx.AdamW(params, overlap=None if asked is Overlap.NONE else asked.value)
        assert schedule_of(params, gpu).overlap is asked is optimizer.overlap
        assert schedule_of(params, dataclasses.replace(gpu, device_type="cpu")).overlap is Overlap.NONE


# -- what is left to the step -------------------------------------------------------------------------------------------


def backward_and_step(loss: Tensor, optimizer: torch.optim.Optimizer, **how: Any) -> None:
    loss.backward(**how)
    optimizer.step()
    optimizer.zero_grad()


def sum_of_two_batches(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    backward_and_step(model(X) + model(2 * X), optimizer)


def parameter_used_outside(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    penalty = sum(p.square().sum() for p in model.parameters() if p.ndim == 2)
    backward_and_step(model(X) + 0.1 * penalty, optimizer)


def graph_kept(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    loss = model(X)
    loss.backward(retain_graph=True)
    backward_and_step(loss, optimizer)


def hooked(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    hooks = [p.register_hook(lambda grad: grad * 0.5) for p in model.parameters()]
    backward_and_step(model(X), optimizer)
    for hook in hooks:
        hook.remove()


def named_inputs(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    backward_and_step(model(X), optimizer, inputs=list(model.parameters()))


def gradients_asked_for(model: Stack, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return list(torch.autograd.grad(model(X), list(model.parameters())))


def gradients_there_already(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    backward_and_step(model(X), optimizer)


def parameters_in_one_memory(model: Stack, optimizer: torch.optim.Optimizer) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    for _ in range(2):
        backward_and_step(model(X), optimizer)


LEFT = [
    sum_of_two_batches,
    parameter_used_outside,
    graph_kept,
    hooked,
    named_inputs,
    gradients_asked_for,
    gradients_there_already,
    parameters_in_one_memory,
]


@pytest.mark.parametrize("act", [sum_of_two_batches, *map(slow, LEFT[1:])], ids=lambda act: act.__name__)
def test_what_is_not_all_of_a_gradient_starts_no_update(
    act: Callable[[Stack, torch.optim.Optimizer], Any], gate: Gate, started: list[bool]
):
    with torch._functorch.config.patch(donated_buffer=False):  # else PyTorch refuses to keep the graph
        loop = Loop(gate)
        started.clear()
        loop.both(act)
    starts = [True] * 4  # of the step behind it, unless parameters are no longer where they were
    assert started[-4:] == starts or act is parameters_in_one_memory
    assert not any(started[:-4])


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


# -- what comes too late ------------------------------------------------------------------------------------------------


def weight_of(model: Stack) -> nn.Parameter:
    return model.layers[1][0].weight


def gradient_of(model: Stack) -> Tensor:
    grad = weight_of(model).grad
    assert grad is not None
    return grad


def unscale(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))  # makes its state
    scaler.unscale_(loop.optimizer)


def replace_gradient(loop: Loop) -> None:
    weight_of(loop.model).grad = gradient_of(loop.model) * 0.5
    loop.optimizer.step()


def zero_gradients(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.optimizer.step()


def swap_data(loop: Loop) -> None:
    gradient_of(loop.model).data = torch.zeros(128, 128)
    loop.optimizer.step()


def step_with_another(loop: Loop) -> None:
    latest = autohete_fx.AdamW(loop.model.parameters(), overlap="backward")
    assert latest.overlap is Overlap.BACKWARD
    loop.optimizer.step()


def evaluate(loop: Loop) -> None:
    with torch.no_grad():
        loop.model(X)


def change(**values: Any) -> Callable[[Loop], None]:
    def act(loop: Loop) -> None:
        loop.optimizer.param_groups[0].update(values)
        loop.optimizer.step()

    return act


def schedule_rate(loop: Loop) -> None:
    torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 0.5)
    loop.optimizer.step()


EDITS: dict[str, Callable[[Loop], Any]] = {
    "clip": lambda loop: nn.utils.clip_grad_norm_(loop.model.parameters(), 1e9),
    "clip by value": lambda loop: nn.utils.clip_grad_value_(loop.model.parameters(), 1e9),
    "unscale": unscale,
    "in place": lambda loop: gradient_of(loop.model).mul_(0.5),
    "in place, its data": lambda loop: gradient_of(loop.model).data.mul_(0.5),
    "in place, a view": lambda loop: gradient_of(loop.model).detach()[0].zero_(),
    "in place, many": lambda loop: torch._foreach_mul_([p.grad for p in loop.model.parameters()], 0.5),
    "out": lambda loop: torch.mul(torch.ones(128, 128), 2, out=gradient_of(loop.model)),
    "zeroed": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "dropped": zero_gradients,
    "replaced": replace_gradient,
    "other data": swap_data,
    "rate": change(lr=1e-3),
    "betas": change(betas=(0.5, 0.9)),
    "weight decay": change(weight_decay=0.5),
    "scheduler": schedule_rate,
    "another optimizer": step_with_another,
    "read": lambda loop: weight_of(loop.model).norm(),
    "write": lambda loop: weight_of(loop.model).data.mul_(2),
    "state": lambda loop: loop.optimizer.state[weight_of(loop.model)]["exp_avg"].sum(),
    "state_dict": lambda loop: loop.optimizer.state_dict(),
    "model.state_dict": lambda loop: loop.model.state_dict(),
    "another backward": lambda loop: weight_of(loop.model).sum().backward(),
    "another forward": lambda loop: loop.model(X),
    "evaluation": evaluate,
    "eager forward": lambda loop: Stack.forward(loop.model, X),
    "compiled by another": lambda loop: torch.compile(lambda: weight_of(loop.model) * 2, backend="aot_eager")(),
}


@pytest.mark.parametrize("name", [n if n in ("clip", "rate", "read") else slow(n) for n in EDITS])
def test_what_comes_too_late_is_an_error_that_says_what_to_do(name: str, gate: Gate):
    loop = Loop(gate)
    loop.model(X).backward()
    with pytest.raises(OptimizerStateError, match=r"between backward\(\) and optimizer.step\(\).*overlap='step'"):
        EDITS[name](loop)
    if name not in ("rate", "betas", "weight decay", "scheduler"):
        return
    with pytest.raises(OptimizerStateError, match=r"was changed from .* to "):
        loop.optimizer.step()


@pytest.mark.slow
def test_the_fence_stands_once(gate: Gate):
    loop = Loop(gate)
    loop.step()
    loop.model(X)
    modes = torch.overrides._get_current_function_mode_stack()
    assert sum(isinstance(mode, Fence) and mode.updates is loop.updates for mode in modes) == 1


@pytest.mark.slow
def test_gradients_may_be_read_and_parameters_looked_at(gate: Gate):
    loop = Loop(gate)

    def act(model: Stack, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        model(X).backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        average = torch.ones(128, 128).lerp_(gradient_of(model), 0.1)
        total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert weight_of(model).shape == (128, 128) and weight_of(model).requires_grad
        assert len(list(model.parameters())) == 8 and gradient_of(model).data.sum() == gradient_of(model).sum()
        optimizer.step()
        return [*norms, total, average, gradient_of(model).clone()]

    loop.both(act)


@pytest.mark.slow
def test_an_error_does_not_go_away_until_a_checkpoint_is_loaded(gate: Gate):
    loop = Loop(gate)
    checkpoint = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    loop.model(X).backward()
    data = gradient_of(loop.model).data
    with pytest.raises(OptimizerStateError):
        data.mul_(0.5)
    for _ in range(2):
        with pytest.raises(OptimizerStateError, match="was written to"):
            loop.optimizer.step()
    with pytest.raises(OptimizerStateError, match="was used"):
        loop.model(X)
    loop.optimizer.load_state_dict(checkpoint[1])
    loop.model.load_state_dict(checkpoint[0])
    loop.optimizer.zero_grad()
    loop.both(lambda model, optimizer: None)


@pytest.mark.slow
def test_a_backward_that_fails_in_the_middle_is_noticed(gate: Gate):
    loop = Loop(gate)
    x = X.clone().requires_grad_()
    y = x * 1
    y.register_hook(lambda grad: 1 / 0)  # behind the model's own backward
    with pytest.raises(ZeroDivisionError):
        loop.model(y).backward()
    with pytest.raises(OptimizerStateError, match="was used"):
        loop.model(X)


@pytest.mark.slow
def test_who_has_saved_a_parameter_does_not_go_on_with_the_updated_one(gate: Gate):
    loop = Loop(gate)
    x = X.clone().requires_grad_()
    scaled = x * weight_of(loop.model).detach()[:8]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loop.model(scaled).backward()


# -- micro-batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", [OPTIMIZER_ON_HOST, slow(ALL_ON_HOST)], ids=["device", "host"])
def test_gradients_of_micro_batches_are_collected(decision: BlockDecision, gate: Gate, started: list[bool]):
    loop = Loop(gate, decision)
    started.clear()

    def act(model: Stack, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses = []
        collecting = optimizer.accumulate if isinstance(optimizer, autohete_fx.AdamW) else contextlib.nullcontext
        with collecting():
            for scale in (0.5, 2.0):
                losses.append(model(scale * X))
                losses[-1].backward()
        losses.append(model(3 * X))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.detach() for loss in losses]

    loop.both(act)
    assert started == [False] * 12 + [True] * 4


def test_micro_batches_that_nobody_announced_are_an_error(gate: Gate):
    loop = Loop(gate)
    loop.model(X).backward()
    with pytest.raises(OptimizerStateError, match=r"optimizer.accumulate\(\) around all micro-batches but the last"):
        loop.model(2 * X).backward()
