"""Shapes of pipelines: units in an order, with the layers that balance them.

Enter unit types, costs and links; leave `Shape` values. A shape says nothing about nodes or counts: a plan takes some shapes
several times (`solve`), and `place` puts their units on nodes. Its step of ``k`` micro-batches takes ``fill_s + (k - 1) *
slot_s`` under 1F1B.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autohete_fx.cluster.costs import CostTable, StageCost, StageSums
from autohete_fx.cluster.memory import memory_of
from autohete_fx.cluster.simulation.gradient_sums import gather_time, with_gathers
from autohete_fx.cluster.spec import Cluster, Link

_PRECISION = 2e-3
"""The share of a slot's seconds at which the search for balanced layers ends."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class UnitType:
    """GPUs of one type in one zone that share layers.

    Attributes:
        gpu: type.
        zone: of their node.
        tp: how many share each layer by tensor parallelism.
        node_gpus: how many GPUs the largest node of such GPUs has.
        shards: how many such groups hold the layers together, each a part of the parameters and samples.
    """

    gpu: str
    zone: str
    tp: int
    node_gpus: int
    shards: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs of the unit."""
        return self.tp * self.shards


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeStage:
    """A stage of a shape: layers ``first`` to ``last`` on a unit; `plan.Stage` explains the rest."""

    unit: UnitType
    first: int
    last: int
    recomputed: int
    offloaded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A pipeline that may stand in a plan any number of times.

    Attributes:
        stages: in order of layers.
        micro_batch: samples in one.
        spread: units of the same stage of all such pipelines share nodes, so that few layers leave a node to be summed. Else
            units of a pipeline do, so that activations stay within a node.
        fill_s: seconds of one micro-batch through all stages and back.
        slot_s: seconds between two micro-batches: those of the slowest stage.
        after_s: estimated seconds of gradient sums and optimizer after the last backward.
    """

    stages: tuple[ShapeStage, ...]
    micro_batch: int
    spread: bool
    fill_s: float
    slot_s: float
    after_s: float

    def micro_batches_in(self, seconds: float) -> int:
        """How many it finishes within a step of so many seconds; 0 where fewer than it has stages."""
        left_s = seconds - self.after_s - self.fill_s
        count = 1 + int(left_s / self.slot_s + 1e-9) if left_s >= 0 else 0
        return count if count >= len(self.stages) else 0

    def seconds_of(self, micro_batches: int) -> float:
        """A step of so many micro-batches."""
        return self.fill_s + (micro_batches - 1) * self.slot_s + self.after_s

    def gpus(self) -> dict[tuple[str, str], int]:
        """GPUs by type and zone."""
        counts: dict[tuple[str, str], int] = {}
        for stage in self.stages:
            key = stage.unit.gpu, stage.unit.zone
            counts[key] = counts.get(key, 0) + stage.unit.num_gpus
        return counts

    def sizes_of_units(self, kind: tuple[str, str], least: int) -> list[int]:
        """By unit of a type and zone, its GPUs, where they are at least so many."""
        units = [stage.unit for stage in self.stages if (stage.unit.gpu, stage.unit.zone) == kind]
        return [unit.num_gpus for unit in units if unit.num_gpus >= least]


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A stage as it fits its GPU's memory."""

    num_layers: int
    seconds: float
    backward_s: float
    recomputed: int
    offloaded: int
    params_bytes: int
    update_s: float


class Shaper:
    """Makes shapes for one cluster and one model; remembers what every stage costs."""

    def __init__(self, cluster: Cluster, costs: CostTable) -> None:
        self._cluster, self._costs = cluster, costs
        self._memory = {gpu.name: gpu.memory_bytes for gpu in cluster.gpus}
        self._within = {joined.source: joined.link for joined in cluster.within}
        self._between = {(joined.source, joined.target): joined.link for joined in cluster.between}
        self._zones = {(joined.source, joined.target): joined.link for joined in cluster.zones}
        self._fitted: dict[tuple[UnitType, int, int, int], _Fitted | None] = {}
        self._sums: dict[tuple[str, int, int, int], StageSums] = {}
        self._whole_s: dict[tuple[str, int, int, int], float] = {}
        self.num_layers = len(costs.kinds)
        numbers: dict[tuple[str, ...], int] = {}
        self._alike = [
            [numbers.setdefault(costs.kinds[first:stop], len(numbers)) for stop in range(self.num_layers + 1)]
            for first in range(self.num_layers)
        ]

    def unit_types(self, degrees: Sequence[int] | None = None, shards: Sequence[int] = ()) -> tuple[UnitType, ...]:
        """Every type of unit that the cluster's nodes can hold and the costs know: without shards, and with each number of them."""
        largest: dict[tuple[str, str], int] = {}
        for node in self._cluster.nodes:
            kind = node.gpu, node.zone
            largest[kind] = max(largest.get(kind, 0), node.gpus)
        found = [
            UnitType(gpu=gpu, zone=zone, tp=tp, node_gpus=gpus, shards=count)
            for (gpu, zone), gpus in largest.items()
            for tp in self._costs.degrees(gpu)
            for count in sorted({1, *(shards if gpu in self._within else ())})
            if tp * count <= gpus and (degrees is None or tp in degrees)
        ]
        return tuple(sorted(found))

    def whole_s(self, unit: UnitType, micro_batch: int) -> float:
        """Seconds of a sample through all layers on one unit, memory aside."""
        key = unit.gpu, unit.tp, unit.shards, micro_batch
        if key not in self._whole_s:
            cost = self.cost(unit, 0, self.num_layers, micro_batch)
            self._whole_s[key] = (cost.forward_s + cost.backward_s) / micro_batch
        return self._whole_s[key]

    def cost(
        self, unit: UnitType, first: int, stop: int, micro_batch: int, *, recomputed: int = 0, offloaded: int = 0
    ) -> StageCost:
        """Costs of the layers from ``first`` to before ``stop`` on a unit, gathers of its shards among them."""
        sums = self._sums_of(unit, micro_batch)
        cost = sums.stage(first, stop, recomputed=recomputed, offloaded=offloaded)
        if unit.shards == 1:
            return cost
        within = self._within[unit.gpu]
        weights = sums.weights(first, stop)
        return with_gathers(cost, weights, self._costs, tp=unit.tp, shards=unit.shards, within=within)

    def fit(self, unit: UnitType, first: int, stop: int, micro_batch: int, in_flight: int) -> _Fitted | None:
        """The layers on a unit with as little recomputed, then offloaded, as its memory allows; None where nothing helps."""
        key = unit, self._alike[first][stop], micro_batch, in_flight
        if key not in self._fitted:
            self._fitted[key] = self._fit(unit, first, stop, micro_batch, in_flight)
        return self._fitted[key]

    def _fit(self, unit: UnitType, first: int, stop: int, micro_batch: int, in_flight: int) -> _Fitted | None:
        count, limit = stop - first, self._memory[unit.gpu]
        sums = self._sums_of(unit, micro_batch)

        def fits(recomputed: int, offloaded: int) -> bool:
            cost = sums.stage(first, stop, recomputed=recomputed, offloaded=offloaded)
            return memory_of(cost, self._costs, in_flight).peak_bytes <= limit

        def fitted(recomputed: int, offloaded: int) -> _Fitted:
            cost = self.cost(unit, first, stop, micro_batch, recomputed=recomputed, offloaded=offloaded)
            backward_s = cost.backward_s + cost.accumulate_s
            return _Fitted(
                num_layers=count,
                seconds=cost.forward_s + backward_s,
                backward_s=backward_s,
                recomputed=recomputed,
                offloaded=offloaded,
                params_bytes=cost.params_bytes * unit.num_gpus,
                update_s=cost.update_s,
            )

        if fits(0, 0):
            return fitted(0, 0)
        for offloaded in (0, *range(1, count + 1)) if self._costs.can_offload(unit.gpu) else (0,):
            if fits(count, offloaded):
                least = bisect.bisect_left(range(count + 1), True, key=lambda r: fits(r, offloaded))
                return fitted(least, offloaded)
        return None

    def _sums_of(self, unit: UnitType, micro_batch: int) -> StageSums:
        key = unit.gpu, unit.tp, micro_batch, unit.shards
        if key not in self._sums:
            self._sums[key] = self._costs.sums(*key)
        return self._sums[key]

    def hop_s(self, source: UnitType, target: UnitType, micro_batch: int, *, spread: bool) -> float:
        """Seconds of an activation from one unit to the next, gathered there, both ways the same."""
        num_bytes = self._costs.boundary_bytes(min(1, self.num_layers - 2), micro_batch)
        pairs = min(source.num_gpus, target.num_gpus)
        same = (source.gpu, source.zone) == (target.gpu, target.zone)
        if same and not spread and source.num_gpus + target.num_gpus <= source.node_gpus:
            seconds = self._within[source.gpu].seconds(num_bytes / pairs, pairs)
        else:
            link, sharing = self._link(source, target), max(pairs, source.node_gpus if spread else pairs)
            seconds = link.seconds(num_bytes / pairs, sharing)
        gathering = target if target.tp >= source.tp else source
        part, within = num_bytes / gathering.shards, self._within.get(gathering.gpu)
        return seconds + gather_time(part, gathering.tp, within, gathering.shards)

    def _link(self, source: UnitType, target: UnitType) -> Link:
        zones = source.zone, target.zone
        if zones[0] != zones[1] and zones in self._zones:
            return self._zones[zones]
        return self._between[source.gpu, target.gpu]

    def shape(self, units: Sequence[UnitType], micro_batch: int, *, spread: bool) -> Shape | None:
        """Units in this order with the layers that make the slowest stage fastest; None where they do not hold the model.

        ``spread``: neighbours are on different nodes, and all GPUs of a node send at once.
        """
        depth, count = len(units), self.num_layers
        hops = [self.hop_s(*pair, micro_batch, spread=spread) for pair in itertools.pairwise(units)]
        around = [2 * (before + after) for before, after in zip([0.0, *hops], [*hops, 0.0], strict=True)]

        def reach(place: int, first: int, slot_s: float) -> int:
            """One past the last layer that the stage can take within a slot."""
            most = count - (depth - 1 - place)

            def too_long(stop: int) -> bool:
                fitted = self.fit(units[place], first, stop, micro_batch, depth - place)
                return fitted is None or fitted.seconds + around[place] > slot_s

            stops = range(first + 1, most + 1)
            return first + bisect.bisect_left(stops, True, key=too_long)

        def cuts_at(slot_s: float) -> list[int] | None:
            cuts = [0]
            for place in range(depth):
                stop = reach(place, cuts[-1], slot_s)
                if stop == cuts[-1]:
                    return None
                cuts.append(stop)
            return cuts if cuts[-1] == count else None

        low = micro_batch / sum(1 / self.whole_s(unit, micro_batch) for unit in units)
        high = 1.1 * low + max(around)
        most = 3 * micro_batch * sum(self.whole_s(unit, micro_batch) for unit in units) + max(around)
        while (cuts := cuts_at(high)) is None:
            if high > most:
                return None
            low, high = high, 1.5 * high
        while high - low > _PRECISION * high:
            middle = (low + high) / 2
            found = cuts_at(middle)
            if found is None:
                low = middle
            else:
                high, cuts = middle, found
        return self.cut(units, cuts, micro_batch, spread=spread)

    def cut(self, units: Sequence[UnitType], cuts: Sequence[int], micro_batch: int, *, spread: bool) -> Shape | None:
        """The shape with given layers: stage ``s`` has those from ``cuts[s]`` to before ``cuts[s + 1]``."""
        depth = len(units)
        hops = [self.hop_s(*pair, micro_batch, spread=spread) for pair in itertools.pairwise(units)]
        stages, slots, fitted_stages, fill_s = [], [], [], 2 * sum(hops)
        around = [2 * (before + after) for before, after in zip([0.0, *hops], [*hops, 0.0], strict=True)]
        for place, unit in enumerate(units):
            fitted = self.fit(unit, cuts[place], cuts[place + 1], micro_batch, depth - place)
            if fitted is None:
                return None
            stages.append(
                ShapeStage(
                    unit=unit,
                    first=cuts[place],
                    last=cuts[place + 1] - 1,
                    recomputed=fitted.recomputed,
                    offloaded=fitted.offloaded,
                )
            )
            slots.append(fitted.seconds + around[place])
            fill_s += fitted.seconds
            fitted_stages.append(fitted)
        return Shape(
            stages=tuple(stages),
            micro_batch=micro_batch,
            spread=spread,
            fill_s=fill_s,
            slot_s=max(slots),
            after_s=max(fitted.update_s for fitted in fitted_stages)
            + self._reduce_s(units, fitted_stages, hops, spread=spread),
        )

    def _reduce_s(
        self, units: Sequence[UnitType], fitted: Sequence[_Fitted], hops: Sequence[float], *, spread: bool
    ) -> float:
        """Estimated seconds of gradient sums after the last backward, where other pipelines own the same layers on other nodes.

        A stage's sums begin in its last backward, a layer's after it has been there; where some are offloaded, after it. Those of
        the stages on one node share its port.
        """
        if len(self._cluster.nodes) == 1:
            return 0.0
        early_s = [0.0]
        """By stage, how long before the first one it ends its passes."""
        for stage, hop in zip(fitted, hops, strict=False):
            early_s.append(early_s[-1] + stage.backward_s + hop)
        longest_s = 0.0
        for place, unit in enumerate(units):
            link = self._between.get((unit.gpu, unit.gpu))
            if link is not None:
                here = range(place, min(len(units), place + (1 if spread else max(1, unit.node_gpus // unit.num_gpus))))
                num_bytes = [
                    2 * fitted[other].params_bytes * self._costs.gradient_bytes_per_byte for other in reversed(here)
                ]
                rate = link.bytes_per_s(sum(num_bytes) / unit.node_gpus, unit.node_gpus)
                end_s = -math.inf
                for other, count in zip(reversed(here), num_bytes, strict=True):
                    layer_s = count / rate / fitted[other].num_layers
                    within_s = 0.0 if fitted[other].offloaded else fitted[other].backward_s
                    first_s = early_s[other] + within_s * (1 - 1 / fitted[other].num_layers)
                    end_s = max(max(end_s, -first_s) + count / rate, layer_s - early_s[other])
                longest_s = max(longest_s, end_s)
        return longest_s


def shard_counts(cluster: Cluster, most: int | None = None) -> list[int]:
    """Numbers of shards to choose from: powers of two, and all GPUs of a node; at most so many."""
    sizes = {node.gpus for node in cluster.nodes}
    powers = {1 << power for power in range(max(sizes).bit_length())}
    return sorted(count for count in sizes | powers if 1 < count <= (most or max(sizes)))


def divided_evenly(units: Sequence[UnitType], sizes: Sequence[int]) -> list[int]:
    """Sizes of micro-batches that every unit's shards divide evenly: of some, and of as many samples of each shard."""
    shards = math.lcm(*(unit.shards for unit in units))
    return sorted({size for size in sizes if not size % shards} | {size * shards for size in sizes})


def orders(units: Sequence[UnitType], *, every_one: bool) -> Iterator[tuple[UnitType, ...]]:
    """Orders of units that are worth a try: those that keep units of a type together; ``every_one`` of up to five units."""
    if every_one and len(units) <= 5:
        yield from sorted(set(itertools.permutations(units)))
        return
    kinds = sorted(set(units))
    for permuted in itertools.permutations(kinds):
        yield tuple(unit for kind in permuted for unit in units if unit == kind)
