"""Jobs whose stages have several GPUs: a plan that is wrong, and saves that other plans restore."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autohete_fx
from autohete_fx import cluster
from autohete_fx.errors import AutoHeteError
from autohete_fx.runtime import placement
from tests.dist.cluster_jobs import Causal, differences, joined, leg, load, plan_of

WRONG_PLAN = {
    "inner.model.layers.*.self_attn.q_proj": "colwise",
    "inner.model.layers.*.self_attn.k_proj": "colwise",
    "inner.model.layers.*.self_attn.v_proj": "colwise",
    "inner.model.layers.*.self_attn.o_proj": "rowwise",
}
"""It does not say that norms of heads see a part of the heads."""
SAVED, STEPS = [[2, 2, [4], 2], [1, 2, [1, 4]]], 4
LEGS: Sequence[Any] = (
    ("same", SAVED, "aabc", ""),
    ("other degree", [[1, 6, [1, 4]]], "adbc", "d"),
    ("halves", [[3, 2, [4], 2]], "eebc", "e"),
    ("cloud", SAVED, "ffgh", "fgh"),
)
"""Name, plan, the node of each rank, and the nodes whose disks are new."""


def trained(cases: Sequence[Any], root: str) -> dict[str, Any]:
    """`differences` of plans, `errors`, and stages that our backend compiles in too little memory for all of them."""
    return {"differences": differences(cases), "errors": errors(), "within": within_budget(root)}


def within_budget(root: str) -> list[dict[str, Any]]:
    """A job whose units keep what does not fit on hosts, and one that goes on with its save."""
    placement.SMALLEST_COPY_BYTES = 512
    found = []
    for steps, rows, nodes, budget in (
        (4, [[1, 3, [1, 3], 2]], "aabb", 75_000),
        (7, [[1, 2, [3], 2], [1, 1, [3]]], "aabc", 10**6),
    ):
        torch._dynamo.reset()
        ours = {"memory_budget": budget, "inner_backend": "eager", "profile": "analytic", "solver_time_limit_s": 1}
        row = leg(root, rows, list(nodes), steps, {}, "autohete", ours, depth=2)
        found.append({**row, "given": budget, "peaks": [c.plan.peak_bytes for c in autohete_fx.compilations()]})
        dist.barrier()
    return found


def errors() -> list[str]:
    """Of a plan that leaves out what it must say, and of one that names nothing."""
    plan = plan_of([(2, 2, [3], 2), (2, 2, [3], 2)])
    found = []
    for tp_plan in (WRONG_PLAN, {"layers.*.q_proj": "colwise"}):
        try:
            job = joined(plan, Causal, tp_plan=tp_plan)
            job.train_step(load)
            found.append("")
        except AutoHeteError as error:
            found.append(str(error))
    return found


def legs(root: str) -> list[dict[str, Any]]:
    """A job that is saved, and then goes on with other plans; some disks are lost before each."""
    found = [leg(root, SAVED, list("aabc"), STEPS, {"cloud": f"{root}/cloud"})]
    for index, (_, rows, nodes, lost) in enumerate(LEGS, 1):
        dist.barrier()
        if dist.get_rank() == 0:
            for node in lost:
                shutil.rmtree(f"{root}/{node}", ignore_errors=True)
        dist.barrier()
        found.append(leg(root, rows, list(nodes), STEPS + 2 * index, {"cloud": f"{root}/cloud"}))
    if dist.get_rank() == 0:
        exported = str(Path(root) / "model.safetensors")
        found[-1]["exported"] = cluster.export(cluster.Store(local=f"{root}/f", cloud=f"{root}/cloud"), exported)
        from safetensors.torch import load_file

        found[-1]["shapes"] = sorted(list(tensor.shape) for tensor in load_file(exported).values())
    dist.barrier()
    return found
