"""``AdamW(max_grad_norm=...)``: what ``clip_grad_norm_`` before the step would do, whatever updates overlap with."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import autohete_fx
from autohete_fx import BlockDecision, OptimizerStateError, Plan
from autohete_fx.compiler.problem import clips_gradients, schedule_of
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.runtime.pending.norms import Norms
from tests.held_updates import ALL_ON_HOST, OPTIMIZER_ON_HOST, Stack, labels, random_delays, use_lanes
from tests.main_job import slow
from tests.planner_problems import MACHINE
from tests.training import collecting

MIXED = (ALL_ON_HOST, OPTIMIZER_ON_HOST, BlockDecision())


def inputs(step: int) -> Tensor:
    return torch.sin(torch.arange(8 * 128.0) * (1 + step)).view(8, 128)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [model.state_dict(), optimizer.state_dict()["state"]]


def clipped_by_torch(steps: int, max_norm: float) -> list[Any]:
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    seen: list[Any] = []
    for step in range(steps):
        model(inputs(step)).backward()
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad()
    return [*seen, state_of(model, optimizer)]


@pytest.mark.parametrize("overlap", [slow(None), slow("step"), "backward"])
@pytest.mark.parametrize("is_host", [slow(True), False], ids=["one memory", "two memories"])
@pytest.mark.parametrize("max_norm", [1e-3, slow(1e3)], ids=["clips", "does not bite"])
def test_training_is_bitwise_that_of_clipping_before_the_step(
    overlap: str | None, is_host: bool, max_norm: float, monkeypatch: pytest.MonkeyPatch
):
    use_lanes(monkeypatch, num_update_workers=4, is_host=is_host, pace=random_delays())
    torch._dynamo.reset()
    names, model = labels(), Stack()
    decisions = (MIXED * len(names))[: len(names)]
    schedule = Schedule(overlap=Overlap(overlap) if overlap else Overlap.NONE, takes_norms=overlap == "backward")
    plan = Plan(labels=names, decisions=decisions, schedule=schedule)
    model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan})
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=max_norm)
    seen: list[Any] = []
    for step in range(4):
        model(inputs(step)).backward()
        optimizer.step()
        assert optimizer.grad_norm is not None
        seen.append(optimizer.grad_norm)
        seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad()
    seen.append(state_of(model, optimizer))
    torch.testing.assert_close(seen, clipped_by_torch(4, max_norm), rtol=0, atol=0)


class Trained:
    """A stack whose backward takes the norms of the four gradients that leave, and how many of them steps have used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch._dynamo.reset()
        self.num_used = 0
        of = Norms.of

        def counted(norms: Norms, grad: Tensor) -> Tensor | None:
            norm = of(norms, grad)
            self.num_used += norm is not None
            return norm

        monkeypatch.setattr(Norms, "of", counted)
        use_lanes(monkeypatch, is_host=False)
        self.model = Stack()
        schedule = Schedule(overlap=Overlap.BACKWARD, takes_norms=True)
        plan = Plan(labels=labels(), decisions=(OPTIMIZER_ON_HOST,) * len(labels()), schedule=schedule)
        options = {"inner_backend": "eager", "profile": "analytic", "plan": plan}
        self.model.compile(backend="autohete", options=options)
        self.optimizer = autohete_fx.AdamW(self.model.parameters(), lr=1e-2, overlap="backward", max_grad_norm=1e-3)


def edit_data(grad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    grad.data.mul_(3)


def edit_array(grad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    array = grad.numpy()
    array *= 3


def unscale(grad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def use_another(grad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0].grad = grad * 3


def compiled(grad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    torch.compile(lambda t: t.mul_(3), backend="aot_eager")(grad)


def unseen(grad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    torch.compile(lambda t: t + torch.compiler.disable(lambda: grad.mul_(3))(), backend="aot_eager")(torch.ones(1))


def leave(grad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """As it is."""


@pytest.mark.parametrize(
    "edit",
    [leave, edit_data, *map(slow, (edit_array, unscale, use_another, compiled)), unseen],
    ids=lambda edit: edit.__name__,
)
def test_norms_of_backward_are_used_where_nobody_touched_the_gradient(
    edit: Callable[[Tensor, torch.optim.Optimizer], None], monkeypatch: pytest.MonkeyPatch
):
    ours = Trained(monkeypatch)
    twin = Stack()
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        if step == 1:
            ours.num_used = 0  # the first step compiles, and may have taken none
        for model, optimizer in ((ours.model, ours.optimizer), (twin, reference)):
            model(inputs(step)).backward()
            edit(optimizer.param_groups[0]["params"][0].grad, optimizer)
            norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e-3) if model is twin else None
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(ours.optimizer.grad_norm, norm, rtol=0, atol=0)
    torch.testing.assert_close(state_of(ours.model, ours.optimizer), state_of(twin, reference), rtol=0, atol=0)
    per_step = {leave: 4, unscale: 0, unseen: 0}.get(edit, 3)
    assert ours.num_used == 2 * per_step


def test_norms_of_backward_are_not_those_of_collected_gradients(monkeypatch: pytest.MonkeyPatch):
    ours = Trained(monkeypatch)
    twin = Stack()
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        for model, optimizer in ((ours.model, ours.optimizer), (twin, reference)):
            with collecting(optimizer):
                model(inputs(0)).backward()
            model(inputs(1)).backward()
            if model is twin:
                nn.utils.clip_grad_norm_(twin.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(state_of(ours.model, ours.optimizer), state_of(twin, reference), rtol=0, atol=0)
    assert ours.num_used == 0


@pytest.mark.parametrize("value", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16, torch.float32, torch.float64)], ids=str)
def test_norms_of_any_kind_are_those_of_torch(dtypes: tuple[torch.dtype, ...], value: float):
    """Over two groups; parameters of 16 bits are updated through masters, so of those only the gradients are compared."""

    def made() -> list[Parameter]:
        generator = torch.Generator().manual_seed(0)
        params = [Parameter(torch.randn(33, 7, generator=generator).to(dtype)) for dtype in dtypes]
        for p in params:
            p.grad = torch.randn(33, 7, generator=generator).to(p.dtype)
        assert params[1].grad is not None
        params[1].grad[3, 3] = value
        return params

    params, reference = made(), made()
    optimizer = autohete_fx.AdamW([{"params": params[:1]}, {"params": params[1:]}], max_grad_norm=0.5)
    expected = nn.utils.clip_grad_norm_(reference, 0.5)
    torch.optim.AdamW(reference, fused=True).step()
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, expected, rtol=0, atol=0, equal_nan=True)
    for ours, theirs in zip(params, reference, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0, equal_nan=True)
        if ours.dtype is not torch.bfloat16:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_a_step_without_gradients_has_no_norm_to_clip_by():
    optimizer = autohete_fx.AdamW([Parameter(torch.ones(3))], max_grad_norm=1.0)
    assert optimizer.grad_norm is None
    optimizer.step()
    assert optimizer.grad_norm == 0


def test_two_parameters_with_one_gradient_are_clipped_as_torch_does():
    """Which multiplies it twice."""
    grads = []
    for clips_itself in (True, False):
        params = [Parameter(torch.ones(3)) for _ in range(2)]
        params[0].grad = params[1].grad = torch.ones(3)
        optimizer = autohete_fx.AdamW(params, max_grad_norm=0.5 if clips_itself else None)
        if not clips_itself:
            nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        grads.append(params[0].grad)
    assert torch.equal(*grads)


def test_plans_know_that_updates_wait_for_the_norm():
    params = list(Stack().parameters())
    optimizer = autohete_fx.AdamW(params, overlap="backward", max_grad_norm=1.0)
    assert clips_gradients(params)
    gpu = dataclasses.replace(MACHINE, device_type="cuda")
    assert schedule_of(params, gpu) == Schedule(overlap=Overlap.BACKWARD, takes_norms=True)
    optimizer.max_grad_norm = None
    assert not clips_gradients(params) and not schedule_of(params, gpu).takes_norms
    optimizer = autohete_fx.AdamW(params, overlap="step", max_grad_norm=1.0)
    assert clips_gradients(params) and not schedule_of(params, gpu).takes_norms


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_means_nothing_is_refused(norm: float):
    with pytest.raises(OptimizerStateError, match=r"max_grad_norm is .*; expected a number above 0, or None"):
        autohete_fx.AdamW([Parameter(torch.ones(3))], max_grad_norm=norm)
