"""A rank's stage in its pipeline: the passes of a step, in the order of `torch.distributed.pipelining`'s schedules.

Each micro-batch's mean loss counts by its share of the global batch's samples. The sums over all pipelines are thus the loss
and the gradients of one process with the whole batch, but for rounding.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from autohete_fx.cluster.batches import Batch, batch_of
from autohete_fx.cluster.deploy import Deployment, Seat
from autohete_fx.cluster.layers import LayerMap
from autohete_fx.cluster.plan import PipelineSchedule
from autohete_fx.cluster.stage_module import StageModule
from autohete_fx.errors import ClusterError
from autohete_fx.internals.pipelines import FannedStage

Load = Callable[[range], Any]
"""A function of indices of samples: the batch of these samples, in that order."""
Groups = dict[tuple[int, int], tuple[tuple[int, ...], dist.ProcessGroup]]
"""By pipeline and part of its units: the ranks in order of stages, and their group.

By pipeline and -1: all of its ranks, where stages differ in their number of GPUs.
"""
_EVERYONE = -1


def pipeline_groups(deployment: Deployment, timeout: timedelta | None = None) -> Groups:
    """The groups of all pipelines. All ranks call it.

    Args:
        deployment: of all ranks.
        timeout: after which a rank that does not answer is an error; None: PyTorch's.
    """
    found: Groups = {}
    for index, pipeline in enumerate(deployment.plan.pipelines):
        degrees = {stage.tp for stage in pipeline.stages}
        rows = {part: deployment.pipeline(index, part) for part in range(max(degrees))}
        if len(degrees) > 1:
            rows[_EVERYONE] = tuple(rank for seat, rank in deployment.ranks.items() if seat.pipeline == index)
        for part, ranks in rows.items():
            group: Any = dist.new_group(list(ranks), timeout=timeout)
            found[index, part] = ranks, group
    return found


class StageRun:
    """Runs a stage.

    Args:
        stage: its layers, with weights.
        compiled: the stage as it is called.
        seat: of this rank.
        deployment: of all ranks.
        layer_map: of the model, with this pipeline's micro-batch.
        groups: of `pipeline_groups`.
        example: a batch, for its form.
        device: of this rank.
    """

    def __init__(
        self,
        stage: StageModule,
        compiled: nn.Module,
        *,
        seat: Seat,
        deployment: Deployment,
        layer_map: LayerMap,
        groups: Groups,
        example: Batch,
        device: torch.device,
    ) -> None:
        stage.reads(example)
        self._seat, self._device = seat, device
        self._pipeline = deployment.plan.pipelines[seat.pipeline]
        self._samples = deployment.samples(seat.pipeline)
        self._global_batch = deployment.plan.global_batch
        layers = deployment.stage(seat).layers
        ends = layers.stop == layer_map.num_layers
        arguments = {
            "input_args": tuple(shape.empty("meta") for shape in layer_map.crossing[layers.start]),
            "output_args": (torch.empty((), device="meta"),)
            if ends
            else tuple(shape.empty("meta") for shape in layer_map.crossing[layers.stop]),
        }
        piped = _piped(stage.passing_on(compiled), seat, deployment, groups, device, arguments)
        make = Schedule1F1B if deployment.plan.schedule is PipelineSchedule.ONE_F_ONE_B else ScheduleGPipe
        self._schedule = make(piped, self._pipeline.micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def passes(self, load: Load, step: int, seed: int) -> Tensor:
        """Forward and backward passes of a step.

        Args:
            load: of indices of samples, their batch.
            step: index.
            seed: of dropout; with the step and the seat it makes the draws.

        Returns:
            The sum of this rank's losses, in fp64 in host memory; 0 but for the first rank of the last stage.

        Raises:
            ClusterError: the batch has another number of samples.
        """
        first = step * self._global_batch
        batch = batch_of(load(range(first + self._samples.start, first + self._samples.stop)))
        if batch.samples != len(self._samples):
            raise ClusterError(
                f"load gave {batch.samples} samples where it was asked for {len(self._samples)}. Expected was a batch of the"
                f" samples"
                " that load is called with. Correct load"
            )
        torch.manual_seed(hash((seed, step, self._seat.pipeline, self._seat.place)) % 2**63)
        losses: list[Tensor] = []
        named = {f"batch_{name}": tensor.to(self._device) for name, tensor in batch.tensors.items()}
        no_targets: Any = torch.zeros(self._pipeline.micro_batches)  # the loss is the last stage's output
        self._schedule.step(target=no_targets, losses=losses, return_outputs=False, **cast(Any, named))
        zero = torch.zeros((), dtype=torch.float64)
        return zero if self._seat.part else zero + sum(loss.detach().double().cpu() for loss in losses)


def _piped(
    compiled: nn.Module,
    seat: Seat,
    deployment: Deployment,
    groups: Groups,
    device: torch.device,
    arguments: dict[str, Any],
) -> PipelineStage:
    """The stage as PyTorch's schedules run it.

    What crosses, and its gradients, is whole on each GPU of a unit. Where units differ in size, the GPU of part i receives from
    part i modulo the other unit's size.
    """
    (ranks, chain), depth = groups[seat.pipeline, seat.part], deployment.depth(seat.pipeline)
    if (seat.pipeline, _EVERYONE) not in groups:
        piped = PipelineStage(compiled, seat.place, depth, device, group=chain, **arguments)
        by_rank = {rank: place for place, rank in enumerate(sorted(ranks))}
        piped.stage_index_to_group_rank = {place: by_rank[rank] for place, rank in enumerate(ranks)}
        return piped
    members, everyone = groups[seat.pipeline, _EVERYONE]
    by_rank = {rank: place for place, rank in enumerate(sorted(members))}
    stages = deployment.plan.pipelines[seat.pipeline].stages

    def followers(place: int) -> tuple[int, ...]:
        parts = range(seat.part, stages[place].tp, stages[seat.place].tp) if 0 <= place < depth else ()
        return tuple(by_rank[deployment.ranks[replace(seat, place=place, part=part)]] for part in parts)

    return FannedStage(
        compiled,
        seat.place,
        depth,
        device,
        chain=chain,
        everyone=everyone,
        sources={place: by_rank[rank] for place, rank in enumerate(ranks)},
        forward_to=followers(seat.place + 1),
        backward_to=followers(seat.place - 1),
        **arguments,
    )
