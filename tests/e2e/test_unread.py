"""Parameters and buffers that no graph reads count within the budget, as of a vision tower that is given text alone."""

import gc

import pytest
import torch
from torch import nn

import autohete_fx
from autohete_fx.runtime.meter import device_live_bytes
from tests import training
from tests.references import ReferenceAdamW
from tests.training import Sizes, assert_equal, ours, train

SIZES = Sizes(width=128, layers=4)


def make() -> training.Model:
    """The model of the main job with a tower of some 1.3 MB that its forward does not call, in part frozen."""
    model = training.make("cpu", SIZES)
    tower = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400).requires_grad_(False), nn.BatchNorm1d(400))
    tower.register_buffer("patches", torch.zeros(10_000))
    model.add_module("tower", tower)
    return model


@pytest.mark.slow
def test_a_tower_that_is_not_called_counts_within_the_budget():
    training.warm_up("cpu")
    gc.collect()
    foreign, plain_peaks = device_live_bytes("cpu"), []
    model = make()
    tower_bytes = sum(t.nbytes for t in (*model.tower.parameters(), *model.tower.buffers()))
    model.compile(backend="aot_eager")
    expected = train(model, ReferenceAdamW(model, frozenset()), sizes=SIZES, peaks=plain_peaks)
    del model
    torch._dynamo.reset()
    gc.collect()
    budget, peaks = int(0.6 * (max(plain_peaks) - foreign)), []
    foreign = device_live_bytes("cpu")
    given = ours(make(), "eager", {"memory_budget": budget}, sizes=SIZES, peaks=peaks)
    peak = max(peaks) - foreign
    plan = training.training_compilation().plan
    assert peak <= budget and peak > 0.9 * budget - tower_bytes
    assert plan.peak_bytes == pytest.approx(peak, rel=0.05)
    assert_equal(given, expected, bitwise=True)
    with pytest.raises(autohete_fx.InfeasiblePlanError, match="no plan fits"):
        ours(make(), "eager", {"memory_budget": tower_bytes}, sizes=SIZES)
