"""Models and graphs that share: a budget, a parameter, the code that Dynamo has compiled."""

import gc

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import BlockDecision, Params
from autohete_fx.compiler.model import _models
from autohete_fx.runtime.tiers.host import is_home
from tests import training as job
from tests.layers import EAGER, assert_bitwise, make, plain, plan_of, train


def test_graphs_of_one_model_share_a_budget():
    expected = plain(broken=True)
    model = make(broken=True)
    model.compile(backend="autohete", options={**EAGER, "memory_budget": "3MiB"})
    assert_bitwise(train(model), expected)
    second, first = [c for c in autohete_fx.compilations() if c.training][
        -2:
    ]  # the first is compiled again for its share
    assert first.footprint.total_bytes > 0
    assert second.plan.peak_bytes <= 3 * 2**20 and first.plan.peak_bytes <= 3 * 2**20
    held = first.footprint.resident_bytes + first.footprint.held_bytes
    assert second.plan.peak_bytes > second.footprint.resident_bytes + held


class Around(nn.Module):
    """The first layer runs before a graph break and after it, as tied embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x).relu()).relu()
        torch._dynamo.graph_break()
        return self.layers[0](self.layers[2](x).relu()).square().mean()


def test_graphs_of_one_call_that_share_a_parameter_are_two():
    """And a shape that is new to them replaces what was noted of each."""
    torch.manual_seed(0)
    model = Around()
    model.compile(backend="autohete", options={**EAGER, "memory_budget": "8MiB"})
    train(model, batch=256, steps=1)
    train(model, batch=512, steps=1)
    found = [c for c in autohete_fx.compilations() if c.training][-4:]
    assert [sorted(c.owners) for c in found] == 2 * [[f"layers.{i}.weight" for i in pair] for pair in ((0, 1), (0, 2))]
    before, after, before_again, after_again = found
    for one, other in ((after, before), (after_again, before_again)):
        held = other.footprint.resident_bytes + other.footprint.held_bytes
        assert one.plan.peak_bytes > one.footprint.resident_bytes + held
    noted = _models[model.layers[0].weight]().shares
    assert len(noted.footprints) == 2 and list(noted.footprints.values())[-1] == after_again.footprint


def test_a_call_beyond_the_limit_of_recompilations_is_told_that_no_budget_holds(caplog: pytest.LogCaptureFixture):
    model = make()
    model.compile(backend="autohete", options=EAGER, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        train(model, batch=256)
        assert not caplog.records
        for batch in (128, 64):
            train(model, batch=batch)
    assert sum("no memory_budget holds" in record.getMessage() for record in caplog.records) == 1


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = self.layer(x)
        return x


@pytest.mark.parametrize("is_traceable", [False, True])
def test_a_model_of_which_nothing_is_compiled_is_told_once_that_no_budget_holds(
    is_traceable: bool, caplog: pytest.LogCaptureFixture
):
    """Dynamo compiles nothing of a function whose graph breaks within a loop. Of models that can be compiled the second is served
    with the code of the first, without a compilation, and is told nothing."""
    made = make if is_traceable else Looping
    for _ in range(2):
        model = made()
        model.compile(backend="autohete", options=EAGER)
        for _ in range(2):
            model(torch.ones(8, 128))
    told = [record.getMessage() for record in caplog.records]
    assert [message[:24] for message in told] == (0 if is_traceable else 2) * ["Dynamo compiled nothing "]
    if told:
        assert "could not compile Looping.forward, " in told[0] and ", breaks at " in told[0]
        assert "could not compile the module's forward in an earlier call" in told[1]


def test_two_equal_models_do_not_meet():
    expected = plain()
    models = [make(), make()]
    host = plan_of(BlockDecision(params=Params.HOST))
    for model in models:
        model.compile(backend="autohete", options={**EAGER, "plan": host})
    for model in models:
        assert_bitwise(train(model), expected)
    assert all(is_home(layer[0].weight) for model in models for layer in model.layers)


def test_blocks_that_are_compiled_one_by_one_are_exact_and_told_that_the_budget_counts_one(
    caplog: pytest.LogCaptureFixture,
):
    """Dynamo serves all of them with the code of the first. A model that is made again is no other beside the first: below."""
    model, expected = job.make("cpu"), job.plain(job.make("cpu"), "eager")
    for layer in model.layers:
        layer.compile(backend="autohete", options={**EAGER, "memory_budget": "8MiB"})
    given = job.train(model, autohete_fx.AdamW(model.parameters(), lr=1e-3))
    job.assert_equal(given, expected, bitwise=False)
    assert (
        sum(
            "memory_budget counts one of them. Delete the first one" in record.getMessage() for record in caplog.records
        )
        == 1
    )


@pytest.mark.slow
def test_a_model_that_shares_a_layer_with_another_is_placed_too():
    models = [make(), make()]
    models[1].layers[0] = models[0].layers[0]
    host = plan_of(BlockDecision(params=Params.HOST))
    for model in models:
        model.compile(backend="autohete", options={**EAGER, "plan": host})
        model(torch.randn(256, 128)).backward()
    assert all(is_home(layer[0].weight) for layer in models[1].layers)


@pytest.mark.slow
def test_a_model_that_is_made_again_keeps_the_budget_with_the_code_of_the_first(caplog: pytest.LogCaptureFixture):
    """As in a notebook whose cell runs twice: Dynamo has code for the class, and asks no backend."""
    budget, expected = 3 * 2**19, plain()
    autohete_fx.preview(make(), torch.randn(256, 128))  # times the machine, which takes scratch of its own
    latest = None
    for is_again in (False, True):
        with autohete_fx.MemoryMeter("cpu") as meter:
            others = meter.start_bytes
        model = make()
        model.compile(backend="autohete", options={**EAGER, "memory_budget": budget})
        with autohete_fx.MemoryMeter("cpu") as meter:
            trained = train(model)
        assert meter.peak_bytes - others <= budget
        before, latest = latest, autohete_fx.compilations()[-1]
        assert (latest is before) == is_again
        assert any(is_home(layer[0].weight) for layer in model.layers)
        assert_bitwise(trained, expected)
        del model, trained
        gc.collect()
    assert not caplog.records
