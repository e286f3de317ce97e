"""States of a stage's optimizer by the names of its parameters, whichever groups the optimizer has them in."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx.cluster.job.job import _check_rate
from autohete_fx.cluster.model.pieces import Piece
from autohete_fx.cluster.store.states import restore_states, states_of
from autohete_fx.errors import ClusterError

Params = dict[str, nn.Parameter]


def made(names: list[str]) -> Params:
    """Matrices and vectors with the values of their names."""
    shapes = {"weight": (4, 4), "bias": (4,)}
    return {name: nn.Parameter(torch.full(shapes[name.rpartition(".")[2]], float(ord(name[0])))) for name in names}


def decaying_matrices_alone(params: Params) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in params.values() if (p.dim() > 1) is wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices}])


def step(params: Params, optimizer: torch.optim.Optimizer, number: int) -> None:
    for name, param in params.items():
        param.grad = torch.full_like(param, number + ord(name[0]) / 100)
    optimizer.step()


def test_weights_of_another_dtype_are_converted_with_a_warning(caplog: pytest.LogCaptureFixture):
    params = made(["a.weight"])
    saved = {"a.weight": {"a.weight/weight": torch.full((4, 4), 0.1, dtype=torch.float64)}}
    restore_states(params, None, saved, {"a.weight": Piece("a.weight")})
    assert torch.equal(params["a.weight"].detach(), torch.full((4, 4), 0.1))
    assert "the store has weights in torch.float64, and the model has them in torch.float32" in caplog.text


@pytest.mark.parametrize("kind", [autohete_fx.AdamW, torch.optim.AdamW])
def test_a_weight_that_is_no_longer_16_bit_is_its_master(kind: type[torch.optim.Optimizer]):
    """Elements that were trained without the master since, or edited, are those of the weight."""
    name, held = "a.weight", {"a.weight": Piece("a.weight")}
    half = {name: nn.Parameter(torch.full((4, 4), 1.0, dtype=torch.bfloat16))}
    optimizer = autohete_fx.AdamW(half.values(), lr=1e-4)
    step(half, optimizer, 1)
    with torch.no_grad():
        half[name][0] = 3.0
    saved = {name: dict(states_of(half, optimizer, held)[held[name]])}
    params = made([name])
    restored = kind(params.values(), lr=1e-4)
    restore_states(params, restored, saved, held)
    master = saved[name][f"{name}/state/master"]
    assert torch.equal(params[name][1:], master[1:]) and not torch.equal(params[name][1:], half[name][1:].float())
    assert params[name][0].tolist() == [3.0] * 4
    assert set(restored.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    step(params, restored, 2)


def test_states_go_by_name_through_an_optimizer_of_several_groups_into_stages_that_are_cut_otherwise():
    names = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight"]
    params = made(names)
    optimizer = decaying_matrices_alone(params)
    step(params, optimizer, 1)
    saved: dict[str, dict[str, Tensor]] = {
        piece.name: dict(tensors)
        for piece, tensors in states_of(params, optimizer, {name: Piece(name) for name in names}).items()
    }
    step(params, optimizer, 2)
    for stage in (["a.weight", "a.bias", "b.weight"], ["b.bias", "c.weight"]):
        mine = made(stage)
        restored = decaying_matrices_alone(mine)
        restore_states(mine, restored, saved, {name: Piece(name) for name in stage})
        step(mine, restored, 2)
        assert all(torch.equal(mine[name], params[name]) for name in stage)
        assert all(
            torch.equal(restored.state[mine[n]]["exp_avg"], optimizer.state[params[n]]["exp_avg"]) for n in stage
        )


def test_a_learning_rate_that_is_no_number_is_told():
    for rate in (0.1, 1, np.float32(0.1), torch.tensor(0.1)):
        _check_rate(rate, 3)
    for wrong in (None, "fast", math.nan, torch.ones(2)):
        with pytest.raises(ClusterError, match=r"learning_rate gave .* for step 3. Expected was a finite number"):
            _check_rate(wrong, 3)
