"""What a job is given and does not know before: names that drivers have for GPUs, paths, a log, plans that are none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autohete_fx import cluster
from autohete_fx.cluster.deploy import Member, deploy
from autohete_fx.cluster.job.job import JobLog
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.cluster.store.store import Store
from autohete_fx.errors import ClusterError


def plan_of(gpu: str) -> ClusterPlan:
    stage = Stage(node="a100-40g-1", gpu=gpu, tp=1, first=0, last=3)
    return ClusterPlan(model="m", pipelines=(Pipeline(stages=(stage,), micro_batch=1, micro_batches=1),))


def test_a_plan_from_the_table_takes_gpus_by_the_names_of_their_driver():
    members = [Member(node="host-0", gpu="NVIDIA A100-SXM4-80GB"), Member(node="host-1", gpu="NVIDIA A100-SXM4-40GB")]
    deployed = deploy(plan_of("a100-40g"), members)
    assert list(deployed.ranks.values()) == [1] and deployed.idle == (0,)
    assert list(deploy(plan_of("NVIDIA A100-SXM4-80GB"), members).ranks.values()) == [0]
    with pytest.raises(ClusterError, match=r"needs a node with 1 h100-80g .* as `member=` of join tells them"):
        deploy(plan_of("h100-80g"), members)


def test_a_log_without_room_ends_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = JobLog(str(tmp_path / "log.jsonl"), speaks=True)
    log.write("step", step=1)
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 1
    full = JobLog(str(tmp_path), speaks=True)  # a folder
    full.write("step", step=1)
    full.write("step", step=2)
    assert capsys.readouterr().err.count("cannot be written, and ends here: Is a directory") == 1


def test_a_store_takes_a_path(tmp_path: Path):
    assert Store(local=tmp_path).disk == Store(local=str(tmp_path)).disk == str(tmp_path)


def test_a_plan_that_is_the_name_of_a_file_is_told_apart():
    plan: Any = "plan.json"
    with pytest.raises(ClusterError, match=r"plan='plan.json' was given.*ClusterPlan.load"):
        cluster.join(
            lambda: nn.Linear(2, 2),
            lambda out, batch: out.sum(),
            example=torch.zeros(2, 2),
            global_batch=2,
            optimizer=torch.optim.SGD,
            plan=plan,
            device=torch.device("cpu"),
        )
