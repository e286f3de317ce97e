"""Our optimizers beside PyTorch's own of the same arithmetic, and what must agree after each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter

from autohete_fx.optim import SGD, Adam, AdamW
from autohete_fx.optim.base import PlannedOptimizer

FULL = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An optimizer and its reference, with hyperparameters of both."""

    ours: type[PlannedOptimizer]
    torchs: Any
    how: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Any, **how: Any) -> Any:
        return self.ours(params, **{**self.how, **how})

    def reference(self, params: Any, **how: Any) -> torch.optim.Optimizer:
        return self.torchs(params, **{**self.how, **how}, fused=True)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the states that a parameter gets."""
        rules = self.make([Parameter(torch.ones(1))])
        return rules.rule_of_group(rules.param_groups[0]).moments


KINDS = {
    "AdamW": Kind(ours=AdamW, torchs=torch.optim.AdamW, how={"weight_decay": 0.1}),
    "Adam": Kind(ours=Adam, torchs=torch.optim.Adam, how={"weight_decay": 0.1}),
    "SGD": Kind(ours=SGD, torchs=torch.optim.SGD, how={"weight_decay": 0.1}),
    "momentum": Kind(ours=SGD, torchs=torch.optim.SGD, how={"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "nesterov": Kind(ours=SGD, torchs=torch.optim.SGD, how={"momentum": 0.9, "nesterov": True}),
}


def make_params(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def exact_copies(params: Sequence[Parameter]) -> list[Parameter]:
    """What the reference optimizes: full-precision copies, the masters of 16-bit parameters."""
    return [Parameter(p.detach().clone() if p.dtype in FULL else p.detach().float()) for p in params]


def set_grads(params: Sequence[Parameter], reference: Sequence[Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p, r in zip(params, reference, strict=True):
        grad = (torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 1)).to(p.dtype)
        p.grad, r.grad = grad, grad.to(r.dtype).clone()


def assert_same(
    params: Sequence[Parameter],
    optimizer: PlannedOptimizer,
    reference: Sequence[Parameter],
    expected: torch.optim.Optimizer,
    steps: int = 1,
) -> None:
    """Bitwise for full precision; for 16 bits, a few fp32 units in the last place a step."""
    for p, r in zip(params, reference, strict=True):
        state, wanted = optimizer.state[p], expected.state[r]
        assert ("master" in state) == (p.dtype not in FULL)
        assert set(wanted) <= set(state) <= {*wanted, "step", "master"}
        if p.dtype in FULL:
            assert torch.equal(p, r)
            assert all(torch.equal(state[name], wanted[name]) for name in wanted)
            continue
        assert {state[name].dtype for name in ("master", *wanted)} == {torch.float32}
        pairs = [(state["master"], r), *((state[n], wanted[n]) for n in wanted if n not in ("step", "exp_avg_sq"))]
        for ours, theirs in pairs:
            scale = 4.0 if theirs is wanted.get("momentum_buffer") else 1.0  # a sum of large gradients may be small
            torch.testing.assert_close(ours, theirs.detach(), rtol=2e-6 * steps, atol=scale * 3e-7 * steps)
        if "exp_avg_sq" in wanted:
            squares = state["exp_avg_sq"], wanted["exp_avg_sq"]
            torch.testing.assert_close(*squares, rtol=2e-6 * steps, atol=1e-12)
        assert torch.equal(p, state["master"].to(p.dtype)), "the weight is the rounding of its master"


def run(
    kind: Kind,
    params: Sequence[Parameter],
    optimizer: PlannedOptimizer,
    steps: int,
    between: Callable[[int], None] = lambda step: None,
    **how: Any,
) -> None:
    """Step both optimizers on equal gradients and compare after every step."""
    reference = exact_copies(params)
    expected = kind.reference(reference, **how)
    for step in range(steps):
        set_grads(params, reference, step)
        optimizer.step()
        expected.step()
        assert_same(params, optimizer, reference, expected, step + 1)
        between(step)
