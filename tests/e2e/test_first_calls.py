"""First calls of several graphs: which graphs are of one model, and what a call that fails leaves behind."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TensorifyScalarRestartAnalysis

import autohete_fx
from autohete_fx import Plan
from autohete_fx.compiler.graph import GraphCompiler
from tests import training as job
from tests.broken import ROWS, WIDTH, make, plainly, trained
from tests.main_job import slow


@pytest.fixture(autouse=True)
def _prepared() -> Iterator[None]:
    job.warm_up("cpu")
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("what", ["torch's optimizer", slow("evaluation before there is an optimizer")])
def test_graphs_of_a_module_are_of_one_model_though_no_optimizer_of_ours_holds_them(what: str):
    expected, peak = plainly(make((2,), num_blocks=4), "eager")
    budget, model = int(0.6 * peak), make((2,), num_blocks=4)
    own = {"memory_budget": budget, "inner_backend": "eager", "profile": "analytic", "solver_time_limit_s": 1}
    model.compile(backend="autohete", options=own)
    if what == "torch's optimizer":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    else:
        with torch.no_grad():
            model(torch.randn(ROWS, WIDTH))
        optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
    given, peaks = trained(model, optimizer)
    job.assert_equal(given, expected, bitwise=True)
    assert max(peaks) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["compile", "finish"])
def test_a_first_call_that_fails_at_a_later_graph_leaves_nothing_behind(stage: str, monkeypatch: pytest.MonkeyPatch):
    """The next call plans and trains as if it were the first."""
    expected, peak = plainly(make((2,), num_blocks=4), "eager", steps=2)
    own = {"memory_budget": int(0.5 * peak), "inner_backend": "eager", "profile": "analytic"}

    def plans_of(model: nn.Module, optimizer: autohete_fx.AdamW) -> list[Plan]:
        earlier = autohete_fx.compilations()
        given, peaks = trained(model, optimizer, steps=2)
        job.assert_equal(given, expected, bitwise=True)
        assert max(peaks) <= own["memory_budget"]
        new = [c.plan for c in autohete_fx.compilations() if not any(c is other for other in earlier)]
        torch._dynamo.reset()
        return [dataclasses.replace(plan, solve_s=0.0) for plan in new]

    def made() -> tuple[nn.Module, autohete_fx.AdamW]:
        model = make((2,), num_blocks=4)
        model.compile(backend="autohete", options=own)
        return model, autohete_fx.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = made()
    undisturbed, runs = getattr(GraphCompiler, stage), []

    def fails_at_the_second(compiler: GraphCompiler, *given: Any) -> Any:
        runs.append(compiler)
        if len(runs) == 2:
            raise MemoryError("of a host that is full")
        return undisturbed(compiler, *given)

    monkeypatch.setattr(GraphCompiler, stage, fails_at_the_second)
    with pytest.raises(Exception, match="of a host that is full"):
        model(torch.randn(ROWS, WIDTH))
    monkeypatch.undo()
    assert plans_of(model, optimizer) == plans_of(*made())


def test_what_dynamo_begins_afresh_by_itself_keeps_what_is_compiled(monkeypatch: pytest.MonkeyPatch):
    """It analyses a function again where a backend tells it of constants, and runs the graphs before it in the meantime."""
    model, compiled, undisturbed = make((2,), num_blocks=4), [], GraphCompiler.compile
    model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic"})

    def begins_afresh_at_the_second(compiler: GraphCompiler, *given: Any) -> Any:
        compiled.append((min(compiler.captured.params), torch.is_grad_enabled()))
        if len(compiled) == 2:
            raise TensorifyScalarRestartAnalysis
        return undisturbed(compiler, *given)

    monkeypatch.setattr(GraphCompiler, "compile", begins_afresh_at_the_second)
    model(torch.randn(ROWS, WIDTH)).backward()
    assert len(compiled) == 3, "the first graph is compiled once"
