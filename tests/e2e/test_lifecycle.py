"""Processes, caches, several graphs and several models: what a compiled model shares, and with whom."""

import dataclasses
import gc
import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.compiler import fitting, keys, stored, training
from autohete_fx.compiler.graph import GraphCompiler
from autohete_fx.runtime.placement import placement_of
from tests import training as job
from tests.held_updates import use_lanes
from tests.layers import EAGER, assert_bitwise, make, plain, plan_of, train
from tests.processes import run_python

SCRIPT = """
import json, sys, torch
from torch import nn
class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
for options in json.loads(sys.argv[1]):
    torch.compiler.reset(); torch.manual_seed(0)
    loss = Loss()
    loss.compile(backend="autohete", options=options)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    seen = []
    for step in range(2):
        value = loss(torch.randn(256, 128, generator=torch.Generator().manual_seed(step)))
        value.backward(); optimizer.step(); optimizer.zero_grad()
        seen.append(value.item())
    import autohete_fx
    from torch._dynamo.utils import counters
    found = autohete_fx.compilations()[-1]
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    counters.clear()
    print(json.dumps([seen, found.cached, hits, len(found.transfers)]))
"""


def run_script(*options: dict[str, Any]) -> list[Any]:
    """What a process of its own finds with each of these options. Of what other tests compiled it finds kernels, but no graph."""
    environment = {**os.environ, "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    done = run_python(["-W", "ignore", "-c", SCRIPT, json.dumps(options)], environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_host_memory_is_taken_before_the_first_step_and_no_more_of_it_later() -> None:
    sizes = job.Sizes(width=512)
    model = job.make("cpu", sizes)
    everything = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
    plan = Plan(labels=job.LABELS, decisions=(everything,) * len(job.LABELS))
    optimizer = autohete_fx.AdamW(model.parameters())
    model.compile(backend="autohete", options={**EAGER, "plan": plan})
    loss = model(job.batch("cpu", 0, sizes=sizes))
    placement = placement_of(model.layers[0].up.weight)
    assert placement is not None
    planned, reserved = autohete_fx.compilations()[-1].plan.host_bytes, [placement.tier.reserved_bytes]
    for _ in range(3):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reserved.append(placement.tier.reserved_bytes)
        loss = model(job.batch("cpu", 1, sizes=sizes))
    assert 100e6 < planned <= reserved[0] <= 1.2 * planned and set(reserved) == {reserved[0]}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_plans")
def test_a_second_process_finds_the_code_and_another_plan_does_not(tmp_path: Path):
    """Also: the backend's name works without importing the package first."""
    for name, decision in (
        ("offload", BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST)),
        ("keep", BlockDecision()),
    ):
        plan_of(decision).save(tmp_path / f"{name}.json")
    options = {"plan": str(tmp_path / "offload.json"), "profile": "analytic"}
    (first,) = run_script(options)
    second, other = run_script(options, {**options, "plan": str(tmp_path / "keep.json")})
    assert first[0] == second[0] == pytest.approx(other[0])
    assert not first[1] and first[2] == 0 and first[3] > 0
    assert second[1] and second[2] >= 1 and second[3] == first[3]
    assert not other[1] and other[2] == 0 and other[3] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_plans")
def test_a_stored_plan_of_another_graph_is_no_error(monkeypatch: pytest.MonkeyPatch):
    """State of the process that no key has: here a key that does not have the graph's code."""
    monkeypatch.setattr(keys, "described_code", lambda gm: [])
    planned_afresh: list[int] = []
    monkeypatch.setattr(stored.secrets, "token_hex", lambda length: planned_afresh.append(length) or "a key")
    for activation, is_known in ((nn.GELU, False), (nn.Tanh, True)):
        models = make(), make()
        for model in models:
            for layer in model.layers:
                layer[1] = activation()
        models[0].compile(backend="autohete", options={**EAGER, "memory_budget": "64MiB"})
        x = torch.randn(256, 128)
        losses = [model(x) for model in models]
        for loss in losses:
            loss.backward()
        assert_bitwise([p.grad for p in models[0].parameters()], [p.grad for p in models[1].parameters()])
        assert bool(planned_afresh) is is_known
        del models, model, layer, losses, loss
        torch._dynamo.reset()
        gc.collect()  # or the next model is this one's twin, which has a key of its own


def test_a_new_shape_is_compiled_again_for_the_same_model():
    model = make()
    model.compile(backend="autohete", options={**EAGER, "memory_budget": "4MiB"}, dynamic=False)
    train(model)
    before = autohete_fx.compilations()[-1]
    train(model, batch=128)
    assert autohete_fx.compilations()[-1] is not before


@pytest.mark.slow
def test_a_plain_optimizer_is_counted_on_the_device_and_told():
    model = make()
    model.compile(backend="autohete", options=EAGER)
    assert_bitwise(train(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)), plain())
    assert "counted on the device" in next(c for c in reversed(autohete_fx.compilations()) if c.training).notes[0]


@pytest.mark.slow
def test_a_placed_model_trains():
    model = make()
    autohete_fx.place(model, "cpu")
    model.compile(backend="autohete", options={**EAGER, "memory_budget": "4MiB"})
    assert_bitwise(train(model), plain())


@pytest.mark.slow
def test_lanes_end_with_the_model(monkeypatch: pytest.MonkeyPatch):
    use_lanes(monkeypatch)  # without a core to spare there would be no threads
    others = set(threading.enumerate())  # of models that other tests left alive
    model = make()
    host = plan_of(BlockDecision(params=Params.HOST))
    model.compile(backend="autohete", options={**EAGER, "plan": host})
    train(model)
    lanes = [thread for thread in threading.enumerate() if thread not in others and thread.name.startswith("autohete")]
    assert lanes
    del model
    torch._dynamo.reset()
    gc.collect()
    for thread in lanes:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in lanes)


def test_preview_leaves_everything_as_it_was():
    model = make()
    before = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    budget = {"memory_budget": "4MiB", "profile": "analytic"}
    found = autohete_fx.preview(
        model, torch.randn(256, 128, generator=torch.Generator().manual_seed(0)), options=budget
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert_bitwise([p.detach() for p in model.parameters()], before)
    assert len(found) == 1 and found[0].plan.peak_bytes <= 4 * 2**20
    assert found[0].timeline() and found[0].plan_table()
    with pytest.raises(autohete_fx.PlanError, match="does not fit this graph"):
        other = Plan(labels=("x",), decisions=(BlockDecision(),))
        autohete_fx.preview(model, torch.randn(256, 128), options={"plan": other})


@pytest.mark.slow
def test_a_batch_dies_with_its_step():
    model = make()
    model.compile(backend="autohete", options={"profile": "analytic"})
    batch = torch.randn(256, 128)
    model(batch).backward()
    died = weakref.ref(batch)
    del batch
    gc.collect()
    assert died() is None


@pytest.mark.slow
def test_code_that_would_break_the_budget_is_compiled_again(monkeypatch: pytest.MonkeyPatch, fresh_plans: Path):
    """A plan that is too hopeful by a tenth costs compilations, never the budget; the next process knows better."""
    autohete_fx.preview(make(), torch.randn(256, 128))  # times the machine, which takes scratch of its own
    partitions: list[dict[str, float]] = []  # by stage, the seconds before each
    once = GraphCompiler.partition

    def partition(self: GraphCompiler, *a: Any, **k: Any) -> Any:
        partitions.append(dict(self._seconds))
        return once(self, *a, **k)

    monkeypatch.setattr(fitting, "_RESERVE", -0.1)
    monkeypatch.setattr(GraphCompiler, "partition", partition)
    budget = 3 * 2**19
    for is_known in (False, True):
        with autohete_fx.MemoryMeter("cpu") as meter:
            foreign = meter.start_bytes
        model = make()
        model.compile(backend="autohete", options={"profile": "analytic", "memory_budget": budget})
        optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
        with autohete_fx.MemoryMeter("cpu") as meter:
            for _ in range(2):
                model(torch.randn(256, 128)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert meter.peak_bytes - foreign <= budget
        assert not partitions if is_known else 2 <= len(partitions) <= 4
        if not is_known:
            seconds = autohete_fx.compilations()[-1].compile_s
            assert partitions[-1] and all(seconds[stage] > before for stage, before in partitions[-1].items())
        partitions.clear()
        del model, optimizer
        torch._dynamo.reset()
        gc.collect()


@pytest.mark.usefixtures("fresh_plans")
def test_a_stored_plan_says_why_it_decides_so():
    """Though what is left of its budget, and what is free on the host, are not what they were."""
    said = []
    for _ in range(2):
        model = make()
        model.compile(backend="autohete", options={**EAGER, "memory_budget": "2MiB"})
        autohete_fx.AdamW(model.parameters(), lr=1e-2)
        model(torch.randn(256, 128)).backward()
        compilation = autohete_fx.compilations()[-1]
        why = [
            line for line in compilation.why().splitlines() if "host memory does not bind" not in line
        ]  # it is what is free
        said.append((compilation.plan.decisions, why))
        del model
        torch._dynamo.reset()
        gc.collect()
    assert said[0] == said[1] and said[0][1] and not any("no reasons" in line for line in said[0][1])


@pytest.mark.slow
def test_a_budget_is_refused_by_what_was_compiled_and_not_by_a_trace_that_is_too_high(
    monkeypatch: pytest.MonkeyPatch, fresh_plans: Path
):
    """The trace is a twentieth above what it was: plans that keep the budget remain, and the least that is named does."""
    once = training.trace_step

    def too_high(*args: Any, **how: Any) -> Any:
        trace = once(*args, **how)
        high = dataclasses.replace(trace.forward, peak_bytes=trace.peak_bytes + 2**17)
        return dataclasses.replace(trace, forward=high)

    monkeypatch.setattr(training, "trace_step", too_high)
    options = {"profile": "analytic", "allow": ["recompute"]}

    def peak_within(budget: int) -> int:
        torch._dynamo.reset()
        model = make()
        model.compile(backend="autohete", options={**options, "memory_budget": budget})
        torch.optim.SGD(model.parameters())
        model(torch.randn(256, 128)).backward()
        return training_plan().peak_bytes

    def training_plan() -> Plan:
        return next(c.plan for c in reversed(autohete_fx.compilations()) if c.training)

    with pytest.raises(autohete_fx.InfeasiblePlanError) as caught:
        autohete_fx.preview(make(), torch.randn(256, 128), options={**options, "memory_budget": 1000})
    traced = caught.value.smallest_budget_bytes
    assert traced is not None
    peak = peak_within(traced - 2**16)
    assert peak <= traced - 2**16
    with pytest.raises(autohete_fx.InfeasiblePlanError, match="compiled code needs") as caught:
        peak_within(peak - 2**12)
    smallest = caught.value.smallest_budget_bytes
    assert smallest is not None and peak_within(smallest) <= smallest


def test_what_was_predicted_is_logged_beside_what_was_measured_once(caplog: pytest.LogCaptureFixture):
    model = make()
    model.compile(backend="autohete", options={**EAGER, "micro_batches": 2})
    with caplog.at_level("INFO", logger="autohete_fx.compiler.running"):
        for _ in range(25):
            train(model)
    (compilation,) = [c for c in autohete_fx.compilations() if c.clock is not None][-1:]
    assert compilation.measured_step_s is not None and compilation.measured_step_s > 0
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("after")]
    (text,) = logged
    assert text.startswith("after 20 steps\n") and "measured" in text and "predicted" in text


def test_plans_count_what_kernels_are_timed_in(monkeypatch: pytest.MonkeyPatch):
    def peak_bytes() -> int:
        return autohete_fx.preview(make(), torch.randn(256, 128), options={"profile": "analytic"})[0].plan.peak_bytes

    without = peak_bytes()
    monkeypatch.setattr("autohete_fx.compiler.captured.tuning_bytes", lambda device, options: 2**20)
    assert peak_bytes() == without + 2**20
