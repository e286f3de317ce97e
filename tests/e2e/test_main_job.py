"""The main job on a CPU device, and budgets that cannot be kept. Each solves, so one device is enough."""

import pytest

import autohete_fx
from tests.main_job import MainJob
from tests.training import Sizes, batch, make


class TestOnCpu(MainJob):
    device = "cpu"
    large = Sizes(width=192, layers=4)
    deep = Sizes(width=192, layers=6)


@pytest.mark.slow
def test_a_silly_budget_says_what_would_do_and_that_works():
    model = make("cpu")
    autohete_fx.AdamW(model.parameters())
    options = {"memory_budget": 1000, "profile": "analytic"}
    with pytest.raises(autohete_fx.InfeasiblePlanError, match="held up in") as caught:
        autohete_fx.explain(model, batch("cpu", 0), options=options)
    smallest = caught.value.smallest_budget_bytes
    found = autohete_fx.explain(model, batch("cpu", 0), options={**options, "memory_budget": smallest})
    assert found[0].plan.peak_bytes <= smallest


@pytest.mark.slow
def test_the_backend_raises_its_own_errors():
    model = make("cpu")
    model.compile(backend="autohete", options={"memory_budget": 1000, "profile": "analytic"})
    with pytest.raises(autohete_fx.InfeasiblePlanError):
        model(batch("cpu", 0))
