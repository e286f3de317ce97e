"""Ctrl-C while the program waits for a lane: nothing hangs, reads are whole, and training goes on."""

import copy
import gc
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.optim import base
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending import calls, fence, updates
from autohete_fx.runtime.session import Session, _sessions
from tests.held_updates import ALL_ON_HOST, STEP, Gate, Stack, labels, updates_of, use_lanes
from tests.main_job import slow

ALL_OFFLOADED = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)


class Holder:
    """A pace that holds one lane, while it is told to."""

    def __init__(self) -> None:
        self.lane: Lane | None = None
        self.released = threading.Event()

    def __call__(self, ticket: Ticket) -> float:
        assert ticket.lane is not self.lane or self.released.wait(60), "nobody released the lane"
        return 0.0

    def hold(self, lane: Lane) -> None:
        self.released.clear()
        self.lane = lane

    def release(self) -> None:
        self.lane = None
        self.released.set()


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    holder, before = Holder(), signal.signal(signal.SIGINT, signal.default_int_handler)
    use_lanes(monkeypatch, pace=holder)
    yield holder
    holder.release()
    signal.signal(signal.SIGINT, before)


def batch(step: int) -> Tensor:
    return torch.sin(torch.arange(8 * 128.0) * (1 + step)).view(8, 128)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def results(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))


def session_of(model: nn.Module) -> Session:
    weight: Any = model.get_parameter("layers.0.0.weight")
    return next(s for s in _sessions.values() if s._tier is not None and s._tier.owns(weight))


def interrupt(work: str, model: nn.Module, optimizer: torch.optim.Optimizer, holder: Holder) -> None:
    """In the middle of a forward, a backward, or a step, which waits for a lane that is held."""
    optimizer.zero_grad()
    loss = model(batch(2))
    loss.backward()
    if work == "backward":
        loss = model(batch(3))
        holder.hold(Lane.H2D)
    else:
        holder.hold(Lane.UPDATE)
        optimizer.step()
    timers = [
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)),
        threading.Timer(0.6, holder.release),
    ]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        {"forward": lambda: model(batch(3)), "backward": loss.backward, "step": optimizer.step}[work]()
    assert not holder.released.is_set() or work != "step", (
        "a pass waits for its copies that are under way, and nothing waits for anything else"
    )
    for timer in timers:
        timer.join()


@pytest.mark.parametrize("work", [slow("forward"), slow("backward"), "step"])
def test_an_interrupt_loses_nothing(work: str, holder: Holder):
    gc.collect()
    twin = Stack()
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    train(twin, reference, range(2))
    early = copy.deepcopy((twin.state_dict(), reference.state_dict()))
    if work != "backward":
        train(twin, reference, range(2, 3))
    expected = results(twin, reference), train(twin, reference, range(3, 5)), results(twin, reference)
    twin.load_state_dict(early[0])
    reference.load_state_dict(copy.deepcopy(early[1]))  # PyTorch takes the tensors as they are
    again = train(twin, reference, range(2, 5)), results(twin, reference)

    model = Stack()
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
    plan = Plan(labels=labels(), decisions=(ALL_OFFLOADED,) * len(labels()), schedule=STEP)
    model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan})
    train(model, optimizer, range(2))
    interrupt(work, model, optimizer, holder)
    assert not calls.is_within_call()
    found = results(model, optimizer), train(model, optimizer, range(3, 5)), results(model, optimizer)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    gc.collect()
    assert not any(copy() for copy in session_of(model)._in_flight.values()), (
        "copies that were under way stayed in memory"
    )
    assert sum(isinstance(mode, calls.Fence) for mode in torch.overrides._get_current_function_mode_stack()) <= 1
    model.load_state_dict(early[0])
    optimizer.load_state_dict(early[1])
    torch.testing.assert_close((train(model, optimizer, range(2, 5)), results(model, optimizer)), again, rtol=0, atol=0)


def codes(function: Any) -> Iterator[CodeType]:
    """Of a function, and of what is defined in it."""
    pending = [function.__code__]
    while pending:
        yield (code := pending.pop())
        pending += [const for const in code.co_consts if isinstance(const, CodeType)]


ENTRY = "compile_wrapper call_backend_ctx <listcomp>".split()
OF_A_CALL = [
    calls.Call.__init__,
    calls.Call.__enter__,
    calls.Call.__exit__,
    calls.Call._leave,
    calls.CompiledFunction.call,
    calls.under_way,
    fence.raise_fences,
    fence.lower_fences,
    fence.standing_fences,
    fence._exchange,
    fence._set_modes,
    updates.Updates.prune,
]
OF_A_STEP = [
    inspect.unwrap(base.PlannedOptimizer.step),
    inspect.unwrap(fence.watched),
    base.PlannedOptimizer._step,
    base._guard,
    base.PlannedOptimizer._pending,
    base.apply,
    updates.Updates.guard,
    updates.Updates.prune,
    fence.raise_fences,
    fence._exchange,
    fence._set_modes,
]


def interrupted_at(place: int, within: Callable[[FrameType], bool], act: Callable[[], Any]) -> bool:
    """Whether ``act`` has a place of that number where Python looks for signals. It is interrupted there."""
    places = iter(range(1 << 20))

    def interrupt(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and within(frame) and next(places) == place:
            sys.setprofile(None)
            raise KeyboardInterrupt

    gc.disable()  # Python drops what is raised while it collects
    try:
        sys.setprofile(interrupt)
        act()
        sys.setprofile(None)
    except KeyboardInterrupt:
        return True
    finally:
        gc.enable()
    return False


def within_call(frame: FrameType) -> bool:
    is_entry = frame.f_code.co_name in ENTRY and frame.f_code.co_filename.endswith("eval_frame.py")
    return is_entry or frame.f_code in FOUND["call"]


def within_step(frame: FrameType) -> bool:
    return frame.f_code in FOUND["step"]


FOUND = {
    name: frozenset(code for function in functions for code in codes(function))
    for name, functions in {"call": OF_A_CALL, "step": OF_A_STEP}.items()
}


def num_fences() -> int:
    return sum(isinstance(mode, calls.Fence) for mode in torch.overrides._get_current_function_mode_stack())


def trained(overlap: Overlap) -> tuple[Stack, autohete_fx.AdamW]:
    """A model that has taken two steps."""
    gc.collect()
    model = Stack()
    optimizer = autohete_fx.AdamW(model.parameters(), overlap=overlap.value)
    plan = Plan(labels=labels(), decisions=(ALL_ON_HOST,) * len(labels()), schedule=Schedule(overlap=overlap))
    model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan})
    train(model, optimizer, range(2))
    return model, optimizer


@pytest.mark.parametrize("default_device", [None, "cpu"])
def test_an_interrupt_anywhere_around_a_call_leaves_the_fence_to_the_next(default_device: str | None, gate: Gate):
    """Where updates may start in backward, the fence stands from forward on."""
    model, optimizer = trained(Overlap.BACKWARD)
    torch.set_default_device(default_device)
    try:
        model(batch(2))
        place = 0
        while interrupted_at(place, within_call, lambda: model(batch(2))):
            assert not calls.is_within_call(), f"place {place}"
            assert num_fences() == 1, f"place {place}"
            place += 1
        assert place > 20
        assert torch.get_default_device() == torch.device("cpu")
    finally:
        torch.set_default_device(None)
    gate.opened.clear()
    model(batch(2)).backward()
    optimizer.step()
    assert updates_of(model).is_pending and num_fences() == 1, "steps overlap no more"


def test_an_interrupt_anywhere_around_a_step_leaves_nothing_unguarded(gate: Gate):
    model, optimizer = trained(Overlap.STEP)
    place = 0
    while True:
        optimizer.zero_grad()
        model(batch(2)).backward()
        gate.opened.clear()
        is_interrupted = interrupted_at(place, within_step, optimizer.step)
        assert num_fences() == updates_of(model).needs_fence, f"place {place}"
        assert torch._C._is_torch_function_enabled(), f"place {place}: no fence is asked"
        gate.opened.set()
        if not is_interrupted:
            break
        place += 1
    assert place > 20
