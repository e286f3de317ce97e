"""Graphs whose sizes or branches depend on values: exact, and within a budget for the most that they can be."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, fx, nn

import autohete_fx
from autohete_fx import Activations
from autohete_fx.passes import PassContext
from tests.main_job import slow
from tests.references import copied
from tests.thorough import thorough

ROWS, WIDTH, STEPS = 2048, 64, 3


class Stack(nn.Module):
    """Three layers over what ``choose`` leaves of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.choose(x, mask)
        for layer in self.layers:
            x = x + self.dropout(layer(x).sin())
        return x.square().mean()

    def choose(self, x: Tensor, mask: Tensor) -> Tensor:
        """The rows that a mask selects."""
        return x[mask]


class Positions(Stack):
    def choose(self, x: Tensor, mask: Tensor) -> Tensor:
        return x.index_select(0, mask.nonzero().squeeze(-1))


class First(Stack):
    """As many of the first rows as a number in a tensor says."""

    def choose(self, x: Tensor, mask: Tensor) -> Tensor:
        number = mask.sum().item()
        torch._check(number <= x.shape[0])
        return x[:number]


class Anything(Stack):
    """As many rows as a number says that can be anything."""

    def choose(self, x: Tensor, mask: Tensor) -> Tensor:
        number = mask.sum().item()
        return torch.arange(number, dtype=x.dtype)[:, None] * x[0]


class Branches(Stack):
    """Each layer is followed by one of two functions, of which the first takes more."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.cond(
                (x.sum() * mask.sum()) > 0, lambda y: y.sort(0).values.flip(0), torch.cos, (self.dropout(layer(x)),)
            )
        return x.square().mean()


@pytest.fixture(autouse=True)
def _captures() -> Iterator[None]:
    """One graph, with equal random numbers in eager code."""
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True),
        torch._inductor.config.patch(fallback_random=True),
    ):
        yield


def train(kind: type[Stack], options: dict[str, Any] | None) -> tuple[list[Tensor], int]:
    """What steps give, each with a mask of another size, and the most memory of one; plain where there are no options."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    seen: list[Tensor] = []
    peak = 0
    with autohete_fx.MemoryMeter("cpu") as meter:
        others = meter.start_bytes
    model = kind().double()
    if options is None:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    else:
        optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
        model.compile(backend="autohete", fullgraph=True, options=options)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        with autohete_fx.MemoryMeter("cpu") as meter:
            x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) - step % 2
            mask = torch.rand(ROWS, generator=generator) < (0.3, 1.0, 0.6)[step]
            torch.manual_seed(step)
            loss = model(x, mask)
            loss.backward()
            optimizer.step()
        peak = max(peak, meter.peak_bytes - others)
        found = [copied(loss), *(copied(p.grad) for p in model.parameters() if p.grad is not None)]
        optimizer.zero_grad()
        del x, mask, loss
        seen += found
        others += sum(tensor.nbytes for tensor in found)
    states = optimizer.state_dict()["state"]
    return [*seen, *map(copied, model.parameters()), *(copied(s[k]) for s in states.values() for k in s)], peak


CASES = [
    thorough(Stack, "inductor", 11.5),
    thorough(Branches, "inductor", 11.5),
    slow(First, "inductor", 11.5),
    (Positions, "eager", 12),
    slow(First, "eager", 12),
    slow(Branches, "eager", 13),
]
"""Each with a budget in MiB, of 13 to 16 that it would take."""


@pytest.mark.parametrize(("kind", "inner", "mib"), CASES)
def test_values_decide_about_sizes_and_branches(kind: type[Stack], inner: str, mib: float, one_thread: None) -> None:
    del one_thread
    seen: list[str] = []

    class Note:
        """A last pass, which is for whole graphs and not for branches."""

        def __call__(self, gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
            seen.append(context.stage.value)
            return gm

        def uuid(self) -> str:
            return "note"

    options: dict[str, Any] = {"inner_backend": inner, "profile": "analytic", "passes": {"final": [Note()]}}
    expected, _ = train(kind, None)
    given, peak = train(kind, {**options, "memory_budget": f"{mib}MiB"})
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    made = autohete_fx.compilations()[-1]
    assert {decision.activations for decision in made.plan.decisions} != {Activations.KEEP}
    is_judged = kind is not First or inner == "eager"  # no dry run has numbers of tensors
    assert peak <= mib * 2**20 and (not is_judged or peak <= 1.01 * made.plan.peak_bytes)
    assert seen == ["forward", "backward"] * (len(seen) // 2) and seen
    assert bool(made.notes) != is_judged


def test_a_size_that_nobody_bounds_is_told(caplog: pytest.LogCaptureFixture) -> None:
    options = {"inner_backend": "eager", "profile": "analytic", "memory_budget": "64MiB"}
    expected, _ = train(Anything, None)
    given, _ = train(Anything, options)
    for one, other in zip(given, expected, strict=True):
        assert torch.equal(one, other)
    assert "memory_budget may not be kept: the size of" in caplog.text and "torch._check" in caplog.text
    made = autohete_fx.compilations()[-1]
    assert any("nothing says how large" in note for note in made.notes)
