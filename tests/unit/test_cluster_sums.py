"""Gradients of one rank, summed over ranks that are not there: a sum of the fake group is this rank's own part."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autohete_fx.cluster.job import sums
from autohete_fx.cluster.job.sums import GradientSums, clip_factor, sum_groups
from autohete_fx.cluster.model.batches import batch_of
from autohete_fx.cluster.model.layers import map_layers
from autohete_fx.cluster.model.pieces import Cut, Piece
from autohete_fx.errors import ClusterError
from autohete_fx.internals.fake_group import fake_default_group
from autohete_fx.runtime.held import held
from tests.tiny_models import GPT


def test_a_parameter_that_no_rank_reached_has_no_gradient_and_an_optimizer_leaves_it():
    layer_map = map_layers(GPT, batch_of(torch.zeros(1, 4, dtype=torch.long)))
    params = {name: nn.Parameter(torch.ones(4, 2)) for name in ("norm.weight", "norm.bias", "head.weight")}
    halves = [Piece("head.weight", (Cut(dim=0, first=at, stop=at + 2, length=4),)) for at in (0, 2)]
    owners = {Piece("norm.weight"): (0, 1), Piece("norm.bias"): (0, 1), halves[0]: (0, 1), halves[1]: (0, 2)}
    params["norm.weight"].grad = torch.full((4, 2), 3.0)
    with fake_default_group(3):
        GradientSums(owners, sum_groups(owners), layer_map, params, {name: Piece(name) for name in params}).reduce()
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


def test_sums_start_within_the_last_backward_pass_in_one_order(monkeypatch: pytest.MonkeyPatch):
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))

    monkeypatch.setattr(sums, "BUCKET_BYTES", 1)  # each parameter alone
    layer_map, model = map_layers(build, batch_of(torch.zeros(1, 4))), build()
    params = dict(model.named_parameters())
    owners = {Piece(name): (0, 1) for name in params}
    seen: list[str] = []
    with fake_default_group(2):
        found = GradientSums(owners, sum_groups(owners), layer_map, params, {name: Piece(name) for name in params})
        found.overlap(params)
        summed = sums.dist.all_reduce
        monkeypatch.setattr(sums.dist, "all_reduce", lambda *a, **k: (seen.append("sum"), summed(*a, **k))[1])
        for _ in range(2):
            expected = {name: torch.zeros_like(param) for name, param in params.items()}
            for micro_batch in range(2):
                x = torch.randn(3, 4, requires_grad=True)
                loss = model(x).sum()
                grads = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
                expected = {name: expected[name] + grad for name, grad in zip(params, grads, strict=True)}
                x.register_hook(lambda _, at=micro_batch: seen.append(f"end of {at}"))
                if micro_batch:
                    found.begin_last([loss])
                with monkeypatch.context() as patched:
                    patched.setattr(torch, "tensor", lambda *_: pytest.fail("copied from the host within the pass"))
                    loss.backward()
            found.reduce()
            for name, param in params.items():
                torch.testing.assert_close(param.grad, expected[name], rtol=0, atol=0)
            # the first layer's gradients end with the pass; those of the other eleven were there before
            assert seen[0] == "end of 0" and seen.count("sum") == 24
            assert seen[1:].index("end of 1") >= 22, seen
            seen.clear()
            model.zero_grad()


def test_a_gradient_that_grows_after_its_sum_may_have_begun_is_an_error():
    """As where layers share a weight, and each has a backward pass of its own within that of a micro-batch."""
    layer_map = map_layers(GPT, batch_of(torch.zeros(1, 4, dtype=torch.long)))
    params = {"norm.weight": nn.Parameter(torch.ones(4, 2))}
    with fake_default_group(2):
        owners = {Piece("norm.weight"): (0, 1)}
        found = GradientSums(owners, sum_groups(owners), layer_map, params, {name: Piece(name) for name in params})
        found.overlap(params)
        loss = params["norm.weight"].sum()
        found.begin_last([loss])
        loss.backward()
        with pytest.raises(ClusterError, match=r"'norm.weight' grew twice in the last.*use_reentrant=False"):
            params["norm.weight"].sum().backward()


def test_gradients_of_a_unit_are_summed_within_its_last_backward_pass_too():
    """They are moved to this rank's parts first; one that each rank has a share of is exchanged within the unit before."""
    layer_map = map_layers(GPT, batch_of(torch.zeros(1, 4, dtype=torch.long)))
    with fake_default_group(2):
        mesh = DeviceMesh("cpu", [0, 1])
        params = {
            "head.weight": nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])),
            "norm.weight": nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()])),
        }
        placed = []
        params["norm.weight"].register_post_accumulate_grad_hook(lambda param: placed.append(param.grad.placements))
        parts, pieces = {name: held(param) for name, param in params.items()}, {name: Piece(name) for name in params}
        owners = dict.fromkeys(pieces.values(), (0, 1))
        found = GradientSums(owners, sum_groups(owners), layer_map, parts, pieces)
        found.overlap(params)
        for _ in range(2):
            total = {name: torch.zeros_like(part) for name, part in parts.items()}
            for micro_batch in range(2):
                x = torch.randn(3, 4)
                total["head.weight"] += x
                total["norm.weight"] += x.sum(0)
                assert not found._running
                sharded = DTensor.from_local(x, mesh, [Shard(0)])
                loss: Any = sum((param * sharded).sum() for param in params.values())
                loss = loss.full_tensor()
                if micro_batch:
                    found.begin_last([loss])
                loss.backward()
            assert found._running and all(param.grad is None for param in params.values())
            found.reduce()
            for name, part in parts.items():
                torch.testing.assert_close(part.grad, total[name])
                part.grad = None
        assert all(placement.is_partial() for (placement,) in placed) and len(placed) == 4
