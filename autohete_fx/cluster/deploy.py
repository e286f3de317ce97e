"""A plan on the ranks of a job: who takes which stage, and whose gradients are summed.

Values only. Ranks say on which node they are and what GPU they have. Nodes of the plan are matched with nodes of the job that
have as many GPUs of the type.

Gradients of a parameter are summed over its owners: all ranks whose stages hold it, in all pipelines. A tied embedding that
several stages of one pipeline read is one parameter with more owners, and that is all that ties need. Parameters with equal
owners are summed together. There are at most as many sets of owners as the pipelines have cuts, one more, and one for each tie.

Where units share layers by tensor parallelism, a parameter has owners for each piece of it. Pipelines of different degrees cut
it at different places, and every piece between two cuts has its own set of owners.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autohete_fx.cluster.layers import LayerMap
from autohete_fx.cluster.pieces import Piece, finest
from autohete_fx.cluster.plan import ClusterPlan, Stage
from autohete_fx.cluster.tensor_parallel import TensorLayout
from autohete_fx.errors import ClusterError
from autohete_fx.internals.pipelines import CROSS_WITHOUT_GRADIENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rank of a job.

    Attributes:
        node: name of its machine.
        gpu: type of its GPU, as plans call it.
    """

    node: str
    gpu: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The part of a rank in a plan.

    Attributes:
        pipeline: index.
        place: of its stage in the pipeline.
        part: of the stage's GPUs, by tensor parallelism.
    """

    pipeline: int
    place: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A plan with a rank for each GPU that it uses.

    Attributes:
        plan: that is executed.
        ranks: by seat.
        idle: ranks without a seat.
    """

    plan: ClusterPlan
    ranks: Mapping[Seat, int]
    idle: tuple[int, ...]

    def seat(self, rank: int) -> Seat | None:
        """A rank's seat; None where it is idle."""
        return next((seat for seat, taken in self.ranks.items() if taken == rank), None)

    def stage(self, seat: Seat) -> Stage:
        """The stage of a seat."""
        return self.plan.pipelines[seat.pipeline].stages[seat.place]

    def pipeline(self, index: int, part: int) -> tuple[int, ...]:
        """Ranks of a pipeline in order of stages, one of each stage: that of a part, modulo the stage's number of GPUs."""
        stages = self.plan.pipelines[index].stages
        return tuple(
            self.ranks[Seat(pipeline=index, place=place, part=part % stage.tp)] for place, stage in enumerate(stages)
        )

    def depth(self, index: int) -> int:
        """Stages of a pipeline."""
        return len(self.plan.pipelines[index].stages)

    def samples(self, index: int) -> range:
        """Those of the global batch that a pipeline takes."""
        sizes = [pipeline.micro_batch * pipeline.micro_batches for pipeline in self.plan.pipelines]
        first = sum(sizes[:index])
        return range(first, first + sizes[index])

    def held(self, seat: Seat, layer_map: LayerMap, layout: TensorLayout) -> dict[str, Piece]:
        """By name of a parameter, the piece that a seat has."""
        stage = self.stage(seat)
        return {
            name: Piece(name, cut=layout.cut(name, layer_map.shapes[name].sizes, stage.tp, seat.part))
            for name in layer_map.held(stage.layers)
        }

    def owners(self, layer_map: LayerMap, layout: TensorLayout) -> dict[Piece, tuple[int, ...]]:
        """By piece, the ranks that hold it, ascending. Pieces are the finest that the units of all pipelines need together."""
        held = {rank: self.held(seat, layer_map, layout) for seat, rank in self.ranks.items()}
        pieces = finest(piece for mine in held.values() for piece in mine.values())
        found: dict[Piece, list[int]] = {}
        for rank, mine in held.items():
            for piece in mine.values():
                for part in pieces[piece]:
                    found.setdefault(part, []).append(rank)
        return {piece: tuple(sorted(ranks)) for piece, ranks in found.items()}

    def units(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """By pipeline and place, the ranks of each unit of several GPUs, in order of their parts."""
        return {
            (index, place): tuple(self.ranks[Seat(pipeline=index, place=place, part=part)] for part in range(stage.tp))
            for index, place, stage in self.plan.stages()
            if stage.tp > 1
        }


def deploy(plan: ClusterPlan, members: Sequence[Member]) -> Deployment:
    """Give every GPU of a plan a rank.

    Raises ClusterError where the job lacks nodes with as many GPUs of a type.
    """
    free: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        free.setdefault(member.node, []).append(rank)
    gpus = {member.node: member.gpu for member in members}
    needed: dict[str, tuple[str, int]] = {}
    for _, _, stage in plan.stages():
        gpu, count = needed.get(stage.node, (stage.gpu, 0))
        needed[stage.node] = gpu, count + stage.tp
    taken: dict[str, list[int]] = {}
    for node, (gpu, count) in sorted(needed.items(), key=lambda item: (-item[1][1], item[0])):
        able = [name for name, ranks in free.items() if gpus[name] == gpu and len(ranks) >= count]
        if not able:
            there = {name: f"{len(ranks)} {gpus[name]}" for name, ranks in free.items()}
            raise ClusterError(
                f"the plan needs a node with {count} {gpu} for its {node!r}, and the job's nodes without a part have {there}."
                " Expected were the nodes of the plan. Start the job on them, or join without plan="
            )
        chosen = node if node in able else min(able, key=lambda name: (len(free[name]), name))
        taken[node] = free.pop(chosen)
    ranks: dict[Seat, int] = {}
    for index, place, stage in plan.stages():
        for part in range(stage.tp):
            ranks[Seat(pipeline=index, place=place, part=part)] = taken[stage.node].pop(0)
    seated = set(ranks.values())
    return Deployment(plan=plan, ranks=ranks, idle=tuple(rank for rank in range(len(members)) if rank not in seated))


def warn_of_offloads(plan: ClusterPlan, optimizer: object) -> None:
    """Warn where optimizer states should be on hosts, and the job's backend and optimizer keep them on the GPU. The result is
    the same, in more memory."""
    layers = sum(stage.offloaded for _, _, stage in plan.stages())
    if layers:
        warnings.warn(
            f"the plan keeps optimizer states of {layers} layers on hosts, and {type(optimizer).__name__} keeps all of them on the"
            ' GPU. Expected were backend="autohete" and an optimizer of autohete_fx, which move states within memory_budget. Give'
            " both, plan for less memory a GPU, or see that there is enough",
            stacklevel=3,
        )


def check_runs(plan: ClusterPlan, layer_map: LayerMap, model: str) -> None:
    """Raise ClusterError where a plan does not fit a model, or asks for what cannot be run."""
    if plan.num_layers != layer_map.num_layers:
        raise ClusterError(
            f"the plan has {plan.num_layers} layers, and {model} has {layer_map.num_layers}, all before and after its"
            f" {len(layer_map.layers)} layers counted as one each. Expected was a plan of this model. Make the plan again"
        )
    for index, pipeline in enumerate(plan.pipelines):
        if pipeline.micro_batches < len(pipeline.stages):
            raise ClusterError(
                f"pipeline {index} of the plan has {len(pipeline.stages)} stages and {pipeline.micro_batches} micro-batches."
                f" Expected"
                " was at least one micro-batch a stage. Give smaller micro-batches, or fewer stages"
            )
        crossing = [shape for stage in pipeline.stages for shape in layer_map.crossing[stage.first]]
        integers = [shape for shape in crossing if not shape.dtype.is_floating_point]
        if integers and not CROSS_WITHOUT_GRADIENT:
            raise ClusterError(
                f"pipeline {index} of the plan hands on a tensor of {integers[0].dtype}. Expected were tensors of floating"
                f" point alone, because pipelines of PyTorch {torch.__version__} know no others. Move the marks, or install"
                " PyTorch 2.13"
            )
        begins = layer_map.held(pipeline.stages[0].layers)
        if len(pipeline.stages) > 1 and layer_map.frozen.issuperset(begins):
            raise ClusterError(
                f"pipeline {index} of the plan begins with a stage whose parameters are all frozen. Expected was one that"
                f" trains, because"
                " hidden states need gradients. Give the first stage more layers"
            )
