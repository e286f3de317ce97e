"""A job in which a rank neither answers nor vanishes."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autohete_fx import cluster
from autohete_fx.cluster.model import unit
from autohete_fx.errors import ClusterError
from tests.dist.cluster_jobs import Model, backend_of, joined, load, plan_of

TIMEOUT_S, HANGS_S, NEVER_S = 5.0, 25.0, 3600.0


class Awake(Exception):
    """The hung rank has slept, until the others had their errors."""


def _joined(plan: cluster.ClusterPlan, timeout_s: float) -> cluster.Job:
    return joined(plan, lambda: Model(3, False), timeout_s=timeout_s)


def vanished(num_shards: int) -> str:
    """The error of a rank where rank 3, the last of its pipeline, is gone in the second step. Others wait for ranks that wait
    for it, with a timeout that no test waits for."""
    unit.SMALLEST_COPY_BYTES = 512
    of_shards, pipelines = [(2, 2, [2, 4], 1, 2)], [(1, 2, [2, 4]), (1, 2, [2, 4])]
    plan, rank = plan_of(of_shards if num_shards > 1 else pipelines), dist.get_rank()

    def vanishes(samples: range) -> torch.Tensor:
        if rank == 3 and samples.start >= plan.global_batch:
            os._exit(9)
        return load(samples)

    job = joined(plan, lambda: Model(3, False), timeout_s=NEVER_S, backend=backend_of(plan))
    job.train_step(vanishes)
    try:
        job.train_step(vanishes)
    except ClusterError as error:
        print(json.dumps(str(error)), flush=True)
        os._exit(0)  # as an error ends a rank: its peers see their connections closed
    return ""


def unable() -> list[str]:
    """The errors of a rank where rank 1 cannot read the weights of its stage, of which it has a shard, and where it has the stage
    and cannot make its optimizer. No test waits for the timeout."""
    unit.SMALLEST_COPY_BYTES = 512
    plan, rank = plan_of([(2, 2, [4], 1, 2), (2, 1, [4])]), dist.get_rank()
    model = Model(3, False).state_dict()

    def weights(name: str) -> torch.Tensor:
        if rank == 1:
            raise FileNotFoundError("part-2.safetensors")
        return model[name]

    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=-1.0 if rank == 1 else 1.0)

    found = []
    for how in ({"weights": weights}, {"optimizer": optimizer}):
        try:
            joined(plan, lambda: Model(3, False), timeout_s=NEVER_S, backend="autohete", **how)
        except (ClusterError, FileNotFoundError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def errors(root: str, hung: int = 1) -> str:
    """The error of a rank whose peer hangs in its second step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    meeting = f"file://{root}/again"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    plan, told = plan_of([(2, 2, [2, 4]), (2, 1, [4])]), [Path(root, f"told-{each}") for each in range(ranks)]

    def hangs(samples: range) -> torch.Tensor:
        if rank == hung and samples.start >= plan.global_batch:
            ends_at = time.monotonic() + HANGS_S
            while time.monotonic() < ends_at and not all(file.exists() for file in told if file is not told[hung]):
                time.sleep(0.05)
            raise Awake
        return load(samples)

    job = _joined(plan, TIMEOUT_S)
    try:
        for _ in range(2):
            job.train_step(hangs)
    except (ClusterError, Awake) as error:
        told[rank].touch()
        return str(error)
    return ""
