"""States that a plan moves before it can train: bytes by source, seconds, and the plan that is nearest with them.

Enter candidates with their simulated steps, and what the nodes' disks have. Leaves the plan that does the most within the time
until the next change. Seconds of a plan over a lifetime L are

    (L / T_fastest) * T  +  seconds until the slowest node has its states

for a step of T seconds: the first are those of the steps that the fastest plan would do in L. A node reads a layer from the source
that `sources` takes, as `restore` does. Nodes of a kind may change their places in a plan: each takes one whose layers it has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.spec import Cluster
from autohete_fx.cluster.store.sources import ASSUMED, Bandwidths, Moved, Wanted, move_s, moved_by, quickest
from autohete_fx.ir.sizes import format_bytes, format_seconds

_UNIT_BYTES = 1024
"""The unit of costs in the assignment of nodes, which are integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving:
    """The reasons why it is dear to begin a plan.

    Attributes:
        lifetime_s: expected seconds until the nodes change again.
        held: by node, layers whose states are on its disk.
        bandwidths: of nodes.
    """

    lifetime_s: float
    held: Mapping[str, frozenset[int]]
    bandwidths: Bandwidths = ASSUMED


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """A plan, and why.

    Attributes:
        plan: that does the most within the lifetime.
        move_s: until its states are where they belong.
        fastest_s: step of the fastest candidate.
        fastest_move_s: until that one could train.
        line: of a log, where a slower plan wins that moves less; "" where the fastest does.
    """

    plan: ClusterPlan
    move_s: float
    fastest_s: float
    fastest_move_s: float
    line: str = ""


def layer_bytes(costs: CostTable, layer: int) -> float:
    """Bytes of a layer's saved states: weights and what the optimizer keeps."""
    return costs.whole_bytes(layer) * (1 + costs.optimizer_bytes_per_byte)


def moved(
    plan: ClusterPlan, costs: CostTable, held: Mapping[str, frozenset[int]], bandwidths: Bandwidths
) -> dict[str, Moved]:
    """By node, the bytes that move before the plan can train, from the sources that `restore` takes."""
    rows = _layers_of(plan)
    nodes = [*rows, *(node for node in held if node not in rows)]
    every = sorted(frozenset[int]().union(*rows.values()))
    wanted = Wanted(
        needs=[[str(layer) for layer in sorted(rows.get(node, ()))] for node in nodes],
        nodes=nodes,
        disks={node: {str(layer) for layer in held.get(node, ())} for node in nodes},
        cloud={str(layer): str(layer) for layer in every},
        sizes={str(layer): layer_bytes(costs, layer) for layer in every},
    )
    return moved_by(quickest(wanted, bandwidths), wanted)


def all_from_cloud(plan: ClusterPlan, costs: CostTable) -> dict[str, Moved]:
    """By node, the bytes where every node reads all of its states from the cloud, as Varuna does."""
    return {
        node: Moved(cloud=sum(layer_bytes(costs, layer) for layer in layers))
        for node, layers in _layers_of(plan).items()
    }


def settled(plan: ClusterPlan, cluster: Cluster, costs: CostTable, held: Mapping[str, frozenset[int]]) -> ClusterPlan:
    """The plan with nodes of each kind in the places where they have the most bytes of."""
    layers, kinds = _layers_of(plan), {node.name: (node.gpu, node.zone, node.gpus) for node in cluster.nodes}
    places: dict[str, str] = {}
    for kind in dict.fromkeys(kinds.values()):
        nodes = sorted(name for name in kinds if kinds[name] == kind)
        solver = SimpleLinearSumAssignment()
        for row, place in enumerate(nodes):
            for column, node in enumerate(nodes):
                missing = layers.get(place, frozenset()) - held.get(node, frozenset())
                lacking = sum(layer_bytes(costs, layer) for layer in missing)
                solver.add_arc_with_cost(row, column, 2 * round(lacking / _UNIT_BYTES) + (row != column))
        status = solver.solve()
        assert status == solver.OPTIMAL, "every node can take every place of its kind"
        places.update({place: nodes[solver.right_mate(row)] for row, place in enumerate(nodes)})
    pipelines = tuple(
        replace(
            pipeline, stages=tuple(replace(stage, node=places.get(stage.node, stage.node)) for stage in pipeline.stages)
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def nearest(candidates: Sequence[ClusterPlan], cluster: Cluster, costs: CostTable, moving: Moving) -> Nearest:
    """The candidate that does the most until the nodes change again; each has its simulated ``iteration_s``."""
    plans = [settled(plan, cluster, costs, moving.held) for plan in candidates]
    rows = [(plan, moved(plan, costs, moving.held, moving.bandwidths)) for plan in plans]
    timed = [(plan, num_bytes, move_s(num_bytes, moving.bandwidths)) for plan, num_bytes in rows]
    fastest, of_fastest, fastest_move_s = min(timed, key=lambda row: (row[0].iteration_s, row[2]))
    steps = moving.lifetime_s / fastest.iteration_s
    plan, of_plan, plan_move_s = min(timed, key=lambda row: (steps * row[0].iteration_s + row[2], row[0].iteration_s))
    line = ""
    if plan.iteration_s > fastest.iteration_s:
        line = (
            f"a plan of {format_seconds(plan.iteration_s)} a step is taken before the fastest of"
            f" {format_seconds(fastest.iteration_s)}: it moves {_far(of_plan.values())} in {format_seconds(plan_move_s)}, not"
            f" {_far(of_fastest.values())} in {format_seconds(fastest_move_s)}, and nodes are expected to change in"
            f" {format_seconds(moving.lifetime_s)}"
        )
    return Nearest(
        plan=plan, move_s=plan_move_s, fastest_s=fastest.iteration_s, fastest_move_s=fastest_move_s, line=line
    )


def _far(rows: Iterable[Moved]) -> str:
    return format_bytes(round(sum(row.peer + row.cloud for row in rows)))


def _layers_of(plan: ClusterPlan) -> dict[str, frozenset[int]]:
    found: dict[str, frozenset[int]] = {}
    for _, _, stage in plan.stages():
        found[stage.node] = found.get(stage.node, frozenset()) | frozenset(stage.layers)
    return found
