"""Units of several GPUs: which pieces of parameters each has, and plans with shards that cannot be run."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split

import autohete_fx
from autohete_fx.cluster.deploy import check_runs
from autohete_fx.cluster.job.automatic import may_shard
from autohete_fx.cluster.model.batches import Shape, batch_of
from autohete_fx.cluster.model.layers import map_layers
from autohete_fx.cluster.model.pieces import Cut, Piece
from autohete_fx.cluster.model.tensor_parallel import TensorLayout
from autohete_fx.cluster.model.unit import UnitPlace
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.errors import ClusterError
from tests.dist.cluster_jobs import plan_of
from tests.tiny_models import GPT


def test_shards_of_a_part_are_boxes_and_small_parameters_stay_whole():
    def piece(name: str, *sizes: int) -> Piece:
        place = UnitPlace(degree=2, part=1, shards=3, shard=2)
        return place.piece(TensorLayout(dims={"rows": 0, "columns": 1}), name, Shape(sizes=sizes, dtype=torch.float64))

    rows, columns = (Cut(dim=dim, first=first, stop=400, length=400) for dim, first in ((0, 334), (1, 200)))
    assert piece("rows", 400, 400) == Piece("rows", (rows,)), "67, 67 and 66 of 200 rows"
    assert piece("columns", 400, 400) == Piece("columns", (Cut(dim=0, first=268, stop=400, length=400), columns))
    assert piece("whole", 400, 400) == Piece("whole", (Cut(dim=0, first=268, stop=400, length=400),))
    assert piece("whole", 4, 4000).cuts == (), "the last of three GPUs would have no rows"
    assert piece("whole", 400).cuts == ()
    assert piece("rows", 401, 400) == Piece("rows", (Cut(dim=0, first=201, stop=401, length=401),)), (
        "uneven for two parts"
    )


class Transposed(GPT):
    """Its hidden states have positions before samples."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x.transpose(0, 1)))


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pipe_split()
        return self.second(x)


class Recurrent(nn.Module):
    """Its layers keep their parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(64, 64, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x


IDS = torch.zeros(2, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("build", "given", "rows", "is_compiled", "words"),
    [
        (GPT, IDS, [(2, 1, [4], 1, 2)], False, "a stage of 2 shards, and the job has no backend"),
        (Transposed, IDS, [(4, 2, [2, 4], 1, [2, 1])], True, "unequal shards.*shape .6, 2, 16. for 2 samples"),
        (Marked, torch.zeros(2, 4), [(2, 1, [2], 1, 2)], True, "divided at marks. Expected was one shard"),
    ],
)
def test_shards_that_cannot_be_run_are_errors(
    build: type[nn.Module], given: Tensor, rows: Sequence[Any], is_compiled: bool, words: str
):
    layer_map = map_layers(build, batch_of(given))
    with pytest.raises(ClusterError, match=words):
        check_runs(plan_of(rows), layer_map, build.__name__, samples=2, is_compiled=is_compiled)


class Own(torch.optim.SGD):
    """May do anything in its step."""


@pytest.mark.parametrize(
    ("build", "given", "optimizer", "may"),
    [
        (GPT, IDS, torch.optim.AdamW, True),
        (GPT, IDS, autohete_fx.AdamW, True),
        (GPT, IDS, torch.optim.Adafactor, False),
        (GPT, IDS, Own, False),
        (Transposed, IDS, torch.optim.AdamW, False),
        (Marked, torch.zeros(2, 4), torch.optim.AdamW, False),
        (Recurrent, torch.zeros(2, 3, 64), torch.optim.AdamW, False),
    ],
)
def test_jobs_that_plan_for_themselves_hold_shards_where_they_can_be_run(
    build: type[nn.Module], given: Tensor, optimizer: type[torch.optim.Optimizer], may: bool
):
    assert may_shard(build, batch_of(given), lambda params: optimizer(params, lr=0.1)) == may  # pyright: ignore[reportCallIssue]


def test_unequal_shards_of_samples_that_come_first_are_run():
    check_runs(plan_of([(4, 2, [2, 4], 1, [2, 1])]), map_layers(GPT, batch_of(IDS)), "GPT", samples=2, is_compiled=True)


def test_plans_from_before_there_were_shards_are_read():
    plan = plan_of([(2, 3, [2, 4], 2)])
    old = json.loads(plan.to_json())
    for pipeline in old["pipelines"]:
        for stage in pipeline["stages"]:
            del stage["shards"]
    assert ClusterPlan.from_json(json.dumps({**old, "schema_version": 1})) == plan
    with pytest.raises(ClusterError, match="damaged: it lacks 'shards'"):
        ClusterPlan.from_json(json.dumps(old))
    with pytest.raises(ClusterError, match="schema version 3"):
        ClusterPlan.from_json(json.dumps({**old, "schema_version": 3}))
