"""A small model whose optimizer updates are held under way until a test lets them go, and a twin that has none."""

import contextlib
import functools
import gc
import io
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import Placement, is_movable, place_param, placement_of
from autohete_fx.runtime.tiers.host import HostTier, open_tier

STEP = Schedule(overlap=Overlap.STEP)
OPTIMIZER_ON_HOST = BlockDecision(optimizer=Optimizer.HOST)
ALL_ON_HOST = BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST)


def use_lanes(monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    """Sessions made from here on have threads, and the given lanes."""
    monkeypatch.setattr("autohete_fx.runtime.session.Lanes", functools.partial(Lanes, in_background=True, **how))


MOST_DELAY_S = float(os.environ.get("AUTOHETE_TEST_DELAY_S", "0.005"))


def random_delays(most_s: float = MOST_DELAY_S) -> Callable[[Ticket], float]:
    """A pace that is late at random. In a small model's step, which computes for some 20 ms, each lane has tens of tickets: at 5 ms
    at most they come to several times that, so that whatever may be behind is behind at some time. More, and more steps, are for
    runs by hand: ``AUTOHETE_TEST_DELAY_S=0.05 AUTOHETE_TEST_STEPS=20``."""
    chance = random.Random(0)
    return lambda ticket: chance.uniform(0, most_s)


class Gate:
    """A pace that holds the update lane until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def __call__(self, ticket: Ticket) -> float:
        if ticket.lane is Lane.UPDATE:
            assert self.opened.wait(60), "nobody opened the gate"
        return 0.0

    def open_soon(self) -> threading.Timer:
        timer = threading.Timer(0.05, self.opened.set)
        timer.start()
        return timer


class Cycle:
    """What only a garbage collection can free."""

    def __init__(self) -> None:
        self.itself = self


@contextlib.contextmanager
def collecting_all_the_time(on_collection: Callable[[], object]) -> Iterator[None]:
    """A garbage collection at nearly every allocation, and something to be called behind each."""

    def callback(phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            on_collection()

    thresholds = gc.get_threshold()
    gc.callbacks.append(callback)
    try:
        gc.set_threshold(1)
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)


class Stack(nn.Module):
    """Four layers that all are blocks; one of them may break the graph."""

    def __init__(self, breaks: bool = False, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.breaks:
            torch._dynamo.graph_break()
            x = x + self.layers[0][0].weight.mean()
        return x.square().mean()


def updated_at_once(model: nn.Module, lr: float, optimizer: Optimizer = Optimizer.HOST) -> torch.optim.Optimizer:
    """An optimizer whose updates are over when ``step()`` returns, made by the processor that makes them in homes: PyTorch's own
    on a CPU device. The kernels of an accelerator round otherwise than the CPU's; there all that is large lies in homes, unless
    it is the device that updates."""
    params = list(model.parameters())
    if params[0].device.type == "cpu" or optimizer is not Optimizer.HOST:
        return torch.optim.AdamW(params, lr=lr, fused=True)
    tier = open_tier(params[0].device)
    for param in filter(is_movable, params):
        place_param(param, Placement(params=Params.HOST, optimizer=Optimizer.HOST, tier=tier, block=0))
    return autohete_fx.AdamW(params, lr=lr)


@functools.cache
def labels() -> tuple[str, ...]:
    """Of a stack's blocks."""
    found = autohete_fx.preview(Stack(), torch.ones(8, 128), options={"inner_backend": "eager", "profile": "analytic"})
    torch._dynamo.reset()
    return found[0].plan.labels


def updates_of(model: Stack) -> Updates:
    placement = placement_of(model.layers[0][0].weight)
    assert placement is not None and placement.updates is not None
    return placement.updates


def tier_of(model: nn.Module) -> HostTier:
    """Where its homes are."""
    placement = placement_of(weight_of(model))
    assert placement is not None
    return placement.tier


class Training:
    """A stack that has taken a step whose updates the gate still holds, and its twin in eager mode, which has none under way."""

    def __init__(
        self,
        gate: Gate,
        decision: BlockDecision = OPTIMIZER_ON_HOST,
        *,
        breaks: bool = False,
        warm_steps: int = 2,
        device: str = "cpu",
    ) -> None:
        self.gate = gate
        self.model, self.twin = Stack(breaks).to(device), Stack(breaks).to(device)
        self.optimizer = autohete_fx.AdamW(self.model.parameters(), lr=1e-2)
        self.reference = updated_at_once(self.twin, lr=1e-2, optimizer=decision.optimizer)
        options: dict[str, Any] = {"inner_backend": "eager", "profile": "analytic"}
        if not breaks:
            options["plan"] = Plan(labels=labels(), decisions=(decision,) * len(labels()), schedule=STEP)
        self.model.compile(backend="autohete", options=options)
        for _ in range(warm_steps):
            self.step()
        self.hold()

    def hold(self) -> None:
        """Take a step whose updates the gate holds. Earlier ones end first: a gate that held them too would hold the step."""
        self.gate.opened.set()
        self.optimizer.synchronize()
        self.gate.opened.clear()
        self.step()

    def step(self) -> None:
        for model, optimizer in ((self.twin, self.reference), (self.model, self.optimizer)):
            loss = model(torch.ones(8, 128, device=weight_of(model).device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    @property
    def updates(self) -> Updates:
        return updates_of(self.model)

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        return self.model.layers[2][0].weight, self.twin.layers[2][0].weight

    def assert_waits(self, read: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
        """What ``read`` gives while the updates are held is what it gives without any."""
        assert self.updates.is_pending
        timer = self.gate.open_soon()
        found, expected = read(self.model, self.optimizer), read(self.twin, self.reference)
        assert self.gate.opened.is_set(), "it did not wait"
        timer.join()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@contextlib.contextmanager
def trained_under(decision: BlockDecision, **lanes: Any) -> Iterator[Training]:
    """One stack for many reads of what is held, on the given lanes: to compile it takes longer than to read."""
    torch._dynamo.reset()
    gate = Gate()
    with pytest.MonkeyPatch.context() as patch:
        use_lanes(patch, pace=gate, **lanes)
        state = Training(gate, decision)
    yield state
    gate.opened.set()
    state.optimizer.synchronize()


def weight_of(model: nn.Module) -> nn.Parameter:
    return model.get_parameter("layers.2.0.weight")


def saved(value: object) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer)


def eagerly(model: nn.Module, x: Tensor | None = None) -> Tensor:
    """What eager code makes of a batch, without gradients."""
    assert isinstance(model, Stack)
    with torch.no_grad():
        return Stack.forward(model, torch.ones(4, 128, device=weight_of(model).device) if x is None else x)
