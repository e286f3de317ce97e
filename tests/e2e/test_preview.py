"""What `autohete_fx.preview` finds, however often it is asked, that it leaves PyTorch as it was, and what a compilation notes."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config

import autohete_fx
from autohete_fx.compiler import rewriting
from autohete_fx.errors import CaptureError, InfeasiblePlanError
from tests import training as job
from tests.main_job import slow

EAGER = {"inner_backend": "eager", "profile": "analytic"}


@pytest.mark.parametrize("inner", [slow("inductor"), "eager"])
def test_it_leaves_the_compiler_as_it_was(inner: str):
    before = functorch_config.save_config_portable()
    options = {**EAGER, "inner_backend": inner, "plan": job.plan("offload")}
    (found,) = autohete_fx.preview(job.make("cpu"), job.batch("cpu", 0), options=options)
    assert {transfer.op for transfer in found.transfers} == {"offload", "reload"}
    assert functorch_config.save_config_portable() == before


@pytest.mark.slow
def test_it_may_be_asked_more_often_than_code_may_be_compiled_again():
    model = job.make("cpu")
    names = dict(model.named_parameters()).keys()
    with dynamo_config.patch(recompile_limit=2):
        for _ in range(3):
            (found,) = autohete_fx.preview(model, job.batch("cpu", 0), options=EAGER)
            assert found.owners.keys() <= names and len(found.owners) > 1
    model.compile(backend="autohete", options={**EAGER, "plan": found.plan})
    earlier = autohete_fx.compilations()[-8:]  # the oldest are dropped
    model(job.batch("cpu", 0)).backward()
    latest = autohete_fx.compilations()[-len(earlier) - 1 :]
    assert latest[:-1] == earlier and not any(latest[-1] is other for other in earlier)
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_budget_that_only_the_trace_keeps_is_told(monkeypatch: pytest.MonkeyPatch):
    for can_run in (True, False):
        if not can_run:
            monkeypatch.setattr("autohete_fx.compiler.graph.dry_run", lambda *_, **__: None)
        model = job.make("cpu", job.Sizes(layers=1))
        options = {"profile": "analytic", "memory_budget": f"{64 + can_run}MiB"}  # code of its own
        model.compile(backend="autohete", options=options)
        model(job.batch("cpu", 0)).backward()
        notes = "".join(job.training_compilation().notes)
        assert ("trace alone; compile with dynamic=False" in notes) is not can_run
        torch._dynamo.reset()


def test_plans_that_recompute_alike_are_partitioned_once(monkeypatch: pytest.MonkeyPatch):
    keys, plans = [], []
    partition, rewrite = rewriting.partition, rewriting.rewrite_training

    def noted_partition(joint: Any, inputs: Any, context: Any, *rest: Any) -> Any:
        keys.append(rewriting.partition_key(context.plan, gathers=False))
        return partition(joint, inputs, context, *rest)

    def noted_rewrite(split: Any, plan: Any, *rest: Any, **how: Any) -> Any:
        plans.append(plan)
        return rewrite(split, plan, *rest, **how)

    monkeypatch.setattr(rewriting, "partition", noted_partition)
    monkeypatch.setattr(rewriting, "rewrite_training", noted_rewrite)
    with pytest.raises(InfeasiblePlanError):
        autohete_fx.preview(job.make("cpu"), job.batch("cpu", 0), options={**EAGER, "memory_budget": 1})
    assert len(plans) > 1
    assert len({*keys}) == len(keys) == len({rewriting.partition_key(plan, gathers=False) for plan in plans} | {*keys})


class Counting(torch.nn.Module):
    """Counts its calls. Without a graph break it makes a mask in the first one, where PyTorch 2.11 breaks the graph itself."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(64, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.breaks = breaks
        if breaks:
            self.register_buffer("mask", torch.ones(8, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones_like(x))
        x = self.norm(self.inner(x * self.get_buffer("mask")))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.inner(x).mean()


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_are_as_before_though_forward_makes_one_or_a_later_graph_fails(fails: bool):
    model = Counting(breaks=fails)
    before, seen = {name: b.clone() for name, b in model.named_buffers()}, list[int]()

    def look(graph: Any, context: Any) -> None:
        seen.append(model.norm.get_buffer("num_batches_tracked")._version)
        if len(seen) == 2:
            raise ValueError("the second graph")

    if fails:
        with pytest.raises(Exception, match="the second graph"):
            autohete_fx.preview(model, torch.randn(8, 64), options={**EAGER, "passes": {"joint": look}})
        assert seen[0] < seen[1], "the first graph has run"
    else:
        assert autohete_fx.preview(model, torch.randn(8, 64), options=EAGER)
        assert torch.equal(model.get_buffer("mask"), torch.ones(8, 64))
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_buffers_are_as_before_too_where_a_function_is_given():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)), torch.randn(8, 64)
    before = {name: b.clone() for name, b in model.named_buffers()}
    for given, inputs in (
        (lambda x: model(x), (x,)),
        (lambda net, x: net(x), (model, x)),
        (model.forward, (x,)),
        (functools.partial(model, x), ()),
    ):
        assert autohete_fx.preview(given, *inputs, options=EAGER)
        assert all(torch.equal(b, before[name]) for name, b in model.named_buffers()), given


def test_buffers_that_cannot_be_written_are_left_alone():
    model = nn.Linear(64, 64)
    model.register_buffer("sparse", torch.eye(4).to_sparse())
    model.register_buffer("expanded", torch.ones(1).expand(64))
    with torch.inference_mode():
        model.register_buffer("inferred", torch.ones(64))
    read = lambda x: (model(x) * model.expanded + model.inferred).sum()  # noqa: E731
    assert autohete_fx.preview(read, torch.randn(8, 64), options=EAGER)


def test_a_function_without_a_graph_is_told():
    with pytest.raises(CaptureError, match="compiled no graph"):
        autohete_fx.preview(len, [1, 2, 3])
