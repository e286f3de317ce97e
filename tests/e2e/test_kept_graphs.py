"""Backward passes whose graph another one goes through: exact under every plan, whoever compiles."""

import logging

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx.compiler import running
from tests.main_job import slow
from tests.references import copied
from tests.thorough import thorough
from tests.training import PLANS, Sizes, assert_equal, batch, make

STEPS = 3


class Twice(nn.Module):
    """Two losses of one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make("cpu", Sizes(layers=2))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner.embedding(tokens)
        for layer in self.inner.layers:
            x = layer(x)
        x = self.inner.norm(x)
        return self.inner.head(x).square().mean(), x.abs().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> list[Tensor]:
    seen: list[Tensor] = []
    params = list(model.parameters())
    for step in range(STEPS):
        torch.manual_seed(step)
        first, second = model(batch("cpu", step))
        if how == "retain_graph":
            first.backward(retain_graph=True)
            second.backward()
        elif how == "create_graph":
            found = torch.autograd.grad(first, params, create_graph=True)
            assert all(each.requires_grad for each in found)
            second.backward()
            for param, each in zip(params, found, strict=True):
                param.grad = each.detach() if param.grad is None else param.grad + each.detach()
        else:  # the same loss, three times
            for number in range(3):
                first.backward(retain_graph=number < 2)
        seen += map(copied, (first, second, *(p.grad for p in params if p.grad is not None)))
        optimizer.step()
        optimizer.zero_grad()
    states = optimizer.state_dict()["state"]
    return [*seen, *map(copied, params), *(copied(t) for n in states for k, t in states[n].items() if k != "step")]


CASES = [
    ("mixed", "eager", "retain_graph"),
    thorough("keep", "inductor", "again and again"),
    slow("streamed", "eager", "create_graph"),
    slow("selective", "eager", "again and again"),
    slow("offload", "eager", "retain_graph"),
]


@pytest.mark.parametrize(("name", "inner", "how"), CASES)
def test_a_graph_that_is_kept_serves_another_backward(name: str, inner: str, how: str, one_thread: None) -> None:
    del one_thread
    plain, ours = Twice(), Twice()
    labels = ("prologue", "inner.layers.0", "inner.layers.1", "epilogue")
    given = autohete_fx.Plan(labels=labels, decisions=(*PLANS[name][:2], *PLANS[name][3:]))
    ours.compile(backend="autohete", options={"inner_backend": inner, "profile": "analytic", "plan": given})
    result = train(ours, autohete_fx.AdamW(ours.parameters(), lr=1e-2), how)
    torch._dynamo.reset()
    if inner == "inductor":
        plain.compile(backend="inductor")
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), how)
    assert_equal(result, expected, bitwise=inner == "eager" or name == "keep")


def test_within_a_budget_a_warning_says_what_nobody_counts(caplog: pytest.LogCaptureFixture) -> None:
    running._tell_that_graphs_are_kept.cache_clear()
    model = Twice()
    model.compile(
        backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "memory_budget": "1GiB"}
    )
    with caplog.at_level(logging.WARNING, "autohete_fx"):
        train(model, autohete_fx.AdamW(model.parameters(), lr=1e-2), "retain_graph")
    assert sum("keeps its graph" in message for message in caplog.messages) == 1
