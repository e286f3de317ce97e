"""A job in which a rank neither answers nor vanishes."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from autohete_fx import cluster
from autohete_fx.errors import ClusterError
from tests.dist.cluster_jobs import Model, load, loss_of, made_optimizer, plan_of

TIMEOUT_S, HANGS_S = 5.0, 25.0


class Awake(Exception):
    """The hung rank has slept."""


def errors(root: str) -> str:
    """The error of a rank whose peer, rank 1, hangs in its second step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    meeting = f"file://{root}/again"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    plan = plan_of([(2, 2, [2, 4]), (2, 1, [4])])

    def hangs(samples: range) -> torch.Tensor:
        if rank == 1 and samples.start >= plan.global_batch:
            time.sleep(HANGS_S)
            raise Awake
        return load(samples)

    job = cluster.join(
        lambda: Model(3, False),
        loss_of,
        example=load(range(1)),
        global_batch=plan.global_batch,
        plan=plan,
        optimizer=made_optimizer("torch"),
        backend=None,
        member=cluster.Member(node=f"node-{rank}", gpu="cpu"),
        timeout_s=TIMEOUT_S,
    )
    try:
        for _ in range(2):
            job.train_step(hangs)
    except (ClusterError, Awake) as error:
        return str(error)
    return ""
