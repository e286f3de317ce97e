"""Gradients of one rank, summed over ranks that are not there: a sum of the fake group is this rank's own part."""

import math

import pytest
import torch
from torch import nn

from autohete_fx.cluster.batches import batch_of
from autohete_fx.cluster.layers import map_layers
from autohete_fx.cluster.pieces import Cut, Piece
from autohete_fx.cluster.sums import GradientSums, clip_factor
from autohete_fx.internals.fake_group import fake_default_group
from tests.tiny_models import GPT


def test_a_parameter_that_no_rank_reached_has_no_gradient_and_an_optimizer_leaves_it():
    layer_map = map_layers(GPT, batch_of(torch.zeros(1, 4, dtype=torch.long)))
    params = {name: nn.Parameter(torch.ones(4, 2)) for name in ("norm.weight", "norm.bias", "head.weight")}
    halves = [Piece("head.weight", cut=Cut(dim=0, first=at, stop=at + 2, length=4)) for at in (0, 2)]
    owners = {Piece("norm.weight"): (0, 1), Piece("norm.bias"): (0, 1), halves[0]: (0, 1), halves[1]: (0, 2)}
    params["norm.weight"].grad = torch.full((4, 2), 3.0)
    with fake_default_group(3):
        GradientSums(owners, layer_map, params, {name: Piece(name) for name in params}).reduce()
    assert params["norm.bias"].grad is None and params["head.weight"].grad is None
    torch.testing.assert_close(params["norm.weight"].grad, torch.full((4, 2), 3.0), rtol=0, atol=0)


@pytest.mark.parametrize("gradient", [0.0, 0.1, 5.0, math.inf, math.nan])
def test_factors_are_those_of_pytorch(gradient: float):
    p = nn.Parameter(torch.ones(1, dtype=torch.float64))
    p.grad = torch.full_like(p, gradient)
    norm = torch.nn.utils.clip_grad_norm_([p], 0.5)
    found = torch.full_like(p, gradient) * clip_factor(float(norm), 0.5)
    torch.testing.assert_close(found, p.grad, rtol=0, atol=0, equal_nan=True)
    assert clip_factor(float(norm), None) == 1.0
