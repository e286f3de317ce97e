"""A rank's stage in its pipeline: the passes of a step, in the order of `torch.distributed.pipelining`'s schedules.

Each micro-batch's mean loss counts by its share of the global batch's samples. The sums over all pipelines are thus the loss
and the gradients of one process with the whole batch, but for rounding.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from autohete_fx.cluster.deploy import Deployment, Seat
from autohete_fx.cluster.model.batches import Batch, batch_of, joined
from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.plan import PipelineSchedule
from autohete_fx.cluster.stages.module import StageModule
from autohete_fx.errors import ClusterError
from autohete_fx.internals.pipelines import FannedStage, Peer, ToldStage

Load = Callable[[range], Any]
"""A function of indices of samples: the batch of these samples, in that order."""
Groups = dict[tuple[int, int, int], tuple[tuple[int, ...], dist.ProcessGroup]]
"""By pipeline, part and shard of its units: the ranks in order of stages, and their group.

By pipeline and -1 twice: all of its ranks, where stages differ in their units.
"""
_EVERYONE = (-1, -1)


def pipeline_groups(deployment: Deployment, timeout: timedelta | None = None) -> Groups:
    """The groups of all pipelines. All ranks call it.

    Args:
        deployment: of all ranks.
        timeout: after which a rank that does not answer is an error; None: PyTorch's.
    """
    found: Groups = {}
    for index, pipeline in enumerate(deployment.plan.pipelines):
        units = {(stage.tp, stage.shards) for stage in pipeline.stages}
        places = itertools.product(range(max(tp for tp, _ in units)), range(max(shards for _, shards in units)))
        rows = {(part, shard): deployment.pipeline(index, part, shard) for part, shard in places}
        if len(units) > 1:
            rows[_EVERYONE] = tuple(rank for seat, rank in deployment.ranks.items() if seat.pipeline == index)
        for place, ranks in rows.items():
            group: Any = dist.new_group(list(ranks), timeout=timeout)
            found[index, *place] = ranks, group
    return found


class StageRun:
    """Runs a stage.

    Args:
        stage: its layers, with weights.
        compiled: the stage as it is called.
        seat: of this rank.
        deployment: of all ranks.
        layer_map: of the model, with this rank's samples of a micro-batch.
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
        self._samples, self._shards = deployment.samples(seat), deployment.stage(seat).shards
        self._global_batch = deployment.plan.global_batch
        layers = deployment.stage(seat).layers
        ends = layers.stop == layer_map.num_layers
        arguments = {
            "input_args": tuple(shape.empty("meta") for shape in layer_map.crossing[layers.start]),
            "output_args": (torch.empty((), device="meta"),)
            if ends
            else tuple(shape.empty("meta") for shape in layer_map.crossing[layers.stop]),
        }
        self._piped = piped = _piped(stage.passing_on(compiled), seat, deployment, groups, device, arguments)
        make = Schedule1F1B if deployment.plan.schedule is PipelineSchedule.ONE_F_ONE_B else ScheduleGPipe
        self._schedule = make(piped, self._pipeline.micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    def passes(
        self, load: Load, step: int, seed: int, before_last: Callable[[Sequence[Tensor]], None] | None = None
    ) -> Tensor:
        """Forward and backward passes of a step.

        Args:
            load: of indices of samples, their batch.
            step: index.
            seed: of dropout; with the step and the seat it makes the draws.
            before_last: is called when the last backward pass begins, with the outputs of its forward pass.

        Returns:
            This rank's part of the loss, in fp64 in host memory; 0 where it has none, or where another GPU has the same.

        Raises:
            ClusterError: the batch has another number of samples.
        """
        self._piped.before_last = before_last
        first = step * self._global_batch
        batch = joined([_loaded(load, range(first + each.start, first + each.stop)) for each in self._samples])
        seat = self._seat
        torch.manual_seed(hash((seed, step, seat.pipeline, seat.place, seat.shard)) % 2**63)
        losses: list[Tensor] = []
        named = {f"batch_{name}": tensor.to(self._device) for name, tensor in batch.tensors.items()}
        no_targets: Any = torch.zeros(self._pipeline.micro_batches)  # the loss is the last stage's output
        self._schedule.step(target=no_targets, losses=losses, return_outputs=False, **cast(Any, named))
        zero = torch.zeros((), dtype=torch.float64)
        return zero if seat.part else zero + sum(loss.detach().double().cpu() for loss in losses) / self._shards


def _loaded(load: Load, samples: range) -> Batch:
    batch = batch_of(load(samples))
    if batch.samples != len(samples):
        raise ClusterError(
            f"load gave {batch.samples} samples where it was asked for {len(samples)}. Expected was a batch of the samples that"
            " load is called with. Correct load"
        )
    return batch


def _piped(
    compiled: nn.Module,
    seat: Seat,
    deployment: Deployment,
    groups: Groups,
    device: torch.device,
    arguments: dict[str, Any],
) -> ToldStage:
    """The stage as PyTorch's schedules run it.

    What crosses, and its gradients, is whole on each GPU of tensor parallelism. Where degrees differ, the GPU of part i receives
    from part i modulo the other degree. Where shards differ, it receives rows from each shard that has some of its own. Gradients
    are those of the mean over shards, and a sender makes its own those of the receiver's number.
    """
    (ranks, chain), depth = groups[seat.pipeline, seat.part, seat.shard], deployment.depth(seat.pipeline)
    if (seat.pipeline, *_EVERYONE) not in groups:
        piped = ToldStage(compiled, seat.place, depth, device, group=chain, **arguments)
        by_rank = {rank: place for place, rank in enumerate(sorted(ranks))}
        piped.stage_index_to_group_rank = {place: by_rank[rank] for place, rank in enumerate(ranks)}
        return piped
    members, everyone = groups[seat.pipeline, *_EVERYONE]
    by_rank = {rank: place for place, rank in enumerate(sorted(members))}
    stages, mine = deployment.plan.pipelines[seat.pipeline].stages, deployment.rows(seat)

    def peers(place: int, *, receive: bool) -> tuple[Peer, ...]:
        if not 0 <= place < depth:
            return ()
        own, other, found = stages[seat.place], stages[place], []
        parts = [seat.part % other.tp] if receive else range(seat.part, other.tp, own.tp)
        for shard, part in itertools.product(range(other.shards), parts):
            peer = replace(seat, place=place, part=part, shard=shard)
            theirs = deployment.rows(peer)
            first, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if first < stop:
                rows = None if stop - first == len(mine) else range(first - mine.start, stop - mine.start)
                rank, scale = by_rank[deployment.ranks[peer]], other.shards / own.shards
                found.append(Peer(rank=rank, rows=rows, scale=scale))
        return tuple(found)

    return FannedStage(
        compiled,
        seat.place,
        depth,
        device,
        chain=chain,
        everyone=everyone,
        forward_from=peers(seat.place - 1, receive=True),
        forward_to=peers(seat.place + 1, receive=False),
        backward_from=peers(seat.place + 1, receive=True),
        backward_to=peers(seat.place - 1, receive=False),
        **arguments,
    )
