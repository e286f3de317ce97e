"""The main job on a CPU device, and budgets that cannot be kept. Each solves, so one device is enough."""

from collections.abc import Callable
from typing import Any

import pytest

import autohete_fx
from autohete_fx.runtime.placement import placement_of
from tests import training
from tests.main_job import MainJob, slow
from tests.training import Model, Sizes, batch, make, plan, stepped_on_host


class TestOnCpu(MainJob):
    device = "cpu"
    large = Sizes(width=192, layers=4)
    deep = Sizes(width=192)
    with_masters = ("mixed",)

    @pytest.mark.parametrize("name", ["mixed", *map(slow, training.IDLE)])
    def test_hand_made_plans_are_bitwise_exact(self, name: str):
        """test_overlap.py has the others, on lanes that are late."""
        super().test_hand_made_plans_are_bitwise_exact(name)

    @pytest.mark.parametrize(
        ("name", "how"),
        [
            ("mixed", {"micro_batches": 3}),
            slow("mixed", {"between": training.evaluate}),
            slow("mixed in part", {"clip": True, "micro_batches": 2}),
        ],
        ids=["accumulation", "evaluation between steps", "clipping"],
    )
    def test_loops_are_bitwise_exact(self, how: dict[str, Any], name: str):
        """test_overlap.py has every plan with the last two."""
        super().test_loops_are_bitwise_exact(how, name)

    @pytest.mark.parametrize(
        ("name", "made"),
        [
            slow("mixed", lambda device: training.frozen(make(device))),
            slow("mixed in part", lambda device: make(device, tied=True)),
        ],
        ids=["frozen", "tied"],
    )
    def test_frozen_and_tied_parameters_are_bitwise_exact(self, made: Callable[[str], Model], name: str):
        super().test_frozen_and_tied_parameters_are_bitwise_exact(made, name)

    @pytest.mark.slow
    @pytest.mark.parametrize("share", [0.3, 1.0])
    def test_solved_plans_are_exact_and_keep_the_budget_in_every_step(self, share: float):
        super().test_solved_plans_are_exact_and_keep_the_budget_in_every_step(share)

    test_a_hand_made_plan_with_inductor: Any = None
    """test_overlap_backward.py and test_partial_decisions.py have it on a CPU."""

    @pytest.mark.slow
    @pytest.mark.parametrize("share", [0.45])
    def test_solved_plans_with_inductor(self, share: float):
        """test_shared_layers.py has a larger share under Inductor, and the test above a smaller one node by node."""
        super().test_solved_plans_with_inductor(share)


@pytest.mark.slow
def test_a_silly_budget_says_what_would_do_and_that_works():
    model = make("cpu")
    autohete_fx.AdamW(model.parameters())
    options = {"memory_budget": 1000, "profile": "analytic"}
    with pytest.raises(autohete_fx.InfeasiblePlanError, match="held up in") as caught:
        autohete_fx.preview(model, batch("cpu", 0), options=options)
    smallest = caught.value.smallest_budget_bytes
    found = autohete_fx.preview(model, batch("cpu", 0), options={**options, "memory_budget": smallest})
    assert found[0].plan.peak_bytes <= smallest


@pytest.mark.slow
def test_the_backend_raises_its_own_errors():
    model = make("cpu")
    model.compile(backend="autohete", options={"memory_budget": 1000, "profile": "analytic"})
    with pytest.raises(autohete_fx.InfeasiblePlanError):
        model(batch("cpu", 0))


def test_on_a_gpu_the_reference_steps_those_parameters_on_the_host_that_the_plan_does():
    """Of some blocks, some. The kernels of two processors round differently."""
    model = make("cpu")
    options = {"plan": plan("streamed"), "inner_backend": "eager", "profile": "analytic"}
    model.compile(backend="autohete", options=options)
    model(batch("cpu", 0))
    placed = {name: where for name, p in model.named_parameters() if (where := placement_of(p)) is not None}
    on_host = {name for name, where in placed.items() if where.optimizer.updates_on_host}
    assert stepped_on_host() == on_host
    blocks, others = ({placed[name].block for name in names} for names in (on_host, placed.keys() - on_host))
    assert blocks & others
