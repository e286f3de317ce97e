"""Two ranks and three train as one process does, with every optimizer, under Inductor, and clipped."""

from pathlib import Path
from typing import Any

import pytest
import torch

import autohete_fx
from autohete_fx.runtime.shard import shard
from tests.dist import ranks
from tests.dist.sharded import Small, alone, differences, make, mesh, together
from tests.dist.test_shard import ours, ours_clipped, sgd


def adam(params: Any) -> torch.optim.Optimizer:
    return autohete_fx.Adam(params, lr=1e-2, weight_decay=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return autohete_fx.SGD(params, lr=0.1, momentum=0.9, dampening=0.1)


def stateless(params: Any) -> torch.optim.Optimizer:
    return autohete_fx.SGD(params, lr=0.1)


def more_exactness() -> dict[str, float]:
    """How far each way to train is from one process, at most; test_shard.py has AdamW of ours, and ties with micro-batches."""
    found = {}
    for optimizer_of in (adam, momentum, stateless):
        how = {"tied": False, "layers": 1, "steps": 2}
        found[optimizer_of.__name__] = differences(together(optimizer_of, **how), alone(optimizer_of, **how))
    found["sgd"] = differences(together(sgd, tied=False), alone(sgd, tied=False))
    found["clipped"] = differences(together(ours_clipped, layers=1), alone(ours, clip=0.3, layers=1))
    inductor = {"backend": "inductor"}
    found["inductor"] = differences(
        together(sgd, kind=Small, compiled=inductor), alone(sgd, kind=Small, backend="inductor")
    )
    return {name: max(found[name].values(), default=0.0) for name in found}


@pytest.mark.thorough
def test_each_way_to_train_is_bitwise_and_clipping_within_rounding(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_exact.more_exactness", tmp_path):
        bitwise = {"sgd", "adam", "momentum", "stateless", "inductor"}
        assert {n for n, d in found.items() if not d} == bitwise
        assert max(found.values()) < 1e-13, found


def small_exactness() -> dict[str, Any]:
    model = shard(make(), mesh())
    rows = {name: tuple(p.shape) for name, p in model.named_parameters()}
    away = differences(together(sgd, layers=1), alone(sgd, layers=1))
    away |= differences(together(ours_clipped, layers=1), alone(ours, clip=0.3, layers=1))
    return {"rows": rows, "away": max(away.values(), default=0.0), "type": type(model.embedding).__qualname__}


@pytest.mark.slow
def test_three_ranks_with_padded_and_empty_shards_are_within_rounding(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_exact.small_exactness", tmp_path, num_ranks=3):
        assert 0.0 < found["away"] < 1e-13
        assert found["rows"]["row"] == [1, 9216]  # all of it on the first rank, padding on the others
        assert found["rows"]["embedding.weight"] == [44, 96] and found["rows"]["layers.0.up.bias"] == [301]
        assert found["type"] == "Embedding"
