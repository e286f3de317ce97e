"""The plan of a job that was started without one: costs and links are measured, the first rank plans, all ranks get its plan.

A job that starts again finds costs and links in the cache, and plans in seconds.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.job.job import Recipe
from autohete_fx.cluster.job.rendezvous import Rendezvous
from autohete_fx.cluster.measuring.costs import measured_costs
from autohete_fx.cluster.measuring.links import measured_cluster
from autohete_fx.cluster.measuring.timed_layer import Measuring
from autohete_fx.cluster.model.batches import Batch
from autohete_fx.cluster.model.building import BuildModel, build_noting_order
from autohete_fx.cluster.model.layers import LayerMap, map_layers
from autohete_fx.cluster.model.pieces import Piece, covered
from autohete_fx.cluster.model.tensor_parallel import TensorLayout, TpPlan, layout_of
from autohete_fx.cluster.model.watch import AtLayers
from autohete_fx.cluster.plan import ClusterPlan, plan_line
from autohete_fx.cluster.planner.moving import Moving
from autohete_fx.cluster.planner.shapes import shard_counts
from autohete_fx.cluster.planner.solve import plan_cluster
from autohete_fx.cluster.spec import Cluster
from autohete_fx.cluster.stages.compiler import StageCompiler
from autohete_fx.cluster.store.readable import Readable
from autohete_fx.cluster.store.store import Store
from autohete_fx.errors import ClusterError, ShardError
from autohete_fx.optim.base import PlannedOptimizer
from autohete_fx.options import Size, parse_size
from autohete_fx.runtime.shard.step import takes_wholes
from autohete_fx.runtime.shard.surface import check_references

MICRO_BATCHES = (1, 2, 4, 8)
"""Samples to choose from; the smallest and the largest are timed."""
_DEGREES = (2, 4, 8)
"""Of tensor parallelism, within a node."""
_TIME_LIMIT_S = 10.0


def automatic_plan(
    recipe: Recipe,
    example: Batch,
    compiler: StageCompiler,
    ranks: Rendezvous,
    *,
    cache_dir: str | Path | None = None,
    store: Store | None = None,
    tp_plan: TpPlan | None = None,
    expected_lifetime_s: float | None = None,
    say: Callable[[str], None],
) -> ClusterPlan:
    """Measure what there is, and plan for it. All ranks call it; all get one plan.

    Args:
        recipe: of the job.
        example: a batch.
        compiler: of the job's stages, with the memory of each GPU; None there: nearly all that there is.
        ranks: all of them.
        cache_dir: where measurements are kept; None: `cache.cache_dir`.
        store: of the job, whose local saves need not move.
        tp_plan: how GPUs share layers; None: that of the model's transformers configuration, or none of them does.
        expected_lifetime_s: seconds until the nodes change again; None: so long that moving does not count.
        say: tells the user a line.

    Raises:
        ClusterError: nothing fits, or a rank could not measure; on all ranks.
    """
    members, device, group = ranks.members, ranks.device, ranks.group
    given = compiler.memory_budget
    budget: Size | None = parse_size(given) if isinstance(given, str) else given
    cluster = measured_cluster(members, device, group, memory_budget=budget, cache_dir=cache_dir)
    measuring = Measuring(
        build_model=recipe.build_model,
        loss=recipe.loss,
        example=example,
        make_optimizer=recipe.make_optimizer,
        compiled=compiler.compiled,
        backend=str(compiler),
        micro_batches=micro_batches_of(recipe.global_batch),
        layouts=_layouts(recipe.build_model, example, members, tp_plan, say),
    )
    model = getattr(recipe.build_model, "__name__", "the model")
    costs = measured_costs(measuring, members, device, group, model=model, cache_dir=cache_dir, say=say)
    moving = None
    if store is not None and expected_lifetime_s is not None:
        layer_map = map_layers(recipe.build_model, example.of_samples(1))
        held = held_layers(store, layer_map, members, group)
        moving = Moving(lifetime_s=expected_lifetime_s, held=held, bandwidths=store.bandwidths)
    shards = shard_counts(cluster) if compiler.is_autohete else []
    if shards and not may_shard(recipe.build_model, example, recipe.make_optimizer):
        shards = []
    found: list[tuple[ClusterPlan, str] | str] = [""]
    if not ranks.rank:
        found = [_planned(cluster, costs, recipe.global_batch, shards, moving)]
    dist.broadcast_object_list(found, group=group)
    if isinstance(found[0], str):
        raise ClusterError(found[0])
    plan, moves = found[0]
    say(plan_line(plan))
    if moves:
        say(moves)
    return plan


def _layouts(
    build_model: BuildModel,
    example: Batch,
    members: Sequence[Member],
    tp_plan: TpPlan | None,
    say: Callable[[str], None],
) -> dict[int, TensorLayout]:
    """By degree of tensor parallelism that some node has GPUs for, how these share the layers; none where a model cannot be
    shared so."""
    most = max(Counter((member.node, member.gpu) for member in members).values())
    found: dict[int, TensorLayout] = {}
    layer_map = map_layers(build_model, example.of_samples(1)) if most > 1 else None
    for degree in _DEGREES:
        if layer_map is not None and degree <= most:
            try:
                found[degree] = layout_of(build_model, layer_map, {degree}, tp_plan)
            except ClusterError as error:
                if tp_plan is not None:
                    say(f"no plan has {degree} GPUs a stage: {error}")
    return found


def may_shard(
    build_model: BuildModel, example: Batch, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> bool:
    """Whether a model's stages can hold shards.

    It must be divided at its layers, hidden states must have samples first, and modules must read parameters by their names.
    An element's update must depend on no other element, which is known of optimizers of PyTorch and ours alone.
    """
    layer_map, param = map_layers(build_model, example.of_samples(2)), nn.Parameter(torch.zeros(2, 2))
    if not isinstance(layer_map.way, AtLayers) or layer_map.crossing[1][0].sizes[0] != 2:
        return False
    try:
        check_references(build_noting_order(build_model)[0])
    except ShardError:
        return False
    made = optimizer([param])
    if isinstance(made, PlannedOptimizer):
        return made.rule_of(param).is_elementwise
    return type(made).__module__.startswith("torch.optim.") and not takes_wholes(made)


def held_layers(
    store: Store, layer_map: LayerMap, members: Sequence[Member], group: dist.ProcessGroup | None
) -> dict[str, frozenset[int]]:
    """By node, the layers of which its disk has everything in its newest save. All ranks call it."""
    saves = Readable(store.disk).saves
    names = covered(Piece.of_key(key) for save in sorted(saves)[-1:] for key in saves[save])
    every = range(layer_map.num_layers)
    mine = frozenset(layer for layer in every if names.issuperset(layer_map.held(range(layer, layer + 1))))
    said: list[Any] = [None] * len(members)
    dist.all_gather_object(said, mine if names else frozenset(), group=group)
    found: dict[str, frozenset[int]] = {}
    for member, layers in zip(members, said, strict=True):
        found[member.node] = found.get(member.node, frozenset()) | layers
    return found


def micro_batches_of(global_batch: int) -> tuple[int, ...]:
    """Sizes of micro-batches that are timed: the smallest and the largest."""
    sizes = [size for size in MICRO_BATCHES if size <= global_batch]
    return tuple(sorted({sizes[0], sizes[-1]})) if sizes else (1,)


def _planned(
    cluster: Cluster, costs: CostTable, global_batch: int, shards: Sequence[int], moving: Moving | None
) -> tuple[ClusterPlan, str] | str:
    """The plan and why it is not the fastest, or an error's words for the other ranks, which would wait for ever."""
    try:
        solution = plan_cluster(
            cluster,
            costs,
            global_batch=global_batch,
            micro_batches=[size for size in MICRO_BATCHES if size <= global_batch],
            shards=shards,
            time_limit_s=_TIME_LIMIT_S,
            moving=moving,
        )
    except ClusterError as error:
        return str(error)
    except Exception as error:  # whatever it is, all ranks raise it
        return (
            f"the planner failed with {type(error).__name__}: {error}. Expected was a plan. Report it, and give plan="
        )
    return solution.plan, solution.moves
