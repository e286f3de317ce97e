"""Units of shapes on the nodes of a cluster."""

from collections.abc import Sequence

from autohete_fx.cluster.plan import ClusterPlan, Pipeline, PipelineSchedule, Stage
from autohete_fx.cluster.planner.shapes import Shape, UnitType
from autohete_fx.cluster.spec import Cluster


def placed(
    cluster: Cluster,
    shapes: Sequence[tuple[Shape, int]],
    *,
    model: str,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
    planner: str = "autohete",
) -> ClusterPlan | None:
    """A plan of pipelines: each a shape and its number of micro-batches. None where units do not fit the nodes.

    Units of pipelines that are packed fill nodes pipeline by pipeline, after them those of spread ones stage by stage. Units of
    more GPUs go first, because the others fit the gaps.
    """
    free = {node.name: node.gpus for node in cluster.nodes}
    kinds: dict[tuple[str, str], list[str]] = {}
    for node in cluster.nodes:
        kinds.setdefault((node.gpu, node.zone), []).append(node.name)
    wanted = []
    for index, (shape, _) in enumerate(shapes):
        for place, stage in enumerate(shape.stages):
            rank = (place, index) if shape.spread else (index, place)
            wanted.append(((-stage.unit.num_gpus, shape.spread, *rank), index, place, stage.unit))
    where: dict[tuple[int, int], str] = {}
    for _, index, place, unit in sorted(wanted, key=lambda row: row[0]):
        name = _node_for(unit, kinds, free)
        if name is None:
            return None
        free[name] -= unit.num_gpus
        where[index, place] = name
    pipelines = tuple(
        Pipeline(
            stages=tuple(
                Stage(
                    node=where[index, place],
                    gpu=stage.unit.gpu,
                    tp=stage.unit.tp,
                    first=stage.first,
                    last=stage.last,
                    recomputed=stage.recomputed,
                    offloaded=stage.offloaded,
                    shards=stage.unit.shards,
                )
                for place, stage in enumerate(shape.stages)
            ),
            micro_batch=shape.micro_batch,
            micro_batches=count,
        )
        for index, (shape, count) in enumerate(shapes)
    )
    return ClusterPlan(model=model, pipelines=pipelines, schedule=schedule, planner=planner)


def _node_for(unit: UnitType, kinds: dict[tuple[str, str], list[str]], free: dict[str, int]) -> str | None:
    """The fullest node of the unit's kind that still holds it, the earliest of several."""
    rooms = [name for name in kinds.get((unit.gpu, unit.zone), ()) if free[name] >= unit.num_gpus]
    return min(rooms, key=lambda name: free[name], default=None)
