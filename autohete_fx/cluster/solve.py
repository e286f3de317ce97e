"""The fastest plan for a cluster: which shapes of pipelines, how many of each, and how many micro-batches each takes.

Enter a `Cluster`, a `CostTable` and a global batch; leaves a `Solution`. For a step of ``T`` seconds a shape ``c`` finishes
``k_c(T)`` micro-batches of ``b_c`` samples (`Shape.micro_batches_in`). The plan is then an integer program over counts of
shapes:

    maximise   sum_c b_c k_c(T) n_c                      samples
    subject to sum_c g_c,t n_c <= G_t      for each type t of GPU: as many as there are, idle ones allowed
               n_c >= 0, integer

The least ``T`` whose optimum reaches the global batch is the model's best step (`_Master`). Pipelines that are alike are one
variable, so there is nothing symmetric to search. CP-SAT solves it for hundreds of GPUs in milliseconds. An optimum below the
global batch proves that no plan of these shapes takes ``T`` seconds. Shapes of one type of unit are all made. Shapes of several
types are priced by the samples that their GPUs give alone, and made where even a perfect balance would beat that. The search
runs for each subset of the types, too. Gradients of a type with a slow port may cost more than its GPUs give.

The model's time leaves out what only events show: shared ports, exact sums of gradients, stages that wait. All candidates are
therefore simulated (`place` puts units on nodes), and the best ones improved under the simulator. Layers move between
neighbours, micro-batches between pipelines, pipelines leave. The best grid in proportion to speed is a candidate, too.
"""

import contextlib
import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ortools.sat.python import cp_model

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.grids import proportional_grid
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.moving import Moving, nearest
from autohete_fx.cluster.place import placed
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.shapes import Shape, Shaper, UnitType, orders
from autohete_fx.cluster.simulate import Sends, Timeline, simulate
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import ClusterError

_MOST_STAGES = 16
_MOST_MIXED = 300
"""Shapes of several types that are made, best prospects first."""
_MOST_TYPES = 4
"""Up to so many types of GPU, all subsets are searched; of more, all of them, all but one, and each alone."""
_MOST_GRIDS = 4
"""How many grids of equal pipelines over a subset's types are simulated."""
_FASTER = 0.985
"""A larger micro-batch must take at most so much of a sample's time."""
_SMALL = 8
"""On clusters of at most so many GPUs, units of a pipeline are tried in all orders."""
_ROUNDS = 40
_PRECISION = 2e-3
"""The share of a step's seconds at which the search for the least ends."""

Pipes = tuple[tuple[Shape, int], ...]
"""Pipelines: a shape and its micro-batches each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best plan that was found.

    Attributes:
        plan: with its simulated step.
        timeline: of that step.
        model_bound_s: as the integer program counts, without shared ports and waits, no plan of the shapes that were made is
            faster.
        compute_bound_s: all GPUs at work all the time on whole models.
        num_shapes: that were made.
        num_simulated: plans that were simulated.
        solve_s: seconds that it took.
        moves: why a slower plan was taken that moves less; "" where none was.
    """

    plan: ClusterPlan
    timeline: Timeline
    model_bound_s: float
    compute_bound_s: float
    num_shapes: int
    num_simulated: int
    solve_s: float
    moves: str = ""


def plan_cluster(
    cluster: Cluster,
    costs: CostTable,
    *,
    global_batch: int,
    micro_batches: Sequence[int] | None = None,
    degrees: Sequence[int] | None = None,
    symmetric_tp: bool = False,
    sends: Sends = Sends.BLOCKING,
    time_limit_s: float = 30.0,
    moving: Moving | None = None,
) -> Solution:
    """The fastest plan of a step over ``global_batch`` samples.

    Args:
        micro_batches: sizes to choose from; by default those that costs have, up to 16.
        degrees: of tensor parallelism to choose from; by default those that costs have.
        symmetric_tp: all pipelines have one degree, as in AutoHet's paper.
        moving: what nodes have of the states, and how long they are expected to stay; None: the fastest step is best.
        time_limit_s: improving stops then; what comes before it does not wait for the clock, and is the same for equal inputs.

    Raises:
        ClusterError: nothing fits.
    """
    began = time.monotonic()
    search = _Search(cluster, costs, global_batch, micro_batches, sends, began + time_limit_s)
    known = search.shaper.unit_types(degrees)
    if not known:
        raise ClusterError(
            f"there are no costs of {costs.model} on any GPU of the cluster, {sorted({node.gpu for node in cluster.nodes})}."
            " Expected was"
            " at least one. Measure or price it there"
        )
    groups = [[u for u in known if u.tp == tp] for tp in sorted({u.tp for u in known})] if symmetric_tp else [known]
    bounds = [search.run(tuple(units)) for units in groups]
    if not search.found:
        raise ClusterError(search.why_nothing(known))
    plan, timeline = search.best(improve=True)
    hint = proportional_grid(cluster, costs, global_batch)
    if hint and hint.iteration_s < timeline.iteration_s and search.allows(hint, known):
        plan, timeline = replace(hint, planner=plan.planner), simulate(hint, cluster, costs, sends=sends)
    plan, moves = replace(plan, iteration_s=timeline.iteration_s), ""
    if moving is not None:
        others = [replace(found.plan, iteration_s=found.timeline.iteration_s) for found in search.found]
        keeping = tuple(node for node in cluster.nodes if moving.held.get(node.name))
        if 0 < len(keeping) < len(cluster.nodes):
            with contextlib.suppress(ClusterError):  # raised where these alone do not hold the model
                others.append(
                    plan_cluster(
                        replace(cluster, nodes=keeping),
                        costs,
                        global_batch=global_batch,
                        micro_batches=micro_batches,
                        degrees=degrees,
                        symmetric_tp=symmetric_tp,
                        sends=sends,
                        time_limit_s=time_limit_s / 2,
                    ).plan
                )
        chosen = nearest([plan, *others], cluster, costs, moving)
        plan, moves = chosen.plan, chosen.line
        timeline = simulate(plan, cluster, costs, sends=sends)
    return Solution(
        plan=plan,
        timeline=timeline,
        model_bound_s=min(bounds),
        compute_bound_s=compute_bound(cluster, costs, search.shaper, known, global_batch, search.sizes),
        num_shapes=search.num_shapes,
        num_simulated=search.num_simulated,
        solve_s=time.monotonic() - began,
        moves=moves,
    )


def compute_bound(
    cluster: Cluster,
    costs: CostTable,
    shaper: Shaper,
    units: Sequence[UnitType],
    global_batch: int,
    sizes: Sequence[int],
) -> float:
    """Seconds in which all GPUs take the batch through whole models, memory, network and bubbles aside."""
    rate = 0.0
    for node in cluster.nodes:
        fits = [unit for unit in units if (unit.gpu, unit.zone) == (node.gpu, node.zone)]
        if fits:
            rate += node.gpus * max(1 / (shaper.whole_s(unit, size) * unit.tp) for unit in fits for size in sizes)
    return global_batch / rate


class _Master:
    """The integer program over counts of shapes."""

    def __init__(self, counts: dict[tuple[str, str], int], global_batch: int) -> None:
        self._counts, self._batch = counts, global_batch
        self.bound_s = 0.0

    def most(self, shapes: Sequence[Shape], seconds: float) -> tuple[float, list[tuple[Shape, int]]]:
        """A bound on the samples of a step of so many seconds, and shapes with counts that come near it."""
        values = [shape.micro_batch * shape.micro_batches_in(seconds) for shape in shapes]
        useful = _undominated([(shape, value) for shape, value in zip(shapes, values, strict=True) if value])
        if not useful:
            return 0.0, []
        model = cp_model.CpModel()
        numbers = []
        for shape, _ in useful:
            most = min(self._counts.get(kind, 0) // count for kind, count in shape.gpus().items())
            numbers.append(model.new_int_var(0, most, ""))
        for kind, count in self._counts.items():
            model.add(
                sum(shape.gpus().get(kind, 0) * n for (shape, _), n in zip(useful, numbers, strict=True)) <= count
            )
        model.maximize(sum(value * n for (_, value), n in zip(useful, numbers, strict=True)))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = 2.0
        solver.parameters.relative_gap_limit = 1e-4
        status = solver.solve(model)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        chosen = [(shape, solver.value(n)) for (shape, _), n in zip(useful, numbers, strict=True) if solver.value(n)]
        return solver.best_objective_bound, chosen

    def fastest(self, shapes: Sequence[Shape]) -> tuple[float, list[tuple[Shape, int]]]:
        """The least seconds that are not proven too few, and shapes for the least that are enough. Empty where none are."""
        slowest = max((shape.seconds_of(self._batch) for shape in shapes), default=0.0)
        low, high, best = 0.0, slowest, []
        while high - low > _PRECISION * high:
            middle = math.sqrt(low * high) if low > 0.01 * high else (low + high) / 2
            bound, chosen = self.most(shapes, middle)
            if sum(n * shape.micro_batch * shape.micro_batches_in(middle) for shape, n in chosen) >= self._batch:
                high, best = middle, chosen
            elif bound < self._batch:
                low = middle
            else:
                break  # neither proven nor found in its deterministic time: what is known stands
        if not best:
            best = self.most(shapes, high)[1]
        return low, best


def _undominated(valued: list[tuple[Shape, int]]) -> list[tuple[Shape, int]]:
    """Of shapes with the same GPUs, the one of most samples."""
    best: dict[tuple[tuple[tuple[str, str], int], ...], tuple[Shape, int]] = {}
    for shape, value in valued:
        key = tuple(sorted(shape.gpus().items()))
        if key not in best or value > best[key][1]:
            best[key] = shape, value
    return list(best.values())


@dataclass(frozen=True, slots=True)
class _Found:
    """A simulated plan, by the pipelines that it was placed from."""

    pipes: Pipes
    plan: ClusterPlan
    timeline: Timeline


class _Search:
    """One call's state: shapes that were made, plans that were simulated."""

    def __init__(
        self,
        cluster: Cluster,
        costs: CostTable,
        global_batch: int,
        sizes: Sequence[int] | None,
        sends: Sends,
        deadline: float,
    ) -> None:
        self._cluster, self._costs, self._sends, self._deadline = cluster, costs, sends, deadline
        self._batch, self._links = global_batch, Links(cluster)
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
        self.found: list[_Found] = []
        self._worth_taking: dict[UnitType, tuple[int, ...]] = {}
        self._seen: dict[Pipes, _Found | None] = {}
        self.num_shapes = self.num_simulated = 0

    def run(self, units: tuple[UnitType, ...]) -> float:
        """Simulate the candidates of these units; returns the bound of the model's step."""
        alike = list(self._alike(units))
        every = tuple(sorted({(unit.gpu, unit.zone) for unit in units}))
        shapes = [*alike, *self._mixed(units, alike, every)]
        self.num_shapes += len(shapes)
        bound_s = math.inf
        for types in _subsets(every):
            usable = [shape for shape in shapes if set(shape.gpus()) <= set(types)]
            master = _Master({kind: self._counts[kind] for kind in types}, self._batch)
            low_s, chosen = master.fastest(usable)
            bound_s = min(bound_s, low_s) if chosen else bound_s
            self._try_counts(chosen)
            grids = sorted(
                self._grids(units, types),
                key=lambda row: row[0].seconds_of(-(-self._batch // (row[0].micro_batch * row[1]))),
            )
            for shape, width in grids[:_MOST_GRIDS]:
                self._try_counts([(shape, width)])
        alone = sorted(
            (shape for shape in shapes if not self._batch % shape.micro_batch),
            key=lambda shape: shape.seconds_of(self._batch // shape.micro_batch),
        )
        for shape in alone[:4]:
            self._try(self._shared((shape,)))
        return bound_s

    def _alike(self, units: Sequence[UnitType]) -> Iterator[Shape]:
        """Shapes of one type of unit."""
        for unit in units:
            most = min(self._counts[unit.gpu, unit.zone] // unit.tp, self.shaper.num_layers, _MOST_STAGES)
            for depth, size in itertools.product(_depths(most), self._sizes_for(unit)):
                if depth * size > self._batch:
                    continue
                for spread in (False, True) if depth > 1 else (False,):
                    shape = self.shaper.shape((unit,) * depth, size, spread=spread)
                    if shape is not None:
                        yield shape

    def _sizes_for(self, unit: UnitType) -> tuple[int, ...]:
        """Sizes of micro-batches that make samples faster there than smaller ones do."""
        if unit not in self._worth_taking:
            taken: list[int] = []
            for size in self.sizes:
                if not taken or self.shaper.whole_s(unit, size) < _FASTER * self.shaper.whole_s(unit, taken[-1]):
                    taken.append(size)
            self._worth_taking[unit] = tuple(taken)
        return self._worth_taking[unit]

    def _mixed(
        self, units: Sequence[UnitType], alike: Sequence[Shape], every: Sequence[tuple[str, str]]
    ) -> list[Shape]:
        """Shapes of two or three types of unit that may beat the same GPUs apart."""
        seconds = self._seconds_of_alike(alike)
        worth: dict[tuple[str, str], float] = dict.fromkeys(every, 0.0)
        for shape in alike:
            ((kind, count),) = shape.gpus().items()
            worth[kind] = max(worth[kind], shape.micro_batch * shape.micro_batches_in(seconds) / count)
        prospects = []
        for kinds in itertools.chain(itertools.combinations(units, 2), itertools.combinations(units, 3)):
            if len({(unit.gpu, unit.zone) for unit in kinds}) == 1 and len(units) > 2 and len(kinds) == 3:
                continue
            for numbers in self._numbers(kinds):
                price = sum(worth[u.gpu, u.zone] * u.tp * n for u, n in zip(kinds, numbers, strict=True))
                for size in sorted({size for unit in kinds for size in self._sizes_for(unit)}):
                    if sum(numbers) * size > self._batch:
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
            totals = [self._counts[u.gpu, u.zone] // u.tp for u in kinds]
            for width in range(1, min(totals) + 1):
                if any(total % width for total in totals) or sum(totals) // width > self.shaper.num_layers:
                    continue
                members = [u for u, total in zip(kinds, totals, strict=True) for _ in range(total // width)]
                for size in sorted({size for unit in kinds for size in self._sizes_for(unit)}):
                    if len(members) * size * width <= self._batch:
                        for shape in self._ordered(members, size, every_one=False):
                            yield shape, width

    def _numbers(self, kinds: Sequence[UnitType]) -> Iterator[tuple[int, ...]]:
        limits = [min(self._counts[u.gpu, u.zone] // u.tp, _MOST_STAGES) for u in kinds]
        for numbers in itertools.product(*(range(1, limit + 1) for limit in limits)):
            if sum(numbers) <= min(_MOST_STAGES if len(kinds) == 2 else 6, self.shaper.num_layers):
                yield numbers

    def _seconds_of_alike(self, alike: Sequence[Shape]) -> float:
        """A step of shapes of one type each."""
        if not alike:
            return 1.0
        low_s, chosen = _Master(self._counts, self._batch).fastest(alike)
        return max(low_s, min((shape.seconds_of(1) for shape, _ in chosen), default=1.0))

    def _try_counts(self, chosen: Sequence[tuple[Shape, int]]) -> None:
        if chosen:
            self._try(self._shared([shape for shape, n in chosen for _ in range(n)]))

    def _shared(self, shapes: Sequence[Shape]) -> Pipes | None:
        """The batch shared out so that the last pipeline ends earliest; each gets at least as many micro-batches as stages."""
        counts = [len(shape.stages) for shape in shapes]
        left = self._batch - sum(shape.micro_batch * count for shape, count in zip(shapes, counts, strict=True))
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

    def _try(self, pipes: Pipes | None) -> _Found | None:
        """Simulate pipelines; None where their units do not fit the nodes."""
        if not pipes:
            return None
        if pipes not in self._seen:
            plan = placed(self._cluster, pipes, model=self._costs.model)
            found = None
            if plan is not None:
                timeline = simulate(plan, self._cluster, self._costs, sends=self._sends, links=self._links)
                found = _Found(pipes, plan, timeline)
                self.found.append(found)
                self.num_simulated += 1
            self._seen[pipes] = found
        return self._seen[pipes]

    def allows(self, plan: ClusterPlan, units: Sequence[UnitType]) -> bool:
        """Whether a plan has sizes and degrees that were asked for."""
        degrees = {(unit.gpu, unit.tp) for unit in units}
        return all(pipeline.micro_batch in self.sizes for pipeline in plan.pipelines) and all(
            (stage.gpu, stage.tp) in degrees for _, _, stage in plan.stages()
        )

    def best(self, *, improve: bool) -> tuple[ClusterPlan, Timeline]:
        """The fastest plan simulated so far, or what it becomes."""
        self.found.sort(key=lambda found: found.timeline.iteration_s)
        started = [self._improved(found) for found in self.found[:3]] if improve else self.found[:1]
        best = min(started, key=lambda found: found.timeline.iteration_s)
        return best.plan, best.timeline

    def _improved(self, found: _Found) -> _Found:
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

    def _neighbours(self, found: _Found) -> Iterator[Pipes]:
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
        """An error's text: the least memory with which some GPU could take part."""
        types = ", ".join(f"{count} x {gpu}" for (gpu, _), count in sorted(self._counts.items()))
        return (
            f"{self._costs.model} does not fit on {types}, with every layer recomputed. Expected was a pipeline of these GPUs"
            " that holds"
            f" the model and {self._batch} samples a step. Add GPUs or nodes, take smaller micro-batches, or allow higher"
            " degrees of tensor"
            " parallelism"
        )


def _depths(most: int) -> list[int]:
    """Depths to try up to the most that there can be: every one of few, some of many."""
    return [depth for depth in range(1, most + 1) if depth <= 8 or not depth % 4]


def _subsets(kinds: Sequence[tuple[str, str]]) -> list[tuple[tuple[str, str], ...]]:
    """Subsets of types, larger ones first."""
    if len(kinds) <= _MOST_TYPES:
        return [sub for size in range(len(kinds), 0, -1) for sub in itertools.combinations(kinds, size)]
    return [tuple(kinds), *itertools.combinations(kinds, len(kinds) - 1), *((kind,) for kind in kinds)]
