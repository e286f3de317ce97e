"""What users do while updates are under way: nothing that they read is stale, and nothing hangs."""

import gc
import os
import signal
import textwrap
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import autohete_fx
from autohete_fx import Plan
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.fence import Fence, standing_fences
from autohete_fx.runtime.pending.updates import Updates
from tests.held_updates import OPTIMIZER_ON_HOST, STEP, Gate, Stack, Training, labels, weight_of
from tests.main_job import slow
from tests.processes import run_python

X = torch.ones(8, 128)


def params_agree(state: Training) -> bool:
    return all(map(torch.equal, state.model.parameters(), state.twin.parameters()))


def uncompiled(model: nn.Module) -> Stack:
    """The same parameters in a module that nobody compiled."""
    stack = Stack()
    stack.layers = model.layers
    return stack


@torch.no_grad()
def compiled(model: nn.Module, rows: int = 8) -> Tensor:
    return model(torch.ones(rows, 128))


def stance(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    return torch.compiler.set_stance(*args, **kwargs)


def with_stance(*args: Any, **kwargs: Any) -> Callable[[nn.Module, Any], Any]:
    def read(model: nn.Module, optimizer: object) -> Tensor:
        with stance(*args, **kwargs):
            return compiled(model)

    return read


def beyond_the_limit(model: nn.Module, optimizer: object) -> list[Tensor]:
    with torch._dynamo.config.patch(recompile_limit=1):
        return [compiled(model, rows) for rows in (7, 6)]


def with_dynamo_off(model: nn.Module, optimizer: object) -> Tensor:
    with torch._dynamo.config.patch(disable=True):
        return compiled(model)


def counting_flops(model: nn.Module, optimizer: object) -> Tensor:
    with FlopCounterMode(display=False):
        return compiled(model)


def averaged(model: nn.Module, optimizer: object) -> list[Tensor]:
    average = AveragedModel(uncompiled(model))
    average.update_parameters(uncompiled(model))
    return [p.detach() for p in average.parameters()]


def in_a_backward_hook(model: nn.Module, optimizer: object) -> Tensor:
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(weight_of(model).detach().clone()))
    torch.autograd.backward([y])
    return seen[0]


def in_a_child(model: nn.Module, optimizer: object) -> Tensor:
    """The sum that a forked process reads."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(20)  # ends a child that hangs
        try:
            os.write(writer, weight_of(model).detach().numpy().sum().tobytes())
        finally:
            os._exit(0)
    os.close(writer)
    found = os.read(reader, 4)
    os.waitpid(pid, 0)
    os.close(reader)
    return torch.tensor(list(found))


READS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "force_eager": with_stance("force_eager"),
    "eager_on_recompile": with_stance("eager_on_recompile"),
    "force_backend": with_stance("default", force_backend="eager"),
    "recompile limit": beyond_the_limit,
    "dynamo off": with_dynamo_off,
    "dispatch mode": counting_flops,
    "disable": lambda model, optimizer: torch.compiler.disable(compiled)(model),
    "export": lambda model, optimizer: torch.export.export(uncompiled(model), (X,)).module()(X).detach(),
    "functional_call": lambda model, optimizer: torch.func.functional_call(
        Stack(), dict(model.named_parameters()), (X,)
    ).detach(),
    "vmap": lambda model, optimizer: torch.vmap(lambda x: x @ weight_of(model).detach())(torch.ones(3, 2, 128)),
    "averaged model": averaged,
    "hook of backward": in_a_backward_hook,
    "fork": in_a_child,
}
FIRST = ("force_eager", "fork")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", [n if n in FIRST else slow(n) for n in READS])
def test_a_read_waits(name: str, gate: Gate):
    Training(gate).assert_waits(READS[name])


def held_before_step(gate: Gate) -> Training:
    """Gradients are there, nothing is under way, and the gate is closed."""
    state = Training(gate)
    gate.opened.set()
    for model in (state.twin, state.model):
        model(X).backward()
    state.optimizer.synchronize()
    gate.opened.clear()
    return state


@pytest.mark.parametrize("backward", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward([loss])])
def test_backward_does_not_add_to_gradients_that_an_update_still_reads(backward: Callable[[Tensor], None], gate: Gate):
    state = held_before_step(gate)
    losses = [weight.sum() for weight in state.weights]  # saves no parameter, so no version check refuses it
    state.reference.step()
    losses[1].backward()
    state.optimizer.step()
    timer = gate.open_soon()
    backward(losses[0])
    timer.join()
    assert params_agree(state) and torch.equal(*(weight.grad for weight in state.weights))


@pytest.mark.slow
def test_gradients_in_one_bucket_are_each_waited_for(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    state = held_before_step(gate)
    params = list(state.model.parameters())
    bucket = torch.cat([p.grad.reshape(-1) for p in params])
    for param, grad in zip(params, bucket.split([p.numel() for p in params]), strict=True):
        param.grad = grad.view_as(param)
    waited: list[bool] = []

    def pace(ticket: Ticket) -> float:  # the second update is late
        waited.append(True)
        return 0.1 if len(waited) == 2 else gate(ticket)

    lanes = state.updates.lanes
    monkeypatch.setattr(lanes._updates, "_pace", pace)
    state.reference.step()
    state.optimizer.step()
    timer = gate.open_soon()
    params[0].grad.zero_()
    bucket.zero_()
    timer.join()
    assert params_agree(state)


def test_parameters_that_share_memory_are_each_waited_for(gate: Gate):
    state = Training(gate)
    gate.opened.set()
    for model in (state.model, state.twin):
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector, model.parameters())
    state.step()
    state.hold()
    state.assert_waits(lambda model, optimizer: [p.detach().clone() for p in model.parameters()])


def test_a_step_waits_for_updates_of_memory_that_another_optimizer_shares(gate: Gate):
    state = held_before_step(gate)
    views = [nn.Parameter(weight.detach()) for weight in state.weights]
    for view in views:
        view.grad = torch.ones_like(view)
    state.reference.step()
    state.optimizer.step()
    timer = gate.open_soon()
    for view in views:
        autohete_fx.AdamW([view], lr=0.1).step()
    assert gate.opened.is_set(), "it did not wait"
    timer.join()
    assert torch.equal(*views) and params_agree(state)


def test_a_step_is_not_watched_call_by_call(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    state, seen = held_before_step(gate), []
    state.optimizer.step()
    gate.opened.set()
    watch = Fence.__torch_function__

    def watched(self: Fence, func: Any, *args: Any) -> Any:
        seen.append(func)
        return watch(self, func, *args)

    monkeypatch.setattr(Fence, "__torch_function__", watched)
    assert standing_fences()
    state.optimizer.step()  # with the same gradients
    num_seen = len(seen)
    weight_of(state.model).sum()
    assert len(seen) > num_seen, "the fence does not stand behind the step"
    assert num_seen < len(list(state.model.parameters())), seen[:num_seen]


def test_a_step_within_backward_is_over_when_it_returns(gate: Gate):
    """The engine forgets the modes that were entered in a node, so the fence would not stand behind it."""
    state = held_before_step(gate)
    x = torch.ones(1, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: state.optimizer.step())
    gate.opened.set()
    x.sum().backward()
    assert not state.updates.is_pending
    state.reference.step()
    assert params_agree(state)


@pytest.mark.slow
def test_an_optimizer_outlives_its_compiled_model(gate: Gate):
    state = held_before_step(gate)
    gate.opened.set()
    torch._dynamo.reset()
    gc.collect()
    for optimizer in (state.reference, state.optimizer):
        optimizer.step()
        optimizer.zero_grad()
    assert params_agree(state)
    state.step()
    assert params_agree(state)


def test_an_interrupt_in_step_leaves_nothing_under_way_that_nobody_knows_of(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    state = held_before_step(gate)
    add, calls = Updates.add, iter(range(100))

    def interrupted(*args: Any, **kwargs: Any) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        add(*args, **kwargs)

    monkeypatch.setattr(Updates, "add", interrupted)
    timer = gate.open_soon()
    with pytest.raises(KeyboardInterrupt):
        state.optimizer.step()
    assert gate.opened.is_set()
    timer.join()
    assert not any(state.updates.tickets_of(p) for p in state.model.parameters())


@pytest.mark.slow
def test_a_state_of_the_users_own_is_no_tensor(gate: Gate):
    state = Training(gate)
    gate.opened.set()
    state.optimizer.synchronize()
    state.optimizer.state[state.weights[0]]["note"] = "mine"
    state.step()
    assert params_agree(state)


class Plain(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_modes_are_entered_and_left_in_any_order(gate: Gate):
    state = Training(gate)

    def read() -> None:
        state.assert_waits(lambda model, optimizer: weight_of(model) * 2)

    read()
    with Plain():
        state.hold()
        with Plain():
            pass
        read()
        state.hold()
    read()
    state.hold()
    with torch.device("cpu"), Plain():
        read()
        state.hold()
    read()
    state.hold()
    torch.set_default_device("cpu")
    read()
    state.hold()
    torch.set_default_device("meta")
    torch.set_default_device("cpu")
    with torch.device("cpu"):
        torch.ones(1)
    read()
    state.hold()
    torch.set_default_device(None)
    read()
    with FlopCounterMode(display=False):
        state.hold()
    read()
    assert not any(isinstance(mode, Plain) for mode in torch.overrides._get_current_function_mode_stack())


@pytest.mark.slow
@pytest.mark.parametrize("version", ["ends", "raises"])
def test_a_process_ends_cleanly_with_updates_under_way(version: str):
    code = f"""
        import time
        import pytest, torch
        from tests.held_updates import Gate, Training, use_lanes

        patch = pytest.MonkeyPatch()
        gate = Gate()
        use_lanes(patch, pace=lambda ticket: gate(ticket) + 0.05)
        state = Training(gate)
        assert state.updates.is_pending
        gate.open_soon()
        if {version == "raises"}:
            raise SystemExit(3)
    """
    ended = run_python(["-W", "ignore", "-c", textwrap.dedent(code)])
    assert ended.returncode == (3 if version == "raises" else 0) and "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.slow
def test_a_model_whose_call_is_served_by_the_graph_of_another_waits(gate: Gate):
    """Dynamo shares code between models of one class: the second one's graph for this batch is the first one's."""
    options = {
        "inner_backend": "eager",
        "profile": "analytic",
        "plan": Plan(labels=labels(), decisions=(OPTIMIZER_ON_HOST,) * len(labels()), schedule=STEP),
    }
    first, second, twin = Stack(), Stack(), Stack()
    optimizers = [autohete_fx.AdamW(model.parameters(), lr=1e-2) for model in (first, second)]
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for model in (first, second):
        model.compile(backend="autohete", options=options, dynamic=False)

    def step(model: Stack, optimizer: torch.optim.Optimizer, batch: int) -> Tensor:
        loss = model(torch.ones(batch, 128))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(first, optimizers[0], 8)
    optimizers[0].synchronize()
    for batch in (4, 4):  # a graph, and a session, of its own
        torch.testing.assert_close(step(second, optimizers[1], batch), step(twin, reference, batch))
    optimizers[1].synchronize()
    expected = step(twin, reference, 4)  # now: a backward waits for all updates
    gate.opened.clear()
    torch.testing.assert_close(step(second, optimizers[1], 4), expected)
    timer = gate.open_soon()
    found = second(torch.ones(8, 128))
    assert gate.opened.is_set(), "it did not wait"
    timer.join()
    torch.testing.assert_close(found, twin(torch.ones(8, 128)))
