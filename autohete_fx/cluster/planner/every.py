"""Every plan of a small cluster: units on nodes, pipelines of them, divisions of the layers, and shares of the batch.

Enter the seconds that are to be beaten; leaves the fastest plan below them, or None. On few GPUs there are few plans. Heuristics on
counts and places miss some, on nodes of unlike sizes and where pipelines share a node. A plan is simulated only where a bound
is below the best seconds. In a pipeline of ``k`` micro-batches one passes all stages. Each stage ``s`` also takes
``k slot_s`` between the way of the first one to it and the way of the last one back:

    max(sum_s z_s + 2 sum_s h_s,  max_s (sum_{r < s} z_r + 2 sum_{r < s - 1} h_r + k slot_s)),   slot_s = z_s + 2 h_{s-1} + 2 h_s

``z`` is the compute of a stage. ``h_s`` is the message from stage ``s`` to the next, alone on its link, and 0 where sends do not
block. Updates are added as they are, and the sums of those gradients that the first stages have.

All divisions of the layers are tried where they are few; else the one that balances the stages. Work is counted, not timed, so that
equal inputs give equal plans.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.cluster.planner.shapes import Shape, Shaper, UnitType, divided_evenly
from autohete_fx.cluster.simulation.events import Sends
from autohete_fx.cluster.simulation.gradient_sums import last_sums_s, sums_of
from autohete_fx.cluster.simulation.simulate import Timeline, simulate
from autohete_fx.cluster.spec import Cluster

MOST_UNITS = 5
"""A cluster with so many units of the fewest GPUs has all its plans tried."""
_MOST_CUTS = 130
"""Divisions of the layers of a pipeline that are all tried; eight layers have 35 at most, ten have 126."""
MOST_WORK = 400_000
"""Passes of stages that are simulated, and pipelines that are bounded, before the search ends."""

_ANY_NUMBER = 1 << 30
"""Of micro-batches, where nothing limits them."""

_Order = tuple[tuple[str, UnitType], ...]
"""The units of a pipeline, each with its node."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A division of the layers: seconds of the stages, and of the optimizer's step."""

    shape: Shape
    seconds: tuple[float, ...]
    update_s: float


@dataclass(frozen=True, slots=True)
class _Bounded:
    """A pipeline on its nodes: seconds of one micro-batch, and by stage those before and after it, and those of its slot."""

    cut: _Cut
    fill_s: float
    stages: tuple[tuple[float, float], ...]

    def least_s(self, micro_batches: int) -> float:
        """A bound on the seconds of so many, update aside."""
        return max(self.fill_s, *(around_s + micro_batches * slot_s for around_s, slot_s in self.stages))

    def most(self, seconds: float) -> int:
        """Micro-batches that may be done before so many seconds; 0 where fewer than stages."""
        left_s = seconds - self.cut.update_s
        if math.isinf(left_s):
            return _ANY_NUMBER
        if self.fill_s >= left_s:
            return 0
        count = min(max(0, int((left_s - around_s) / slot_s)) for around_s, slot_s in self.stages if slot_s)
        return count if count >= len(self.cut.seconds) else 0


class Every:
    """All plans of one small cluster."""

    def __init__(
        self,
        cluster: Cluster,
        costs: CostTable,
        shaper: Shaper,
        links: Links,
        *,
        global_batch: int,
        sizes: Sequence[int],
        sends: Sends,
    ) -> None:
        self._cluster, self._costs, self._shaper, self._links = cluster, costs, shaper, links
        self._batch, self._sizes, self._sends = global_batch, sizes, sends
        self._cuts: dict[tuple[tuple[UnitType, ...], int], list[_Cut]] = {}
        self._bounded: dict[_Order, list[_Bounded]] = {}
        self._boundary_bytes = min(
            (costs.boundary_bytes(layer, 1) for layer in range(shaper.num_layers - 1)), default=0
        )
        self._left, self._limit_s = 0, math.inf
        self.num_simulated = 0

    def fastest(
        self, units: Sequence[UnitType], seconds: float, most_work: int = MOST_WORK
    ) -> tuple[ClusterPlan, Timeline] | None:
        """The fastest plan of such units that takes less than so many seconds, as far as the work goes."""
        best, seen, self._limit_s, self._left = None, set(), seconds, most_work
        for orders in self._pipelines(units):
            key = tuple(sorted(orders))
            if key in seen:
                continue
            seen.add(key)
            for plan in self._plans(key):
                timeline = simulate(plan, self._cluster, self._costs, sends=self._sends, links=self._links)
                self.num_simulated += 1
                self._left -= sum(2 * len(pipe.stages) * pipe.micro_batches for pipe in plan.pipelines)
                if timeline.iteration_s < self._limit_s:
                    best, self._limit_s = (plan, timeline), timeline.iteration_s
            if self._left < 0:
                break
        return best

    def _pipelines(self, units: Sequence[UnitType]) -> Iterator[list[_Order]]:
        """Every set of pipelines of units on nodes; of nodes that are alike, untouched ones are taken in order."""
        nodes = self._cluster.nodes
        free = [node.gpus for node in nodes]

        def extended(done: list[_Order], order: _Order) -> Iterator[list[_Order]]:
            fresh = set()
            for index, node in enumerate(nodes):
                kind = node.gpu, node.zone, node.gpus
                if free[index] == node.gpus:
                    if kind in fresh:
                        continue
                    fresh.add(kind)
                for unit in units:
                    if (unit.gpu, unit.zone) != (node.gpu, node.zone) or unit.num_gpus > free[index]:
                        continue
                    longer = (*order, (node.name, unit))
                    if len(longer) > self._shaper.num_layers:
                        continue
                    free[index] -= unit.num_gpus
                    if not done or len(done[-1]) <= len(longer):
                        yield [*done, longer]
                        yield from extended([*done, longer], ())
                    yield from extended(done, longer)
                    free[index] += unit.num_gpus

        yield from extended([], ())

    def _plans(self, orders: Sequence[_Order]) -> Iterator[ClusterPlan]:
        """Plans of these pipelines whose bound is below the limit."""
        options = [self._bounds(order) for order in orders]
        self._left -= len(orders)
        ways = [[(pipe, most) for pipe in pipes if (most := pipe.most(self._limit_s))] for pipes in options]
        reach = [max((pipe.cut.shape.micro_batch * most for pipe, most in way), default=0) for way in ways]
        if not all(ways) or sum(reach) < self._batch:
            return
        for chosen in itertools.product(*ways):
            if sum(pipe.cut.shape.micro_batch * most for pipe, most in chosen) < self._batch:
                continue
            self._left -= 1
            if self._left < 0:
                return
            pipes = [pipe for pipe, _ in chosen]
            update_s, sums_s = max(pipe.cut.update_s for pipe in pipes), None
            for counts in self._shares(pipes, self._batch):
                passes_s = max(pipe.least_s(count) for pipe, count in zip(pipes, counts, strict=True))
                if passes_s + update_s + (sums_s or 0.0) >= self._limit_s:
                    continue
                plan = self._plan(orders, pipes, counts)
                if sums_s is None:  # whatever the counts are
                    sums_s = last_sums_s(plan, sums_of(plan, self._costs, self._links))
                if passes_s + update_s + sums_s < self._limit_s:
                    yield plan

    def _shares(self, pipes: Sequence[_Bounded], left: int) -> Iterator[tuple[int, ...]]:
        """Every way to share so many samples out."""
        if not pipes:
            if not left:
                yield ()
            return
        size, rest = pipes[0].cut.shape.micro_batch, pipes[1:]
        others = sum(pipe.cut.shape.micro_batch * pipe.most(self._limit_s) for pipe in rest)
        least = max(len(pipes[0].cut.seconds), math.ceil((left - others) / size))
        for count in range(least, min(pipes[0].most(self._limit_s), left // size) + 1):
            for counts in self._shares(rest, left - count * size):
                yield (count, *counts)

    def _bounds(self, order: _Order) -> list[_Bounded]:
        """The pipeline with each division of its layers and each size of micro-batch, the fastest first."""
        if order not in self._bounded:
            found, units = [], tuple(unit for _, unit in order)
            for size in divided_evenly(units, self._sizes):
                hops = [2 * self._hop_s(*pair, size) for pair in itertools.pairwise(order)]
                for cut in self._divided(units, size):
                    stages = tuple(
                        (
                            sum(cut.seconds[:place]) + sum(hops[: max(0, place - 1)]),
                            sum((own, *hops[max(0, place - 1) : place + 1])),
                        )
                        for place, own in enumerate(cut.seconds)
                    )
                    found.append(_Bounded(cut, sum(cut.seconds) + sum(hops), stages))
            self._bounded[order] = sorted(
                found, key=lambda pipe: max(slot_s for _, slot_s in pipe.stages) / pipe.cut.shape.micro_batch
            )
        return self._bounded[order]

    def _hop_s(self, source: tuple[str, UnitType], target: tuple[str, UnitType], size: int) -> float:
        """A message alone on its link; 0 where the sender does not wait for it."""
        if self._sends is not Sends.BLOCKING:
            return 0.0
        (here, unit), (there, after) = source, target
        num_bytes, pairs = self._boundary_bytes * size, min(unit.num_gpus, after.num_gpus)
        link = self._links.within(here) if here == there else self._links.between(here, there)
        return link.seconds(num_bytes / pairs, pairs)

    def _divided(self, units: tuple[UnitType, ...], size: int) -> list[_Cut]:
        key = units, size
        if key not in self._cuts:
            layers, depth = self._shaper.num_layers, len(units)
            if math.comb(layers - 1, depth - 1) <= _MOST_CUTS:
                inner = itertools.combinations(range(1, layers), depth - 1)
                shapes = [self._shaper.cut(units, [0, *cuts, layers], size, spread=False) for cuts in inner]
            else:
                shapes = [self._shaper.shape(units, size, spread=False)]
            self._cuts[key] = [self._costed(shape) for shape in shapes if shape is not None]
        return self._cuts[key]

    def _costed(self, shape: Shape) -> _Cut:
        costs = [
            self._shaper.cost(
                stage.unit,
                stage.first,
                stage.last + 1,
                shape.micro_batch,
                recomputed=stage.recomputed,
                offloaded=stage.offloaded,
            )
            for stage in shape.stages
        ]
        seconds = tuple(cost.forward_s + cost.backward_s for cost in costs)
        return _Cut(shape, seconds, max(cost.update_s for cost in costs))

    def _plan(self, orders: Sequence[_Order], pipes: Sequence[_Bounded], counts: Sequence[int]) -> ClusterPlan:
        return ClusterPlan(
            model=self._costs.model,
            pipelines=tuple(
                Pipeline(
                    stages=tuple(
                        Stage(
                            node=node,
                            gpu=unit.gpu,
                            tp=unit.tp,
                            first=stage.first,
                            last=stage.last,
                            recomputed=stage.recomputed,
                            offloaded=stage.offloaded,
                            shards=unit.shards,
                        )
                        for (node, unit), stage in zip(order, pipe.cut.shape.stages, strict=True)
                    ),
                    micro_batch=pipe.cut.shape.micro_batch,
                    micro_batches=count,
                )
                for order, pipe, count in zip(orders, pipes, counts, strict=True)
            ),
            planner="autohete",
        )
