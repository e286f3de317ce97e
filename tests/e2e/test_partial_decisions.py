"""Kept fetches and partial offload: what they leave on the device, what they copy, and that neither changes a result."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Plan
from autohete_fx.ir import Problem
from autohete_fx.planner import given
from autohete_fx.runtime.meter import device_live_bytes
from autohete_fx.runtime.placement import placement_of
from tests import training
from tests.references import adamw
from tests.thorough import thorough
from tests.training import KEPT, LABELS, Model, Sizes, assert_equal, batch, make, ours, plain

SIZES = Sizes(width=128)  # every matrix is worth a copy
FETCHED = dataclasses.replace(KEPT, keeps_fetched=False)
LAYER_BYTES = sum(p.nbytes for p in make("cpu", SIZES).layers[0].parameters() if p.dim() == 2)


def layers(*decisions: BlockDecision) -> Plan:
    """Three decisions for the layers, or one for all three; everything else stays as it is."""
    inner = decisions * 3 if len(decisions) == 1 else decisions
    return Plan(labels=LABELS, decisions=(BlockDecision(), *inner, BlockDecision()))


def labels(num_layers: int) -> tuple[str, ...]:
    return (*LABELS[: 1 + num_layers], LABELS[-1])


def compiled(plan: Plan, inner: str = "eager", model: Model | None = None) -> Model:
    model = model or make("cpu", SIZES)
    model.compile(backend="autohete", options={"plan": plan, "inner_backend": inner, "profile": "analytic"})
    return model


def held_between_passes(plan: Plan) -> int:
    """Device bytes that live from a forward to its backward, once everything is compiled and placed."""
    model = compiled(plan)
    for step in range(2):
        before = device_live_bytes("cpu")
        loss = model(batch("cpu", step, sizes=SIZES))
        held = device_live_bytes("cpu") - before
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        del loss
    torch._dynamo.reset()
    return held


@functools.cache
def all_kept_between_passes() -> int:
    return held_between_passes(layers(BlockDecision()))


def copies(op: str, graph: str) -> list[int]:
    return [t.num_bytes for t in training.training_compilation().transfers if (t.op, t.graph) == (op, graph)]


@pytest.mark.slow
def test_a_kept_copy_is_there_between_the_passes_and_is_fetched_once():
    fetched, fetches = held_between_passes(layers(FETCHED)), len(copies("prefetch", "backward"))
    assert fetches == 3 * 4
    kept = held_between_passes(layers(FETCHED, KEPT, FETCHED))
    assert kept - fetched == LAYER_BYTES
    assert len(copies("prefetch", "backward")) == fetches - 4
    assert len(copies("prefetch", "forward")) == fetches


def gradients_of_two_forwards(model: Model) -> list[Tensor]:
    """Of both passes together, which both begin before any ends."""
    losses = [model(batch("cpu", step, sizes=SIZES)) for step in range(2)]
    for loss in losses:
        loss.backward()
    return [training.copied(p.grad) for p in model.parameters() if p.grad is not None]


HOST_UPDATED = dataclasses.replace(KEPT, optimizer=Optimizer.HOST)


@pytest.mark.slow
def test_the_peak_of_kept_copies_is_the_predicted_one():
    training.warm_up("cpu")
    foreign_bytes, peaks = device_live_bytes("cpu"), []
    plan = Plan(labels=LABELS, decisions=(KEPT, *(HOST_UPDATED,) * 3, KEPT))
    ours(make("cpu", SIZES), "eager", {"plan": plan}, sizes=SIZES, peaks=peaks)
    assert training.training_compilation().plan.peak_bytes == pytest.approx(max(peaks) - foreign_bytes, rel=0.01)


def test_two_forwards_before_a_backward_have_a_copy_each():
    given = gradients_of_two_forwards(compiled(layers(KEPT), model=make("cpu", SIZES).eval()))
    assert_equal(given, gradients_of_two_forwards(make("cpu", SIZES).eval()), bitwise=True)


@pytest.mark.thorough
def test_compiled_by_inductor_two_forwards_have_a_copy_each_and_training_the_predicted_peak():
    """Without dropout, which Inductor draws otherwise than eager code."""
    training.warm_up("cpu")
    foreign_bytes, peaks, sizes = device_live_bytes("cpu"), [], dataclasses.replace(SIZES, layers=2)
    plan = Plan(labels=labels(2), decisions=(KEPT, HOST_UPDATED, HOST_UPDATED, KEPT))
    model = make("cpu", sizes).eval()
    optimizer = adamw(model)
    given = gradients_of_two_forwards(compiled(plan, "inductor", model))
    optimizer.zero_grad()
    assert_equal(given, gradients_of_two_forwards(make("cpu", sizes).eval()), bitwise=False)
    training.train(model, optimizer, sizes=sizes, peaks=peaks)
    assert training.training_compilation().plan.peak_bytes == pytest.approx(max(peaks) - foreign_bytes, rel=0.01)


def with_a_shared_weight() -> Model:
    model = make("cpu", SIZES)
    model.layers[2].up.weight = model.layers[0].up.weight
    return model


@pytest.mark.slow
def test_a_shared_parameter_is_kept_by_its_owner_alone():
    """Its owner is the first to read it, and the last in backward."""
    plan = layers(KEPT)
    given = ours(with_a_shared_weight(), "eager", {"plan": plan}, sizes=SIZES)
    assert (len(copies("prefetch", "forward")), copies("prefetch", "backward")) == (3 * 4, [])
    assert_equal(given, plain(with_a_shared_weight(), "eager", sizes=SIZES), bitwise=True)
    torch._dynamo.reset()
    model = with_a_shared_weight()
    ours(model, "eager", {"plan": layers(FETCHED, KEPT, KEPT)}, sizes=SIZES)
    assert copies("prefetch", "backward").count(model.layers[0].up.weight.nbytes) >= 2


class InHalves(nn.Linear):
    """A linear layer that reads its weight in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, part) for part in self.weight.chunk(2)], -1)


def with_a_split_weight() -> Model:
    model = make("cpu", SIZES)
    for layer in model.layers:
        layer.up = InHalves(SIZES.width, 4 * SIZES.width, bias=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("decision", [FETCHED, KEPT], ids=["fetched", "kept"])
def test_a_weight_that_is_read_in_parts_is_fetched_whole(decision: BlockDecision):
    given = ours(with_a_split_weight(), "eager", {"plan": layers(decision)}, sizes=SIZES)
    size = with_a_split_weight().layers[0].up.weight.nbytes
    assert copies("prefetch", "forward").count(size) == 2 * 3  # down is as large
    assert_equal(given, plain(with_a_split_weight(), "eager", sizes=SIZES), bitwise=True)


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """What the plans that are given from now on are fitted to."""
    seen: list[Problem] = []
    fitted_plan = given.fitted_plan

    def look(plan: Plan, graph: Any, problem: Problem, **how: Any) -> Plan:
        seen.append(problem)
        return fitted_plan(plan, graph, problem, **how)

    monkeypatch.setattr(given, "fitted_plan", look)
    return seen


def reloaded_bytes(compilation: autohete_fx.Compilation, block: int) -> int:
    return sum(t.num_bytes for t in compilation.transfers if t.op == "reload" and t.block == block)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, None))])
def test_what_leaves_is_what_the_profiler_counts_and_its_memory_is_free(count: int | None, problems: list[Problem]):
    everything = all_kept_between_passes()
    some = BlockDecision(activations=Activations.OFFLOAD, num_offloaded=count)
    held = held_between_passes(layers(BlockDecision(), some, BlockDecision()))
    cost = problems[-1].costs[2]
    assert len(cost.offloadable) > 3
    assert everything - held == cost.offloaded_bytes(count) == reloaded_bytes(training.training_compilation(), 2)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["eager", thorough("inductor")])
def test_neighbours_that_recompute_change_nothing_of_what_leaves(inner: str, problems: list[Problem]):
    """They have more saved for them, which the profiler counts as theirs."""
    recompute = BlockDecision(activations=Activations.RECOMPUTE)
    for some in (BlockDecision(activations=Activations.OFFLOAD, num_offloaded=n) for n in (None, 2)):
        options = {"plan": layers(recompute, some, recompute), "inner_backend": inner, "profile": "analytic"}
        found = autohete_fx.preview(make("cpu", SIZES), batch("cpu", 0, sizes=SIZES), options=options)
        assert reloaded_bytes(found[0], 2) == problems[-1].costs[2].offloaded_bytes(some.num_offloaded)


SOME_STATES = BlockDecision(optimizer=Optimizer.HOST, num_moved_states=2)
SPLIT_STATES = dataclasses.replace(SOME_STATES, other_states=Optimizer.STREAMED)
in_two_places = pytest.mark.parametrize("states", [SOME_STATES, SPLIT_STATES], ids=["device", "streamed"])


@pytest.mark.slow
@in_two_places
def test_states_of_the_smallest_leave_with_their_gradients_as_predicted(states: BlockDecision, problems: list[Problem]):
    training.warm_up("cpu")
    foreign_bytes, peaks = device_live_bytes("cpu"), []
    model = make("cpu", SIZES)
    given = ours(model, "eager", {"plan": layers(states)}, sizes=SIZES, peaks=peaks)
    assert training.training_compilation().plan.peak_bytes == pytest.approx(max(peaks) - foreign_bytes, rel=0.01)
    weights = sorted((p.numel(), name, p) for name, p in model.layers[1].named_parameters() if p.dim() == 2)
    placements = [placement_of(p) for _, _, p in weights]
    found = [placement.optimizer for placement in placements if placement is not None]
    assert found == [Optimizer.HOST] * 2 + [states.other_states] * (len(weights) - 2)
    cost = problems[-1].costs[2]
    assert cost.trained == tuple(numel for numel, _, _ in weights)
    sent = [t.num_bytes for t in training.training_compilation().transfers if t.op == "offload" and t.block == 2]
    assert sum(sent) == cost.part_at(cost.grad_bytes, states, Optimizer.HOST) and len(sent) == 2
    assert_equal(given, plain(make("cpu", SIZES), "eager", sizes=SIZES), bitwise=True)


@pytest.mark.slow
@in_two_places
def test_a_new_shape_finds_the_states_of_some_where_they_are(states: BlockDecision, problems: list[Problem]):
    model = compiled(layers(states))
    for rows in (2, 4):
        model(batch("cpu", 0, sizes=SIZES)[:rows]).backward()
    first, second = (problem.fixed_decisions for problem in problems)
    assert first == () and second == (BlockDecision(), *[states] * 3, BlockDecision())
