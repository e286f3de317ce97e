"""Jobs without a plan, on ranks that are made unlike: layers of a slow rank sleep."""

import dataclasses
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.job import automatic
from autohete_fx.cluster.job.joining import join
from autohete_fx.cluster.measuring import costs as measured_costs
from autohete_fx.cluster.measuring import links as measured_links
from autohete_fx.cluster.measuring.costs import kinds_of
from autohete_fx.cluster.model import unit
from autohete_fx.cluster.model.batches import batch_of
from autohete_fx.cluster.model.layers import map_layers
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.spec import Cluster, steady_link
from autohete_fx.errors import ClusterError
from tests.dist import cluster_jobs
from tests.dist.cluster_jobs import Model, difference, load, loss_of, made_optimizer

GLOBAL_BATCH, DEPTH = 8, 6
LAYER_S = {"slow": 0.009, "fast": 0.003}
"""Of a sample."""


class Sleeping(nn.Module):
    """A layer that takes as long as a type of GPU would."""

    def __init__(self, layer: nn.Module, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = layer, seconds

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        time.sleep(len(x) * self.seconds)
        return self.layer(x, mask)


def sleeping_model(gpu: str) -> nn.Module:
    model = Model(DEPTH, tied=True)
    model.body.layers = nn.ModuleList(Sleeping(layer, LAYER_S[gpu]) for layer in model.body.layers)
    return model


def without_plan(gpus: list[str], folder: str) -> dict[str, Any]:
    """A job's plan and costs, how many layers this rank timed, and a step's loss."""
    gpu = gpus[dist.get_rank()]
    timed, found = [], []
    time_layer, measured, cluster = measured_costs.time_layer, automatic.measured_costs, automatic.measured_cluster

    def counted(layer: Any) -> tuple[float, float]:
        timed.append(1)
        return time_layer(layer)

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(measured(*args, **kwargs))
        return found[-1]

    def steady(*args: Any, **kwargs: Any) -> Cluster:
        """The same cluster by links of a data sheet: those of a busy machine may be too slow to share anything."""
        found = cluster(*args, **kwargs)
        link = steady_link("steady", 1e9, latency_s=1e-4)
        links = {
            kind: tuple(dataclasses.replace(joined, link=link) for joined in getattr(found, kind))
            for kind in ("within", "between")
        }
        return dataclasses.replace(found, **links)

    measured_costs.time_layer, automatic.measured_costs, automatic.measured_cluster = counted, noted, steady
    job = join(
        lambda: sleeping_model(gpu),
        loss_of,
        example=load(range(1)),
        global_batch=GLOBAL_BATCH,
        optimizer=made_optimizer("torch"),
        backend=None,
        member=Member(node=f"node-{dist.get_rank()}", gpu=gpu),
        cache_dir=folder,
    )
    costs = found[0]
    plan = job.deployment.plan
    return {
        "plan": plan.to_json(),
        "work": work(plan),
        "timed": len(timed),
        "costs": repr((costs.times, costs.sizes, costs.updates, costs.kinds)),
        "kinds": list(costs.kinds),
        "least": min(min(row.forward_s, row.backward_s) for row in costs.times),
        "bytes": [[row.params_bytes, row.kept_bytes] for row in costs.sizes],
        "update": [row.s_per_byte for row in costs.updates],
        "states": costs.optimizer_bytes_per_byte,
        "loss": job.train_step(load).loss,
    }


def work(plan: ClusterPlan) -> dict[str, int]:
    """Layers times samples by node."""
    found: dict[str, int] = {}
    for index, _, stage in plan.stages():
        pipeline = plan.pipelines[index]
        samples = pipeline.micro_batch * pipeline.micro_batches
        found[stage.node] = found.get(stage.node, 0) + len(stage.layers) * samples
    return found


def too_large(folder: str) -> str:
    """The error of a job whose GPUs hold next to nothing."""
    try:
        join(
            lambda: Model(2, tied=False),
            loss_of,
            example=load(range(1)),
            global_batch=4,
            optimizer=made_optimizer("torch"),
            backend=None,
            member=Member(node=f"node-{dist.get_rank()}", gpu="cpu"),
            memory_budget=1000,
            cache_dir=folder,
        )
    except ClusterError as error:
        return str(error)
    return ""


def alone(folder: str) -> dict[str, Any]:
    """The plan of one rank."""
    job = join(
        lambda: Model(2, tied=True),
        loss_of,
        example=load(range(1)),
        global_batch=4,
        optimizer=made_optimizer("torch"),
        backend=None,
        cache_dir=folder,
    )
    stages = [(stage.first, stage.last) for _, _, stage in job.deployment.plan.stages()]
    return {"stages": stages, "loss": job.train_step(load).loss}


class Mixed(nn.Module):
    """Layers of two widths of their inner part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)) for width in (16, 32, 16)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def kinds_of_mixed() -> list[str]:
    return list(kinds_of(Mixed, map_layers(Mixed, batch_of(torch.ones(1, 8)))))


def trains_equal(folder: str, backend: str | None) -> dict[str, float]:
    """Differences of a job without a plan from one process."""
    os.environ["AUTOHETE_CACHE_DIR"] = folder
    return difference(3, True, None, backend, "1f1b", "torch")


def shared(folder: str) -> dict[str, Any]:
    """A job whose two ranks are one node, which plans with two GPUs a stage alone: what it measured, and differences from one
    process."""
    os.environ["AUTOHETE_CACHE_DIR"] = folder
    cluster_jobs.nodes_of = lambda plan, ranks: ["node"] * ranks
    unit.SMALLEST_COPY_BYTES = 512  # matrices of the tiny model are sharded, and its vectors are not
    found, measured, plan_cluster = [], automatic.measured_costs, automatic.plan_cluster

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.append(measured(*args, **kwargs))
        return found[-1]

    automatic.measured_costs = noted
    free = difference(3, True, None, None, "1f1b", "torch", 1)
    automatic.plan_cluster = lambda *args, **kwargs: plan_cluster(*args, **kwargs, degrees=(2,))
    apart = difference(3, True, None, None, "1f1b", "torch")
    rows = {f"{row.kind} {row.tp}": row.params_bytes for row in found[0].sizes}
    unsharded = {f"{row.kind} {row.tp}": row.unsharded_bytes for row in found[0].sizes}
    times = [[row.tp, row.forward_s, row.backward_s] for row in found[0].times]
    measured_rows = {"bytes": rows, "unsharded": unsharded, "times": times}
    return {"free": free, "apart": apart, **measured_rows, "again": repr(found[0]) == repr(found[1])}


def clusters(members: list[list[str]], folder: str) -> dict[str, Any]:
    """A cluster as it is measured first, and as it is found again."""
    timed, run_trials = [], measured_links.run_trials

    def counted(*args: Any) -> Any:
        timed.append(1)
        return run_trials(*args)

    measured_links.run_trials = counted
    rows = [Member(node=node, gpu=gpu) for node, gpu in members]
    first, again = (
        measured_links.measured_cluster(rows, torch.device("cpu"), memory_budget=1000, cache_dir=folder)
        for _ in range(2)
    )
    links = [joined.link for joined in (*first.within, *first.between)]
    return {
        "first": repr(first),
        "again": repr(again),
        "nodes": [[node.name, node.gpus] for node in first.nodes],
        "links": sorted({link.name for link in links}),
        "rates": [rate for link in links for rates in link.rates for _, rate in rates.points],
        "memory": [gpu.memory_bytes for gpu in first.gpus],
        "timed": len(timed),
    }
