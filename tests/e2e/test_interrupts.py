"""Ctrl-C while the program waits for a lane: nothing hangs, reads are whole, and training goes on."""

import copy
import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Lane
from autohete_fx.runtime import calls
from autohete_fx.runtime.session import Session, _sessions
from autohete_fx.runtime.ticket import Ticket
from tests.held_updates import STEP, Stack, labels, use_lanes
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
