"""What comes too late for updates that start while backward runs is an error, and what does not is none."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import OptimizerStateError
from autohete_fx.ir import Overlap
from autohete_fx.runtime.pending.fence import Fence
from tests.early_updates import Loop, X
from tests.held_updates import Gate, Stack
from tests.main_job import slow


@pytest.fixture(autouse=True)
def _fresh_code() -> None:
    torch._dynamo.reset()


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


@pytest.mark.slow
def test_micro_batches_that_nobody_announced_are_an_error(gate: Gate):
    loop = Loop(gate)
    loop.model(X).backward()
    with pytest.raises(OptimizerStateError, match=r"optimizer.accumulate\(\) around all micro-batches but the last"):
        loop.model(2 * X).backward()


# -- functions that another backend compiles ------------------------------------------------------------------------------


def accuracy(found: Tensor, expected: Tensor) -> Tensor:
    return (found.argmax(-1) == expected.argmax(-1)).float().mean()


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.norm() for grad in grads]).norm()


def halved(grad: Tensor) -> Tensor:
    return grad.mul_(0.5)


def broken(x: Tensor, read: Callable[[], Tensor]) -> Tensor:
    return x + torch.compiler.disable(read)()


@pytest.mark.parametrize("is_known", [slow(True), False], ids=["known", "new"])
def test_what_others_compile_may_run_where_it_touches_nothing(is_known: bool, gate: Gate):
    loop = Loop(gate)
    metric, norm = (torch.compile(function, backend="aot_eager") for function in (accuracy, norm_of))
    if is_known:
        metric(X, X)
        norm([torch.ones(128, 128)] * 4)
        norm([torch.ones(128, 128), torch.ones(128)] * 4)

    def act(model: Stack, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        model(X).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found = [metric(X, X), norm(grads)]
        optimizer.step()
        optimizer.zero_grad()
        return found

    loop.both(act)


@pytest.mark.parametrize("is_known", [slow(True), False], ids=["known", "new"])
def test_what_others_compile_may_not_write_gradients(is_known: bool, gate: Gate):
    loop = Loop(gate)
    write = torch.compile(halved, backend="aot_eager")
    if is_known:
        write(torch.ones(128, 128))
    loop.model(X).backward()
    with pytest.raises(OptimizerStateError, match="was written to between"):
        write(gradient_of(loop.model))


def test_what_nobody_sees_of_others_spoils_the_step(gate: Gate):
    """Eager code beside a graph: it is not known before it has run."""
    loop = Loop(gate)
    function = torch.compile(broken, backend="aot_eager")
    loop.model(X).backward()
    function(X, lambda: weight_of(loop.model).sum())
    with pytest.raises(OptimizerStateError, match="in reach of a compiled function with graph breaks between"):
        loop.optimizer.step()
    with pytest.raises(OptimizerStateError, match="that may use any parameter was called between"):
        function(X, lambda: X)


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_another_model_may_be_compiled_before_the_step(is_spoilt: bool, gate: Gate):
    """In a notebook the traceback of a failed cell keeps its model, and the corrected cell makes another."""
    loop = Loop(gate)

    def act(model: Stack, optimizer: torch.optim.Optimizer) -> None:
        model(X).backward()
        if model is loop.model and is_spoilt:
            with pytest.raises(OptimizerStateError):
                gradient_of(model).mul_(0.5)
        if model is loop.model:
            torch.testing.assert_close(*map(trained_anew, (True, False)), rtol=0, atol=0)
        optimizer.step()
        optimizer.zero_grad()

    if not is_spoilt:
        loop.both(act)
        return
    with pytest.raises(OptimizerStateError, match="was written to between"):
        loop.both(act)
    with pytest.raises(OptimizerStateError, match="was used between"):
        loop.model(X)


def trained_anew(compiled: bool) -> dict[str, Tensor]:
    """Of another model, after two steps."""
    model = Stack()
    optimizer: Any = autohete_fx.AdamW if compiled else torch.optim.AdamW
    stepped = optimizer(model.parameters(), lr=1e-2, **({} if compiled else {"fused": True}))
    if compiled:
        model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic"})
    for _ in range(2):
        model(X).backward()
        stepped.step()
        stepped.zero_grad()
    return model.state_dict()
