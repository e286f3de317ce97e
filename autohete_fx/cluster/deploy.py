"""A plan on the ranks of a job: who takes which stage, and whose gradients are summed.

Values only. Ranks say on which node they are and what GPU they have. Nodes of the plan are matched with nodes of the job that
have as many GPUs of the type.

Gradients of a parameter are summed over its owners: all ranks whose stages hold it, in all pipelines. A tied embedding that
several stages of one pipeline read is one parameter with more owners, and that is all that ties need. Parameters with equal
owners are summed together. There are at most as many sets of owners as the pipelines have cuts, one more, and one for each tie.

Where units share layers by tensor parallelism or hold shards, a parameter has owners for each piece of it. Pipelines of different
units cut it at different places, and every piece between all cuts has its own set of owners.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.model.pieces import Piece, finest
from autohete_fx.cluster.model.split import AtMarks
from autohete_fx.cluster.model.tensor_parallel import TensorLayout
from autohete_fx.cluster.model.unit import UnitPlace
from autohete_fx.cluster.plan import ClusterPlan, Stage
from autohete_fx.errors import ClusterError
from autohete_fx.internals.pipelines import CROSS_WITHOUT_GRADIENT
from autohete_fx.machine.devices import device_of_driver


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
        shard: of the stage's parameters and samples.
    """

    pipeline: int
    place: int
    part: int
    shard: int = 0


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

    def place(self, seat: Seat) -> UnitPlace:
        """Where in its unit a seat is."""
        stage = self.stage(seat)
        return UnitPlace(degree=stage.tp, part=seat.part, shards=stage.shards, shard=seat.shard)

    def pipeline(self, index: int, part: int, shard: int) -> tuple[int, ...]:
        """Ranks of a pipeline in order of stages, one of each stage: that of a part and a shard, modulo the stage's numbers."""
        stages = self.plan.pipelines[index].stages
        return tuple(
            self.ranks[Seat(pipeline=index, place=place, part=part % stage.tp, shard=shard % stage.shards)]
            for place, stage in enumerate(stages)
        )

    def depth(self, index: int) -> int:
        """Stages of a pipeline."""
        return len(self.plan.pipelines[index].stages)

    def rows(self, seat: Seat) -> range:
        """The samples of a micro-batch that a seat takes."""
        stage, size = self.stage(seat), self.plan.pipelines[seat.pipeline].micro_batch
        return range(size * seat.shard // stage.shards, size * (seat.shard + 1) // stage.shards)

    def samples(self, seat: Seat) -> tuple[range, ...]:
        """Those of the global batch that a seat takes, in the order of micro-batches. Without shards it is one range."""
        pipelines, rows = self.plan.pipelines, self.rows(seat)
        first = sum(before.micro_batch * before.micro_batches for before in pipelines[: seat.pipeline])
        size, count = pipelines[seat.pipeline].micro_batch, pipelines[seat.pipeline].micro_batches
        if len(rows) == size:
            return (range(first, first + size * count),)
        begins = range(first, first + size * count, size)
        return tuple(range(begin + rows.start, begin + rows.stop) for begin in begins)

    def held(self, seat: Seat, layer_map: LayerMap, layout: TensorLayout) -> dict[str, Piece]:
        """By name of a parameter, the piece that a seat has."""
        place = self.place(seat)
        return {
            name: place.piece(layout, name, layer_map.shapes[name]) for name in layer_map.held(self.stage(seat).layers)
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

    def peers(self) -> list[tuple[Seat, ...]]:
        """The seats of each unit that share layers by tensor parallelism, in order of their parts, and those that hold shards."""
        found: list[tuple[Seat, ...]] = []
        for index, place, stage in self.plan.stages():
            seats = [
                [Seat(pipeline=index, place=place, part=part, shard=shard) for part in range(stage.tp)]
                for shard in range(stage.shards)
            ]
            rows = [*(seats if stage.tp > 1 else ()), *(zip(*seats, strict=True) if stage.shards > 1 else ())]
            found += map(tuple, rows)
        return found


def deploy(plan: ClusterPlan, members: Sequence[Member]) -> Deployment:
    """Give every GPU of a plan a rank.

    Raises ClusterError where the job lacks nodes with as many GPUs of a type.
    """
    free: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        free.setdefault(member.node, []).append(rank)
    gpus = {member.node: member.gpu for member in members}
    there = {node: (gpus[node], len(ranks)) for node, ranks in free.items()}
    remedy = "Start the job on them, or join without plan="
    taken = {node: free[chosen] for node, chosen in nodes_for(plan, there, remedy=remedy).items()}
    ranks: dict[Seat, int] = {}
    for index, place, stage in plan.stages():
        for shard, part in itertools.product(range(stage.shards), range(stage.tp)):
            ranks[Seat(pipeline=index, place=place, part=part, shard=shard)] = taken[stage.node].pop(0)
    seated = set(ranks.values())
    return Deployment(plan=plan, ranks=ranks, idle=tuple(rank for rank in range(len(members)) if rank not in seated))


def nodes_for(plan: ClusterPlan, nodes: Mapping[str, tuple[str, int]], *, remedy: str) -> dict[str, str]:
    """By node of a plan, the one that takes its place: that of its name if it has the GPUs, else the smallest that has.

    Args:
        plan: whose nodes are needed.
        nodes: that there are: the type of GPU, and how many.
        remedy: an error's advice.

    Raises:
        ClusterError: nodes with as many GPUs of a type are lacking, or a node of the plan has two types.
    """
    free, found = dict(nodes), {}
    needed: dict[str, tuple[str, int]] = {}
    for _, _, stage in plan.stages():
        gpu, count = needed.get(stage.node, (stage.gpu, 0))
        if gpu != stage.gpu:
            raise ClusterError(
                f"the plan has stages on {gpu} and on {stage.gpu} of its node {stage.node!r}. Expected was one type of GPU a node."
                " Give the stages nodes of their own"
            )
        needed[stage.node] = gpu, count + stage.num_gpus
    for node, (gpu, count) in sorted(needed.items(), key=lambda item: (-item[1][1], item[0])):
        able = [name for name, (of, gpus) in free.items() if _is_called(of, gpu) and gpus >= count]
        if not able:
            there = {name: f"{gpus} {of}" for name, (of, gpus) in free.items()}
            raise ClusterError(
                f"the plan needs a node with {count} {gpu} for its {node!r}, and nodes without a part have {there}."
                f" Expected were the nodes of the plan, by name and type as `member=` of join tells them. {remedy}"
            )
        found[node] = node if node in able else min(able, key=lambda name: (free[name][1], name))
        del free[found[node]]
    return found


def _is_called(gpu: str, planned: str) -> bool:
    """Whether a GPU, by the name that its driver has for it, is of the type of a plan."""
    if gpu == planned:
        return True
    found = device_of_driver(gpu)
    return found is not None and found.name == planned


def states_on_device(plan: ClusterPlan, optimizer: object) -> str | None:
    """A warning where optimizer states should be on hosts, and the job's backend and optimizer keep them on the GPU. The result is
    the same, in more memory."""
    layers = sum(stage.offloaded for _, _, stage in plan.stages())
    if not layers:
        return None
    return (
        f"the plan keeps optimizer states of {layers} layers on hosts, and {type(optimizer).__name__} keeps all of them on the"
        ' GPU. Expected were backend="autohete" and an optimizer of autohete_fx, which move states within memory_budget. Give'
        " both, plan for less memory a GPU, or see that there is enough"
    )


def kept_wholes(plan: ClusterPlan, backend: str) -> str | None:
    """A warning where a backend keeps whole parameters of sharded stages. The result is the same, in more memory."""
    if not plan.has_shards:
        return None
    return (
        f"the plan has stages whose GPUs hold shards, and the backend {backend!r} keeps parameters whole from each forward to"
        ' its backward. Expected was backend="autohete", which gathers them again within memory_budget. Give it, or see that'
        " there is enough memory"
    )


def check_runs(plan: ClusterPlan, layer_map: LayerMap, model: str, *, samples: int, is_compiled: bool) -> None:
    """Raise ClusterError where a plan does not fit a model, or asks for what cannot be run.

    Args:
        plan: for the job.
        layer_map: of the model.
        model: its name.
        samples: of which the map is.
        is_compiled: the job has a backend.
    """
    _check_shards(plan, layer_map, model, samples, is_compiled=is_compiled)
    if plan.num_layers != layer_map.num_layers:
        raise ClusterError(
            f"the plan has {plan.num_layers} layers, and {model} has {layer_map.num_layers}, all before and after its"
            f" {len(layer_map.layers)} layers counted as one each. Expected was a plan of this model. Make the plan again"
        )
    check_micro_batches(plan)
    for index, pipeline in enumerate(plan.pipelines):
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


def check_micro_batches(plan: ClusterPlan) -> None:
    """Raise ClusterError where a pipeline has fewer micro-batches than stages."""
    for index, pipeline in enumerate(plan.pipelines):
        if pipeline.micro_batches < len(pipeline.stages):
            raise ClusterError(
                f"pipeline {index} of the plan has {len(pipeline.stages)} stages and {pipeline.micro_batches} micro-batches."
                " Expected was at least one micro-batch a stage. Give smaller micro-batches, or fewer stages"
            )


def _check_shards(plan: ClusterPlan, layer_map: LayerMap, model: str, samples: int, *, is_compiled: bool) -> None:
    sharded = next((stage for _, _, stage in plan.stages() if stage.shards > 1), None)
    if sharded is None:
        return
    if isinstance(layer_map.way, AtMarks):
        raise ClusterError(
            f"the plan has a stage of {sharded.shards} shards, and {model} is divided at marks. Expected was one shard a stage."
            " Make the plan again without shards, or take the marks out"
        )
    if not is_compiled:
        raise ClusterError(
            f"the plan has a stage of {sharded.shards} shards, and the job has no backend. Expected was one that compiles stages,"
            ' because eager code cannot gather parameters. Give cluster.join backend="autohete"'
        )
    crossing = layer_map.crossing[1][0].sizes
    unequal = any(len({stage.shards for stage in pipeline.stages}) > 1 for pipeline in plan.pipelines)
    if unequal and crossing[0] != samples:
        raise ClusterError(
            f"the plan has a pipeline whose stages have unequal shards, and hidden states of {model} have shape {crossing} for"
            f" {samples} samples. Expected were samples as their first dimension, by which they are divided. Give its stages"
            " equal shards"
        )
