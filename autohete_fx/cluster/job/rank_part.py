"""A rank's part of a job's plan: its seat, the model's layers as it sees them, and the process groups that it is in.

Enter a plan and the ranks that have met; leaves a `RankPart`, which makes this rank's stage and what runs it.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autohete_fx.cluster.deploy import Deployment, Seat, check_runs, deploy
from autohete_fx.cluster.job.job import Recipe
from autohete_fx.cluster.job.rendezvous import Rendezvous
from autohete_fx.cluster.job.sums import SumGroups, sum_groups
from autohete_fx.cluster.model.batches import Batch
from autohete_fx.cluster.model.layers import LayerMap, map_layers
from autohete_fx.cluster.model.pieces import Piece
from autohete_fx.cluster.model.tensor_parallel import TensorLayout, TpPlan, layout_of
from autohete_fx.cluster.model.unit import Unit
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.stages.compiler import StageCompiler
from autohete_fx.cluster.stages.module import StageModule
from autohete_fx.cluster.stages.run import Groups, StageRun, pipeline_groups
from autohete_fx.cluster.stages.stage import Weights, build_stage
from autohete_fx.errors import ClusterError
from autohete_fx.internals.groups import mesh_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """A rank's part of a plan.

    Attributes:
        deployment: the plan and who takes which stage.
        seat: of this rank; None where it is idle.
        layer_map: of the model, with this rank's samples of a micro-batch.
        layout: how GPUs of a stage share the model's layers.
        unit: of GPUs that share this rank's layers; None where it has them alone.
        pipelines: process groups of pipelines.
        sums: process groups over which gradients are summed.
        watch: the process group of all ranks by which those that do not answer are found.
    """

    deployment: Deployment
    seat: Seat | None
    layer_map: LayerMap
    layout: TensorLayout
    unit: Unit | None
    pipelines: Groups
    sums: SumGroups
    watch: dist.ProcessGroup

    def pieces(self) -> list[Piece]:
        """The pieces of parameters that the rank has."""
        if self.seat is None:
            return []
        return list(self.deployment.held(self.seat, self.layer_map, self.layout).values())

    def stage(self, recipe: Recipe, weights: Weights, device: torch.device) -> StageModule | None:
        """The rank's stage, with its weights; None where it is idle."""
        if self.seat is None:
            return None
        planned = self.deployment.stage(self.seat)
        return build_stage(
            recipe.build_model,
            self.layer_map,
            planned.layers,
            loss=recipe.loss,
            share=self.deployment.plan.pipelines[self.seat.pipeline].micro_batch / recipe.global_batch,
            device=device,
            weights=weights,
            seed=recipe.seed,
            recomputed=planned.recomputed,
            unit=self.unit,
        )

    def stage_run(self, stage: StageModule, compiler: StageCompiler, example: Batch, device: torch.device) -> StageRun:
        """The schedule of that stage's passes."""
        assert self.seat is not None
        return StageRun(
            stage,
            compiler.compiled_in(self.deployment, self.seat, stage),
            seat=self.seat,
            deployment=self.deployment,
            layer_map=self.layer_map,
            groups=self.pipelines,
            example=example,
            device=device,
        )


def take_part(
    plan: ClusterPlan, recipe: Recipe, example: Batch, ranks: Rendezvous, *, tp_plan: TpPlan | None, is_compiled: bool
) -> RankPart:
    """This rank's part of a plan. All ranks call it, because they make process groups together.

    Args:
        plan: of the job.
        recipe: of the job.
        example: a batch.
        ranks: all of them.
        tp_plan: how the GPUs of a stage share its layers; None: that of the model's transformers configuration.
        is_compiled: the job has a backend.

    Raises:
        ClusterError: the plan does not fit the model, the batch or the ranks.
    """
    if plan.global_batch != recipe.global_batch:
        raise ClusterError(
            f"the plan has a global batch of {plan.global_batch} samples, and {recipe.global_batch} were given. Expected were equal"
            " ones. Make the plan again, or give its number"
        )
    deployment = deploy(plan, ranks.members)
    seat = deployment.seat(ranks.rank)
    samples = len(deployment.rows(seat)) if seat else plan.pipelines[0].micro_batch
    degrees = {stage.tp for _, _, stage in plan.stages()}

    def looked() -> tuple[LayerMap, TensorLayout]:
        """At the model, which every rank builds for itself."""
        layer_map = map_layers(recipe.build_model, example.of_samples(samples))
        name = getattr(recipe.build_model, "__name__", "the model")
        check_runs(plan, layer_map, name, samples=samples, is_compiled=is_compiled)
        return layer_map, layout_of(recipe.build_model, layer_map, degrees, tp_plan)

    layer_map, layout = ranks.on_each(looked)
    watch: Any = dist.new_group(backend="gloo", timeout=ranks.timeout)
    unit = _unit_of(deployment, seat, layout, ranks.device, ranks.timeout)
    pipelines = pipeline_groups(deployment, ranks.timeout)
    sums = sum_groups(deployment.owners(layer_map, layout), ranks.timeout)
    return RankPart(
        deployment=deployment,
        seat=seat,
        layer_map=layer_map,
        layout=layout,
        unit=unit.with_ranks() if unit else None,
        pipelines=pipelines,
        sums=sums,
        watch=watch,
    )


def _unit_of(
    deployment: Deployment,
    seat: Seat | None,
    layout: TensorLayout,
    device: torch.device,
    timeout: timedelta,
) -> Unit | None:
    """The unit of this rank; None where it has its layers alone. All ranks call it, because they make process groups together."""
    meshes: dict[str, DeviceMesh] = {}
    for seats in deployment.peers():
        group: Any = dist.new_group([deployment.ranks[peer] for peer in seats], timeout=timeout)
        if seat in seats:
            along = "sharded" if seats[0].shard != seats[1].shard else "tensor_parallel"
            meshes[along] = mesh_of({along: group}, device.type)
    if not (seat and meshes):
        return None
    parallel, sharded = meshes.get("tensor_parallel"), meshes.get("sharded")
    return Unit(layout=layout, place=deployment.place(seat), tensor_parallel=parallel, sharded=sharded)
