"""One search for a cluster's plan: shapes are made and counted, candidates simulated, and the best ones improved.

Enter what `solve.plan_cluster` is asked, and units of some types; leave simulated plans, and the bound of the program of counts.
`solve` explains all of it.
"""

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.memory import memory_of
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.planner.counts import Counts
from autohete_fx.cluster.planner.place import placed
from autohete_fx.cluster.planner.shapes import Shape, Shaper, UnitType, divided_evenly, orders
from autohete_fx.cluster.simulation.events import Sends
from autohete_fx.cluster.simulation.simulate import Timeline, simulate
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import ClusterError
from autohete_fx.ir.sizes import format_bytes

_MOST_STAGES = 16
_MOST_MIXED = 300
"""Shapes of several types that are made, best prospects first."""
_MOST_TYPES = 4
"""Up to so many types of GPU, all subsets are searched; of more, all of them, all but one, and each alone."""
_MOST_GRIDS = 4
"""How many grids of equal pipelines over a subset's types are simulated, and of each degree alone: few pipelines have small sums of
gradients, which the model leaves out."""
_FASTER = 0.985
"""A larger micro-batch must take at most so much of a sample's time."""
_SMALL = 8
"""On clusters of at most so many GPUs, units of a pipeline are tried in all orders."""
_ROUNDS = 40

Pipes = tuple[tuple[Shape, int], ...]
"""Pipelines: a shape and its micro-batches each."""


@dataclass(frozen=True, slots=True)
class Found:
    """A simulated plan, by the pipelines that it was placed from."""

    pipes: Pipes
    plan: ClusterPlan
    timeline: Timeline


class Search:
    """One call's state: shapes that were made, plans that were simulated."""

    def __init__(
        self,
        cluster: Cluster,
        costs: CostTable,
        global_batch: int,
        sizes: Sequence[int] | None,
        sends: Sends,
        deadline: float,
        degrees: Sequence[int] | None = None,
        shards: Sequence[int] = (),
    ) -> None:
        self.cluster, self.costs, self.global_batch, self.sends = cluster, costs, global_batch, sends
        self._deadline, self._links = deadline, Links(cluster)
        self._asked = sizes, degrees, shards
        self.shaper = Shaper(cluster, costs)
        known = {row.micro_batch for row in costs.times}
        self.sizes = tuple(
            sorted(size for size in sizes or known if size <= min(global_batch, 16 if sizes is None else size))
        )
        if not self.sizes:
            raise ClusterError(
                f"micro-batches of {sorted(sizes or known)} samples were given for a global batch of {global_batch}. Expected"
                " was one of"
                " at most the global batch. Give a larger batch, or smaller micro-batches"
            )
        self._counts: dict[tuple[str, str], int] = {}
        for node in cluster.nodes:
            kind = node.gpu, node.zone
            self._counts[kind] = self._counts.get(kind, 0) + node.gpus
        self.known = self.shaper.unit_types(degrees, shards)
        self._units = {
            unit: cluster.units(unit.gpu, unit.zone, unit.num_gpus) for unit in self.known
        }  # fewer than all GPUs over a unit's where nodes have a rest
        self.found: list[Found] = []
        self._worth_taking: dict[UnitType, tuple[int, ...]] = {}
        self._seen: dict[Pipes, Found | None] = {}
        self.num_shapes = self.num_simulated = 0
        self.first_at = math.inf

    def run(self, units: Sequence[UnitType]) -> float:
        """Simulate the candidates of these units; returns the bound of the model's step."""
        alike = list(self._alike(units))
        every = tuple(sorted({(unit.gpu, unit.zone) for unit in units}))
        shapes = [*alike, *self._mixed(units, alike, every)]
        self.num_shapes += len(shapes)
        bound_s = math.inf
        for types in _subsets(every):
            usable = [shape for shape in shapes if set(shape.gpus()) <= set(types)]
            master = self._counting(types, units)
            low_s, chosen = master.fastest(usable)
            bound_s = min(bound_s, low_s) if chosen else bound_s
            self._try_counts(chosen)
            grids = sorted(
                self._grids(units, types),
                key=lambda row: row[0].seconds_of(-(-self.global_batch // (row[0].micro_batch * row[1]))),
            )
            for row in grids[:_MOST_GRIDS] + [row for rows in _by_degree(grids) for row in rows[:_MOST_GRIDS]]:
                self._try_counts([row])
        alone = sorted(
            (shape for shape in shapes if not self.global_batch % shape.micro_batch),
            key=lambda shape: shape.seconds_of(self.global_batch // shape.micro_batch),
        )
        for shape in alone[:4]:
            self._try(self._shared((shape,)))
        return bound_s

    def _counting(self, kinds: Sequence[tuple[str, str]], units: Sequence[UnitType]) -> Counts:
        """The program of counts over some types of GPU, for such units."""
        rooms, mosts = {}, {}
        for kind in sorted(kinds):
            sizes = sorted({unit.num_gpus for unit in units if (unit.gpu, unit.zone) == kind})
            nodes = Counter(node.gpus for node in self.cluster.nodes if (node.gpu, node.zone) == kind)
            for index, least in enumerate(sizes):
                room = sum(number * _room(gpus, sizes[index:]) for gpus, number in nodes.items())
                most = sum(number * (gpus // least) for gpus, number in nodes.items())
                if room < self._counts[kind]:
                    rooms[kind, least] = room
                if room >= (most + 1) * least:
                    mosts[kind, least] = most
        return Counts({kind: self._counts[kind] for kind in kinds}, self.global_batch, rooms, mosts)

    def _alike(self, units: Sequence[UnitType]) -> Iterator[Shape]:
        """Shapes of one type of unit."""
        for unit in units:
            most = min(self._units[unit], self.shaper.num_layers, _MOST_STAGES)
            for depth, size in itertools.product(_depths(most), self._sizes_for(unit)):
                if depth * size > self.global_batch:
                    continue
                for spread in (False, True) if depth > 1 else (False,):
                    shape = self.shaper.shape((unit,) * depth, size, spread=spread)
                    if shape is not None:
                        yield shape

    def _sizes_for(self, unit: UnitType) -> tuple[int, ...]:
        """Sizes of micro-batches that make samples faster there than smaller ones do."""
        if unit not in self._worth_taking:
            taken: list[int] = []
            for size in divided_evenly((unit,), self.sizes):
                if not taken or self.shaper.whole_s(unit, size) < _FASTER * self.shaper.whole_s(unit, taken[-1]):
                    taken.append(size)
            self._worth_taking[unit] = tuple(taken)
        return self._worth_taking[unit]

    def _mixed(
        self, units: Sequence[UnitType], alike: Sequence[Shape], every: Sequence[tuple[str, str]]
    ) -> list[Shape]:
        """Shapes of two or three types of unit that may beat the same GPUs apart."""
        seconds = self._seconds_of_alike(units, alike)
        worth: dict[tuple[str, str], float] = dict.fromkeys(every, 0.0)
        for shape in alike:
            ((kind, count),) = shape.gpus().items()
            worth[kind] = max(worth[kind], shape.micro_batch * shape.micro_batches_in(seconds) / count)
        prospects = []
        for kinds in itertools.chain(itertools.combinations(units, 2), itertools.combinations(units, 3)):
            if len(kinds) == 3 and (
                len({(unit.gpu, unit.zone) for unit in kinds}) == 1 or any(unit.shards > 1 for unit in kinds)
            ):
                continue
            for numbers in self._numbers(kinds):
                price = sum(worth[u.gpu, u.zone] * u.num_gpus * n for u, n in zip(kinds, numbers, strict=True))
                for size in sorted({size for unit in kinds for size in self._sizes_for(unit)}):
                    if sum(numbers) * size > self.global_batch or any(size % unit.shards for unit in kinds):
                        continue
                    rate = sum(n / self.shaper.whole_s(u, size) for u, n in zip(kinds, numbers, strict=True))
                    samples = seconds * rate - (sum(numbers) - 1) * size  # slots that are equal, less the bubble
                    gain = samples / price if price else math.inf
                    if gain > 1.0:
                        prospects.append((-gain, sum(numbers), size, kinds, numbers))
        prospects.sort(key=lambda row: row[:3])
        small = sum(self._counts.values()) <= _SMALL
        made = []
        for _, _, size, kinds, numbers in prospects[:_MOST_MIXED]:
            members = [u for u, n in zip(kinds, numbers, strict=True) for _ in range(n)]
            made.extend(self._ordered(members, size, every_one=small))
        return made

    def _ordered(self, members: Sequence[UnitType], size: int, *, every_one: bool) -> Iterator[Shape]:
        """Units in their best order, packed and spread."""
        for spread in (False, True):
            found = [self.shaper.shape(order, size, spread=spread) for order in orders(members, every_one=every_one)]
            best = [shape for shape in found if shape is not None]
            if best:
                yield min(best, key=lambda shape: shape.slot_s)

    def _grids(self, units: Sequence[UnitType], types: Sequence[tuple[str, str]]) -> Iterator[tuple[Shape, int]]:
        """Equal pipelines that together take all GPUs of some types, with their number."""
        by_type = [[unit for unit in units if (unit.gpu, unit.zone) == kind] for kind in types]
        for kinds in itertools.product(*by_type):
            if len({unit.shards for unit in kinds}) > 1:
                continue
            totals = [self._units[unit] for unit in kinds]
            for width in range(1, min(totals) + 1):
                if any(total % width for total in totals) or sum(totals) // width > self.shaper.num_layers:
                    continue
                members = [u for u, total in zip(kinds, totals, strict=True) for _ in range(total // width)]
                for size in sorted({size for unit in kinds for size in self._sizes_for(unit)}):
                    if len(members) * size * width <= self.global_batch:
                        for shape in self._ordered(members, size, every_one=False):
                            yield shape, width

    def _numbers(self, kinds: Sequence[UnitType]) -> Iterator[tuple[int, ...]]:
        limits = [min(self._units[unit], _MOST_STAGES) for unit in kinds]
        for numbers in itertools.product(*(range(1, limit + 1) for limit in limits)):
            if sum(numbers) <= min(_MOST_STAGES if len(kinds) == 2 else 6, self.shaper.num_layers):
                yield numbers

    def _seconds_of_alike(self, units: Sequence[UnitType], alike: Sequence[Shape]) -> float:
        """A step of shapes of one type each."""
        if not alike:
            return 1.0
        low_s, chosen = self._counting(tuple(self._counts), units).fastest(alike)
        self._try_counts(chosen)  # a plan is there before mixed shapes are made
        return max(low_s, min((shape.seconds_of(1) for shape, _ in chosen), default=1.0))

    def _try_counts(self, chosen: Sequence[tuple[Shape, int]]) -> None:
        """Simulate these pipelines, the fastest of them where the batch has too few samples for all."""
        shapes = sorted((shape for shape, n in chosen for _ in range(n)), key=lambda shape: shape.seconds_of(1))
        while sum(shape.micro_batch * len(shape.stages) for shape in shapes) > self.global_batch:
            shapes.pop()
        if shapes:
            self._try(self._shared(shapes))

    def _shared(self, shapes: Sequence[Shape]) -> Pipes | None:
        """The batch shared out so that the last pipeline ends earliest; each gets at least as many micro-batches as stages."""
        counts = [len(shape.stages) for shape in shapes]
        left = self.global_batch - sum(shape.micro_batch * count for shape, count in zip(shapes, counts, strict=True))
        heap = [(shape.seconds_of(counts[index] + 1), index) for index, shape in enumerate(shapes)]
        heapq.heapify(heap)
        while left > 0 and heap:
            _, index = heapq.heappop(heap)
            if shapes[index].micro_batch > left:
                continue
            counts[index] += 1
            left -= shapes[index].micro_batch
            heapq.heappush(heap, (shapes[index].seconds_of(counts[index] + 1), index))
        return tuple(zip(shapes, counts, strict=True)) if left == 0 else None

    def _try(self, pipes: Pipes | None) -> Found | None:
        """Simulate pipelines; None where their units do not fit the nodes."""
        if not pipes:
            return None
        if pipes not in self._seen:
            plan = placed(self.cluster, pipes, model=self.costs.model)
            found = None
            if plan is not None:
                timeline = simulate(plan, self.cluster, self.costs, sends=self.sends, links=self._links)
                found = Found(pipes, plan, timeline)
                self.found.append(found)
                self.first_at = min(self.first_at, time.monotonic())
                self.num_simulated += 1
            self._seen[pipes] = found
        return self._seen[pipes]

    def allows(self, plan: ClusterPlan, units: Sequence[UnitType]) -> bool:
        """Whether a plan has sizes and degrees that were asked for."""
        degrees = {(unit.gpu, unit.tp) for unit in units}
        return all(pipeline.micro_batch in self.sizes for pipeline in plan.pipelines) and all(
            (stage.gpu, stage.tp) in degrees for _, _, stage in plan.stages()
        )

    def best(self) -> tuple[ClusterPlan, Timeline]:
        """The fastest of what the best plans simulated so far become, those with shards among them."""
        self.found.sort(key=lambda found: found.timeline.iteration_s)
        sharded = [found for found in self.found if found.plan.has_shards]
        starts = {id(found): found for found in (*self.found[:3], *sharded[:3])}
        best = min(map(self._improved, starts.values()), key=lambda found: found.timeline.iteration_s)
        return best.plan, best.timeline

    def of(self, cluster: Cluster) -> "Search":
        """A search for the same on other nodes."""
        sizes, degrees, shards = self._asked
        return Search(cluster, self.costs, self.global_batch, sizes, self.sends, self._deadline, degrees, shards)

    def take(self, other: "Search") -> None:
        """Add to its own plans what another search has found on some of the nodes."""
        self.found += other.found
        self.num_shapes += other.num_shapes
        self.num_simulated += other.num_simulated
        self.first_at = min(self.first_at, other.first_at)

    def _improved(self, found: Found) -> Found:
        for _ in range(_ROUNDS):
            better = next(
                (
                    tried
                    for pipes in self._neighbours(found)
                    if time.monotonic() < self._deadline
                    and (tried := self._try(pipes)) is not None
                    and tried.timeline.iteration_s < found.timeline.iteration_s * (1 - 1e-4)
                ),
                None,
            )
            if better is None:
                return found
            found = better
        return found

    def _neighbours(self, found: Found) -> Iterator[Pipes]:
        """Pipelines that differ by a layer, a few micro-batches, or a pipeline less; what is likely to help first."""
        ends = [0.0] * len(found.pipes)
        for unit in found.timeline.units:
            ends[unit.pipeline] = max(ends[unit.pipeline], unit.backward_end_s)
        early, late = min(range(len(ends)), key=ends.__getitem__), max(range(len(ends)), key=ends.__getitem__)
        (shape, count), (other, number) = found.pipes[late], found.pipes[early]
        if early != late and shape.micro_batch == other.micro_batch:
            for moved in (4, 2, 1):
                if count - moved >= len(shape.stages):
                    changed = dict(enumerate(found.pipes))
                    changed[late], changed[early] = (shape, count - moved), (other, number + moved)
                    yield tuple(changed.values())
        for kind in dict.fromkeys(shape for shape, _ in found.pipes):
            if len(kind.stages) > 1:
                other = replace(kind, spread=not kind.spread)
                yield tuple((other if shape == kind else shape, count) for shape, count in found.pipes)
            for recut in self._recut(kind):
                yield tuple((recut if shape == kind else shape, count) for shape, count in found.pipes)
        for index in (late, early):
            rest = [shape for place, (shape, _) in enumerate(found.pipes) if place != index]
            pipes = self._shared(rest) if rest else None
            if pipes:
                yield pipes

    def _recut(self, shape: Shape) -> Iterator[Shape]:
        """The shape with one or two layers moved over one of its boundaries."""
        units = [stage.unit for stage in shape.stages]
        cuts = [0, *(stage.last + 1 for stage in shape.stages)]
        size = shape.micro_batch
        for place, step in itertools.product(range(1, len(units)), (1, -1, 2, -2)):
            moved = [*cuts[:place], cuts[place] + step, *cuts[place + 1 :]]
            if moved[place - 1] < moved[place] < moved[place + 1]:
                found = self.shaper.cut(units, moved, size, spread=shape.spread)
                if found is not None:
                    yield found

    def why_nothing(self, units: Sequence[UnitType]) -> str:
        """An error's text, with what the model's states take and the GPUs have."""
        unit = units[0]
        whole = self.costs.sums(unit.gpu, unit.tp, self.sizes[0]).stage(0, self.shaper.num_layers)
        states_bytes = memory_of(whole, self.costs, 0).states_bytes * unit.tp
        has_bytes = sum(count * self.cluster.gpu(gpu).memory_bytes for (gpu, _), count in self._counts.items())
        types = ", ".join(f"{count} x {gpu}" for (gpu, _), count in sorted(self._counts.items()))
        shares = ", and shards equal parts of it" if any(unit.shards > 1 for unit in units) else ""
        return (
            f"{self.costs.model} does not fit on {types}, with every layer recomputed. Expected was a pipeline of these GPUs"
            " that holds"
            f" the model and {self.global_batch} samples a step: its weights, gradients and optimizer states take"
            f" {format_bytes(states_bytes)}, and these GPUs have {format_bytes(has_bytes)}. Add GPUs or nodes, or"
            f" give a larger batch (a pipeline takes a micro-batch for each stage{shares}), shorter samples, or more GPUs a unit"
        )


def _room(gpus: int, sizes: Sequence[int]) -> int:
    """The most GPUs of a node that units of these sizes take together."""
    sums = {0}
    for total in range(1, gpus + 1):
        if any(total - size in sums for size in sizes):
            sums.add(total)
    return max(sums)


def _by_degree(grids: Sequence[tuple[Shape, int]]) -> list[list[tuple[Shape, int]]]:
    """Those that have one degree of tensor parallelism alone, of each degree."""
    found: dict[int, list[tuple[Shape, int]]] = {}
    for shape, width in grids:
        degree, *others = {stage.unit.tp for stage in shape.stages}
        if not others:
            found.setdefault(degree, []).append((shape, width))
    return list(found.values())


def _depths(most: int) -> list[int]:
    """Depths to try up to the most that there can be: every one of few, some of many."""
    return [depth for depth in range(1, most + 1) if depth <= 8 or not depth % 4]


def _subsets(kinds: Sequence[tuple[str, str]]) -> list[tuple[tuple[str, str], ...]]:
    """Subsets of types, larger ones first."""
    if len(kinds) <= _MOST_TYPES:
        return [sub for size in range(len(kinds), 0, -1) for sub in itertools.combinations(kinds, size)]
    return [tuple(kinds), *itertools.combinations(kinds, len(kinds) - 1), *((kind,) for kind in kinds)]
