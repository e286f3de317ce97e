"""Jobs whose units hold shards: plans, what is refused, budgets, and saves that plans of other units go on with."""

import dataclasses
import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import autohete_fx
from autohete_fx import cluster
from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.job import automatic
from autohete_fx.cluster.memory import memory_of
from autohete_fx.cluster.model import unit
from autohete_fx.cluster.planner.solve import Solution
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import AutoHeteError
from autohete_fx.runtime import placement
from tests.dist import cluster_jobs
from tests.dist.cluster_jobs import joined, leg, load, plan_of

SMALLEST_BYTES = 512
"""Matrices of the tiny model are sharded, and its vectors are not."""
SAVED, STEPS = [[2, 2, [4], 1, 2], [1, 2, [1, 4]]], 4
LEGS: Sequence[Any] = (
    ("same", SAVED, "aabc"),
    ("none", [[1, 6, [1, 4]]], "adbc"),
    ("parts", [[3, 2, [4], 2]], "aabc"),
    ("three", [[3, 2, [2, 4], 1, [3, 1]]], "aaab"),
)
"""Name, plan, and the node of each rank."""


def trained(cases: Sequence[Any], root: str, num_jobs: int) -> dict[str, Any]:
    """`cluster_jobs.differences` of plans, `refusal`, and stages that our backend keeps within a budget."""
    unit.SMALLEST_COPY_BYTES = SMALLEST_BYTES
    return {
        "differences": cluster_jobs.differences(cases),
        "refusal": refusal(),
        "within": within_budget(root, num_jobs),
    }


def refusal() -> str:
    """What a job without a backend is refused with."""
    plan = plan_of([(2, 1, [4], 1, 2)])
    try:
        joined(plan)
    except AutoHeteError as error:
        return str(error)
    return ""


def within_budget(root: str, num_jobs: int) -> list[dict[str, Any]]:
    """The first of four jobs. The shards of one do not all fit, and others go on with its save: of another plan; of shards of
    parts, after jobs in which two ranks had parts alone; and of those again after the process groups of all are gone."""
    placement.SMALLEST_COPY_BYTES = SMALLEST_BYTES
    found = []
    jobs: Sequence[Any] = (
        (4, [[2, 3, [1, 3], 1, 2]], "aabb", 105_000),
        (6, [[2, 2, [3], 1, 2], [1, 2, [1, 3]]], "aabc", 158_000),
        (8, [[2, 3, [3], 2, 2]], "aaaa", 105_000),
        (10, [[2, 3, [3], 2, 2]], "aaaa", 10**6),
    )
    for steps, rows, nodes, budget in jobs[:num_jobs]:
        torch._dynamo.reset()
        ours = {"memory_budget": budget, "inner_backend": "eager", "profile": "analytic", "solver_time_limit_s": 1}
        row = leg(root, rows, list(nodes), steps, {}, "autohete", ours, depth=2)
        found.append({**row, "given": budget, "peaks": [c.plan.peak_bytes for c in autohete_fx.compilations()]})
        dist.barrier()
        if steps == 8:
            for group in set(distributed_c10d._world.pg_names) - {dist.group.WORLD}:
                dist.destroy_process_group(group)
    return found


KINDS = {"first": 0.2, "layer": 1.0, "last": 0.2}
"""How much of a layer's work and weights each kind has."""
FAT = CostTable(
    model="fat",
    kinds=("first", "layer", "layer", "layer", "last"),
    times=tuple(
        LayerTime(kind=kind, gpu="cpu", tp=1, micro_batch=1, forward_s=share, backward_s=2 * share)
        for kind, share in KINDS.items()
    ),
    sizes=tuple(
        LayerBytes(kind=kind, tp=1, params_bytes=int(1000 * share), kept_bytes=100, output_bytes=10)
        for kind, share in KINDS.items()
    ),
    updates=(UpdateTime(gpu="cpu", fixed_s=0.1, s_per_byte=0.0),),
    optimizer_bytes_per_byte=40.0,
)
"""Of a GPU's memory, the states of layers take much more than what shards gather of two."""


def searched(folder: str) -> dict[str, Any]:
    """A job without a plan, whose two GPUs hold the model in shards alone: an error without them, the plan, and differences
    from one process."""
    torch.set_default_dtype(torch.float64)
    unit.SMALLEST_COPY_BYTES = SMALLEST_BYTES
    found: dict[str, Any] = {"error": "", "plan": "", "loss": 0.0, "weights": 0.0, "states": 0.0}
    plan_cluster = automatic.plan_cluster

    def tight(given: Cluster, costs: CostTable, **how: Any) -> Solution:
        """A GPU holds more than a half of the model's states, and less than two of its three layers."""
        whole = memory_of(costs.stage(range(len(costs.kinds)), "cpu", 1, 1), costs, 0).states_bytes
        gpus = tuple(dataclasses.replace(gpu, memory_bytes=int(0.6 * whole)) for gpu in given.gpus)
        given = dataclasses.replace(given, gpus=gpus)
        try:
            plan_cluster(given, costs, **{**how, "shards": ()})
        except AutoHeteError as error:
            found["error"] = str(error)
        made = plan_cluster(given, costs, **how)
        found["plan"] = made.plan.to_json()
        return made

    automatic.plan_cluster, automatic.measured_costs = tight, lambda *args, **kwargs: FAT
    seen, start, params, states = cluster_jobs.trained_alone(3, True, 8, "torch", 3)
    job = cluster.join(
        lambda: cluster_jobs.Model(3, True),
        cluster_jobs.loss_of,
        example=load(range(1)),
        global_batch=8,
        optimizer=cluster_jobs.made_optimizer("torch"),
        learning_rate=cluster_jobs.rate,
        max_grad_norm=cluster_jobs.CLIP,
        weights=lambda name: start[name],
        backend="autohete",
        options={"inner_backend": "eager", "profile": "analytic", "solver_time_limit_s": 1},
        member=cluster.Member(node="node", gpu="cpu"),
        cache_dir=folder,
    )
    for loss, _ in seen:
        found["loss"] = max(found["loss"], abs(job.train_step(load).loss - loss))
    cluster_jobs.compare_states(job, params, states, found)
    return found


def left(root: str) -> dict[str, Any]:
    """Ranks 0 and 1, which alone have their layers, in shards, are told to leave. Rank 2 goes on alone with what they hand over."""
    torch.set_default_dtype(torch.float64)
    unit.SMALLEST_COPY_BYTES = SMALLEST_BYTES
    rank, plan, nodes = dist.get_rank(), plan_of([(2, 3, [2, 4], 1, [2, 1])]), ["node-0", "node-0", "node-2"]
    _, start, _, _ = cluster_jobs.trained_alone(3, True, plan.global_batch, "torch", 0)
    job = joined(
        plan,
        store=cluster.Store(local=f"{root}/{nodes[rank]}", every=100, cloud_every=100),
        learning_rate=cluster_jobs.rate,
        max_grad_norm=cluster_jobs.CLIP,
        weights=lambda name: start[name],
        backend="eager",
        member=cluster.Member(node=nodes[rank], gpu="cpu"),
    )
    job.train_step(load)
    if rank < 2:
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        job.train_step(load)
    except (SystemExit, AutoHeteError) as error:
        if isinstance(error, SystemExit):
            return {"left": error.code}
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{root}/smaller", rank=0, world_size=1)
    return leg(root, [[1, 6, [4]]], ["node-2"], 4, {})


def legs(root: str) -> list[dict[str, Any]]:
    """A job that is saved, and then goes on with plans of other units."""
    unit.SMALLEST_COPY_BYTES = SMALLEST_BYTES
    found = [leg(root, SAVED, list("aabc"), STEPS, {"cloud": f"{root}/cloud"})]
    for index, (_, rows, nodes) in enumerate(LEGS, 1):
        dist.barrier()
        torch._dynamo.reset()
        found.append(leg(root, rows, list(nodes), STEPS + 2 * index, {"cloud": f"{root}/cloud"}))
    if dist.get_rank() == 0:
        exported = f"{root}/model.safetensors"
        found[-1]["exported"] = cluster.export(cluster.Store(local=f"{root}/a", cloud=f"{root}/cloud"), exported)
        from safetensors.torch import load_file

        found[-1]["shapes"] = sorted(list(tensor.shape) for tensor in load_file(exported).values())
    dist.barrier()
    return found
