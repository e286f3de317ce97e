"""Training loops of every kind with updates under way: the bits of the same loop without any."""

import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autohete_fx
from autohete_fx import Plan
from autohete_fx.runtime.placement import placement_of
from tests.held_updates import ALL_ON_HOST, OPTIMIZER_ON_HOST, STEP, Stack, labels, use_lanes

STEPS = 6


class Side:
    """One of two equal runs: its model, and optimizers for it.

    Args:
        name: ``ours`` is compiled and has updates under way; ``twin`` is eager and has ``torch.optim.AdamW``; ``without overlap``
            is eager and has ours, for 16-bit parameters, whose masters PyTorch does not have.
    """

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        torch._dynamo.reset()
        self.name = name
        self.width = 128 if dtype is torch.float32 else 256  # or weights would be too small to leave the device
        self.model: Any = Stack(width=self.width).to(dtype)
        self.dtype = dtype
        self.num_under_way = 0
        if name == "ours":
            decisions = tuple(itertools.islice(itertools.cycle((OPTIMIZER_ON_HOST, ALL_ON_HOST)), len(labels())))
            plan = Plan(labels=labels(), decisions=decisions, schedule=STEP)
            options = {"inner_backend": "eager", "profile": "analytic", "plan": plan}
            self.model.compile(backend="autohete", options=options)

    def adamw(self, params: Any = None, **how: Any) -> torch.optim.Optimizer:
        params, how = self.model.parameters() if params is None else params, {"lr": 1e-2, **how}
        if self.name == "twin":
            return torch.optim.AdamW(params, fused=True, **how)
        optimizer = autohete_fx.AdamW(params, **how)
        optimizer.register_step_post_hook(lambda *_: self._count())
        return optimizer

    def _count(self) -> None:
        placement = placement_of(self.model.layers[0][0].weight)
        self.num_under_way += placement is not None and placement.updates is not None and placement.updates.is_pending

    def batch(self, step: int, factor: float = 1.0) -> Tensor:
        return torch.sin(torch.arange(8.0 * self.width) * (1 + step)).view(8, -1).to(self.dtype) * factor

    def results(self, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
        states = [optimizer.state_dict()["state"] for optimizer in optimizers]
        return copy.deepcopy({"model": self.model.state_dict(), "states": states})


Loop = Callable[[Side], Any]


def scaled(side: Side, autocast: torch.dtype | None) -> Any:
    """Two of the steps overflow and are skipped."""
    optimizer, scaler = side.adamw(), torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    seen = []
    for step in range(STEPS):
        x = side.batch(step, factor=float("inf") if step in (1, 4) else 1.0)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = side.model(x)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(side.model.parameters(), 0.1)
        before = copy.deepcopy(side.results(optimizer)) if step == 4 else None
        scaler.step(optimizer)
        scaler.update()
        if before is not None:
            torch.testing.assert_close(side.results(optimizer), before, rtol=0, atol=0)
        optimizer.zero_grad()
        seen.append((loss.detach(), scaler.get_scale()))
    counters = {state["step"].item() for state in optimizer.state_dict()["state"].values()}
    assert counters == {STEPS - 2}
    return seen, side.results(optimizer)


def scheduled(side: Side) -> Any:
    """Rates and momenta change every step, by the loss too."""
    optimizer = side.adamw()
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=STEPS)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e3)
    losses = []
    for step in range(STEPS):
        loss = side.model(side.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cycle.step()
        plateau.step(loss.detach())
        losses.append(loss.detach())
    return losses, side.results(optimizer)


def with_a_tensor_rate(side: Side) -> Any:
    """The scheduler writes into the tensor that the updates under way were given."""
    optimizer = side.adamw(lr=torch.tensor(1e-2))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(STEPS):
        side.model(side.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    return side.results(optimizer)


def growing(side: Side) -> Any:
    """Layers join as the training goes on, from the last to the first."""
    layers = list(reversed(side.model.layers))
    optimizer = side.adamw(layers[0].parameters())
    for step in range(STEPS):
        side.model(side.batch(step)).backward()
        optimizer.step()
        side.model.zero_grad()
        if step + 1 < len(layers):
            optimizer.add_param_group({"params": list(layers[step + 1].parameters()), "lr": 1e-2 / (step + 2)})
    return side.results(optimizer)


def freezing(side: Side) -> Any:
    """Every set of trainable layers comes twice, so that its code is compiled once and cached the second time."""
    optimizer, losses = side.adamw(), []
    for step in range(2 * STEPS):
        for index, layer in enumerate(side.model.layers):
            layer.requires_grad_(step % 3 == 0 or index >= step % 3)
        loss = side.model(side.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, side.results(optimizer)


def with_two_optimizers(side: Side) -> Any:
    """The second one steps every other time."""
    layers = side.model.layers
    optimizers = [side.adamw(layers[:2].parameters()), side.adamw(layers[2:].parameters(), lr=1e-3, weight_decay=0.1)]
    losses = []
    for step in range(STEPS):
        loss = side.model(side.batch(step))
        loss.backward()
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, side.results(*optimizers)


def beside_sgd(side: Side) -> Any:
    layers = side.model.layers
    sgd = torch.optim.SGD([*layers[0].parameters(), *layers[2].parameters()], lr=1e-2, momentum=0.9)
    adamw = side.adamw([*layers[1].parameters(), *layers[3].parameters()])
    losses = []
    for step in range(STEPS):
        loss = side.model(side.batch(step))
        loss.backward()
        for optimizer in (adamw, sgd):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, side.results(adamw, sgd)


def zeroing_in_place(side: Side) -> Any:
    """Micro-batches add to gradients that updates have just read."""
    optimizer = side.adamw()
    for step in range(STEPS):
        for micro_batch in range(2):
            side.model(side.batch(step, factor=1 + micro_batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return side.results(optimizer), [p.grad for p in side.model.parameters()]


def averaging(side: Side) -> Any:
    optimizer = side.adamw()
    average = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    for step in range(STEPS):
        side.model(side.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(side.model)
    return side.results(optimizer), copy.deepcopy(average.state_dict())


def with_gradients_that_are_not_finite(side: Side) -> Any:
    """They spoil what they belong to, as in PyTorch, and nothing else."""
    optimizer = side.adamw()
    for step in range(STEPS):
        side.model(side.batch(step)).backward()
        if step == STEPS - 1:
            side.model.layers[1][0].weight.grad[0, 0] = float("inf")
            side.model.layers[3][0].weight.grad[1] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
    results = side.results(optimizer)
    spoilt = {name: int(t.isnan().sum()) for name, t in results["model"].items() if not t.isfinite().all()}
    assert spoilt == {"layers.1.0.weight": 1, "layers.3.0.weight": 128}
    return results


def rolling_back(side: Side) -> Any:
    """To an earlier step, in the middle of updates, whose gradients and states the load replaces."""
    optimizer, kept = side.adamw(), None
    for step in range(STEPS):
        side.model(side.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            kept = copy.deepcopy((side.model.state_dict(), optimizer.state_dict()))
        if step == 3:
            assert kept is not None
            side.model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
    return side.results(optimizer)


FP32: dict[str, Loop] = {
    "scaler, fp16 autocast": functools.partial(scaled, autocast=torch.float16),
    "scheduler": scheduled,
    "tensor rate": with_a_tensor_rate,
    "parameters join": growing,
    "freezing": freezing,
    "two optimizers": with_two_optimizers,
    "beside SGD": beside_sgd,
    "gradients zeroed in place": zeroing_in_place,
    "average": averaging,
    "infinite gradients": with_gradients_that_are_not_finite,
    "rollback": rolling_back,
}
BF16: dict[str, Loop] = {
    "scaler": functools.partial(scaled, autocast=None),
    "scheduler": scheduled,
    "freezing": freezing,
    "average": averaging,
    "rollback": rolling_back,
}


@pytest.fixture
def delayed(is_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that take their time, so that updates are under way at every moment of a loop."""
    chance = random.Random(0)
    use_lanes(monkeypatch, is_host=is_host, pace=lambda ticket: chance.uniform(0.001, 0.01))


QUICK = [("scheduler", True), ("average", False)]


def in_memories(loops: dict[str, Loop]) -> Iterator[Any]:
    """Each loop in one memory or in two by turns; in both where something takes the place of what updates work on."""
    for index, name in enumerate(loops):
        for is_host in (True, False):
            if is_host == (index % 2 == 1) or name == "rollback":
                label = f"{name}-{'one memory' if is_host else 'two memories'}"
                yield pytest.param(
                    name, is_host, id=label, marks=[] if (name, is_host) in QUICK else [pytest.mark.slow]
                )


@functools.cache
def reference(loop: Loop, name: str, dtype: torch.dtype) -> Any:
    """Of a side with nothing under way: whatever the lanes are."""
    return loop(Side(name, dtype))


def assert_same(loop: Loop, name: str, dtype: torch.dtype) -> None:
    ours = Side("ours", dtype)
    found = loop(ours)
    assert ours.num_under_way >= STEPS - 3, "the loop was tried without updates under way"
    torch.testing.assert_close(found, reference(loop, name, dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("delayed")
@pytest.mark.parametrize(("name", "is_host"), list(in_memories(FP32)))
def test_loops(name: str, is_host: bool) -> None:
    assert_same(FP32[name], "twin", torch.float32)


@pytest.mark.slow  # the first one compiles the kernel
@pytest.mark.usefixtures("delayed")
@pytest.mark.parametrize(("name", "is_host"), list(in_memories(BF16)))
def test_loops_of_16_bit_parameters(name: str, is_host: bool) -> None:
    assert_same(BF16[name], "without overlap", torch.bfloat16)
