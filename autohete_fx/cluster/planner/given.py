"""A plan that was made elsewhere, priced on a cluster: its step, and whether it fits.

Enter a `ClusterPlan`, a `Cluster` and a `CostTable`; leaves a `Solution` as the search gives its own.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.deploy import check_micro_batches, nodes_for
from autohete_fx.cluster.memory import memory_of_plan
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.planner.shapes import Shaper
from autohete_fx.cluster.planner.solve import Solution, compute_bound, idle_of
from autohete_fx.cluster.simulation.simulate import simulate
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import ClusterError
from autohete_fx.ir.sizes import format_bytes


def given_solution(plan: ClusterPlan, cluster: Cluster, costs: CostTable, *, sizes: Sequence[int]) -> Solution:
    """A given plan on the nodes of a cluster; ``sizes``: of micro-batches whose compute bounds the step, beside the plan's own.

    Raises:
        ClusterError: the plan is of another model, or has other layers, or needs nodes or degrees that are not there. Also where
            it has fewer micro-batches than stages, or exceeds a GPU's memory.
    """
    began = time.monotonic()
    if _short(plan.model) != _short(costs.model):
        raise ClusterError(
            f"the plan is of the model {plan.model!r}, and {costs.model!r} was given. Expected was a plan of this model. Give the"
            " plan's own, or correct its entry model, if they are one by two names"
        )
    there = {node.name: (node.gpu, node.gpus) for node in cluster.nodes}
    plan = _on(plan, nodes_for(plan, there, remedy="Give these with --cluster, or leave --given out"))
    check_micro_batches(plan)
    timeline = simulate(plan, cluster, costs)
    _check_memory(plan, cluster, costs)
    shaper = Shaper(cluster, costs)
    plan = replace(plan, iteration_s=timeline.iteration_s)
    of_plan = {plan.pipelines[index].micro_batch // stage.shards for index, _, stage in plan.stages()}
    return Solution(
        plan=plan,
        timeline=timeline,
        model_bound_s=None,
        compute_bound_s=compute_bound(
            cluster, costs, shaper, shaper.unit_types(), plan.global_batch, [*sizes, *of_plan]
        ),
        num_shapes=0,
        num_simulated=1,
        solve_s=time.monotonic() - began,
        idle=idle_of(plan, cluster, ()),
    )


def _short(model: str) -> str:
    """A model's name without the folder that it was in."""
    return model.rpartition("/")[2].lower()


def _on(plan: ClusterPlan, nodes: dict[str, str]) -> ClusterPlan:
    """The plan with other nodes."""
    pipelines = tuple(
        replace(pipeline, stages=tuple(replace(stage, node=nodes[stage.node]) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def _check_memory(plan: ClusterPlan, cluster: Cluster, costs: CostTable) -> None:
    memories = memory_of_plan(plan, costs)
    for index, place, stage in plan.stages():
        peak_bytes, has_bytes = memories[index][place].peak_bytes, cluster.gpu(stage.gpu).memory_bytes
        if peak_bytes > has_bytes:
            raise ClusterError(
                f"the plan takes {format_bytes(peak_bytes)} on each {stage.gpu} of stage {place} of pipeline {index},"
                f" which has layers {stage.first}-{stage.last}. Expected was at most {format_bytes(has_bytes)}, as the cluster"
                " says. Recompute or offload more layers there, give some to other stages, or divide them among more GPUs"
            )
