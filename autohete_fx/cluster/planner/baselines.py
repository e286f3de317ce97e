"""Plans of other planners for mixed clusters, each as good as a search over its own freedom makes it.

Enter a `Cluster`, a `CostTable` and a global batch; leaves a `ClusterPlan` that `simulate` timed, or None where nothing of its
kind fits. All layers of a pipeline keep their activations or all recompute them, and none offloads; only ``one type`` has our
own planner's treatment of memory.

* ``equal grid``, the way of Megatron-LM: one degree of tensor parallelism, pipelines of one depth, layers and micro-batches as
  even as their numbers allow. The search is over degree, depth, width, size of micro-batches, recomputation, and the order of
  the types of GPU. It also tries neighbours in a node as replicas and as stages.
* ``proportional grid``, the way of Whale: the same grids. The work of a stage is in proportion to its unit's speed, and the
  micro-batches of a pipeline to its own.
* ``two stages``, the way of AutoHet, reimplemented from its published description: see `autohete_fx.cluster.planner.two_stages`.
* ``one type``: the best plan of `plan_cluster` on the nodes of one type of GPU, with shards where they are asked for.

Grids and groups are many. Their steps are estimated by the slowest stage, the fill and the sums of gradients; the best estimates
are simulated (`drafts`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.planner.drafts import Drafts
from autohete_fx.cluster.planner.grids import equal_grid, proportional_grid
from autohete_fx.cluster.planner.solve import TIME_LIMIT_S, Solution, compute_bound, idle_of, plan_cluster
from autohete_fx.cluster.planner.two_stages import TWO_STAGES, two_stages
from autohete_fx.cluster.simulation.simulate import simulate
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import ClusterError


def two_stages_solution(cluster: Cluster, costs: CostTable, *, global_batch: int) -> Solution:
    """The plan of `two_stages`, as `plan_cluster` gives its own. Raises ClusterError where nothing fits."""
    began = time.monotonic()
    plan = two_stages(cluster, costs, global_batch)
    if plan is None:
        raise ClusterError(
            f"{costs.model} fits no groups of {sorted({node.gpu for node in cluster.nodes})} in two stages, with one degree of"
            f" tensor parallelism and {global_batch} samples a step. Expected was one group that holds it. Add GPUs, or leave"
            " --solver out"
        )
    drafts = Drafts(cluster, costs, global_batch)
    units = drafts.shaper.unit_types()
    return Solution(
        plan=plan,
        timeline=simulate(plan, cluster, costs),
        model_bound_s=None,
        compute_bound_s=compute_bound(cluster, costs, drafts.shaper, units, global_batch, drafts.sizes),
        num_shapes=0,
        num_simulated=0,
        solve_s=time.monotonic() - began,
        idle=idle_of(plan, cluster, ()),
    )


Baseline = Callable[[Cluster, CostTable, int], ClusterPlan | None]


def best_homogeneous(
    cluster: Cluster,
    costs: CostTable,
    global_batch: int,
    shards: Sequence[int] = (),
    time_limit_s: float = TIME_LIMIT_S,
) -> ClusterPlan | None:
    """The fastest plan of `plan_cluster` on one type of GPU, all others idle; None where no type can hold the model."""
    found = []
    for gpu in cluster.gpus:
        nodes = tuple(node for node in cluster.nodes if node.gpu == gpu.name)
        if not nodes:
            continue
        try:
            alone = replace(cluster, nodes=nodes)
            solution = plan_cluster(alone, costs, global_batch=global_batch, shards=shards, time_limit_s=time_limit_s)
            found.append(solution.plan)
        except ClusterError:
            continue  # this type alone cannot: it has no costs, or too little memory
    best = min(found, key=lambda plan: plan.iteration_s, default=None)
    return best and replace(best, planner="one type")


BASELINES: Mapping[str, Baseline] = {
    "equal grid": equal_grid,
    "proportional grid": proportional_grid,
    TWO_STAGES: two_stages,
    "one type": best_homogeneous,
}
