"""The fastest plan for a cluster: which shapes of pipelines, how many of each, and how many micro-batches each takes.

Enter a `Cluster`, a `CostTable` and a global batch; leaves a `Solution`. For a step of ``T`` seconds a shape ``c`` finishes
``k_c(T)`` micro-batches of ``b_c`` samples (`Shape.micro_batches_in`). The plan is then an integer program over counts of
shapes:

    maximise   sum_c b_c k_c(T) n_c                      samples
    subject to sum_c g_c,t n_c <= G_t      for each type t of GPU: as many as there are, idle ones allowed
               n_c >= 0, integer

The least ``T`` whose optimum reaches the global batch is the model's best step (`counts`). Pipelines that are alike are one
variable, so there is nothing symmetric to search. CP-SAT solves it for hundreds of GPUs in milliseconds. An optimum below the
global batch proves that no plan of these shapes takes ``T`` seconds. Shapes of one type of unit are all made. Shapes of several
types are priced by the samples that their GPUs give alone, and made where even a perfect balance would beat that. The search
runs for each subset of the types, too. Gradients of a type with a slow port may cost more than its GPUs give. Plans of units that
hold shards come after all others: they can only add to these.

The model's time leaves out what only events show: shared ports, exact sums of gradients, stages that wait. All candidates are
therefore simulated (`place` puts units on nodes), and the best ones improved under the simulator. Layers move between
neighbours, micro-batches between pipelines, pipelines leave. The best grid in proportion to speed is a candidate, too. On clusters
of a few GPUs every plan is a candidate (`every`), and on larger ones every plan of some of their nodes. Nodes of a kind
that have one number of GPUs are searched without those that have another, too. Gradients between nodes take longer.
"""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.planner.every import MOST_UNITS, MOST_WORK, Every
from autohete_fx.cluster.planner.grids import proportional_grid
from autohete_fx.cluster.planner.moving import Moving, Nearest, nearest
from autohete_fx.cluster.planner.search import Search
from autohete_fx.cluster.planner.shapes import Shaper, UnitType
from autohete_fx.cluster.simulation.events import Sends
from autohete_fx.cluster.simulation.simulate import Timeline, simulate
from autohete_fx.cluster.spec import Cluster, Node
from autohete_fx.errors import ClusterError

TIME_LIMIT_S = 30.0
"""Seconds of improving, unless told otherwise."""
_MOST_CLUSTERS = 16
"""Sets of few nodes whose plans are all tried."""
_MOST_SMALLER = 3
"""Clusters without a kind of nodes that are searched, too, those of the most compute first."""
_SMALL = 16
"""GPUs of a cluster that is searched without any of its kinds of nodes, too."""

_Timed = tuple[ClusterPlan, Timeline]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """GPUs of a type that a plan leaves alone.

    Attributes:
        gpu: their type.
        count: how many.
        with_more_s: of the fastest plan that was simulated with more of the type; None where none was.
    """

    gpu: str
    count: int
    with_more_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best plan that was found.

    Attributes:
        plan: with its simulated step.
        timeline: of that step.
        model_bound_s: as the integer program counts, without shared ports and waits, no plan of the shapes that were made is
            faster. None where that program found no plan, or the plan comes from elsewhere. Simulated steps may be a few percent
            below: the program estimates what comes after the last backward.
        compute_bound_s: all GPUs at work all the time on whole models.
        num_shapes: that were made.
        num_simulated: plans that were simulated.
        solve_s: seconds that it took.
        first_s: seconds until a first plan was simulated; None where plans are not made one by one.
        moves: why a slower plan was taken that moves less; "" where none was.
        idle: types of GPU that the plan does not use up.
    """

    plan: ClusterPlan
    timeline: Timeline
    model_bound_s: float | None
    compute_bound_s: float
    num_shapes: int
    num_simulated: int
    solve_s: float
    first_s: float | None = None
    moves: str = ""
    idle: tuple[Idle, ...] = ()


def plan_cluster(
    cluster: Cluster,
    costs: CostTable,
    *,
    global_batch: int,
    micro_batches: Sequence[int] | None = None,
    degrees: Sequence[int] | None = None,
    shards: Sequence[int] = (),
    symmetric_tp: bool = False,
    sends: Sends = Sends.BLOCKING,
    time_limit_s: float = TIME_LIMIT_S,
    moving: Moving | None = None,
) -> Solution:
    """The fastest plan of a step over ``global_batch`` samples.

    Args:
        micro_batches: sizes to choose from; by default those that costs have, up to 16.
        degrees: of tensor parallelism to choose from; by default those that costs have.
        shards: numbers to choose from, beside plain units, of shards in which the GPUs of a unit hold their layers. A micro-batch
            may then have as many samples of each as without.
        symmetric_tp: all pipelines have one degree, as in AutoHet's paper.
        moving: what nodes have of the states, and how long they are expected to stay; None: the fastest step is best.
        time_limit_s: improving stops then; what comes before it does not wait for the clock, and is the same for equal inputs.

    Raises:
        ClusterError: nothing fits.
    """
    began = time.monotonic()
    search = Search(cluster, costs, global_batch, micro_batches, sends, began + time_limit_s, degrees, shards)
    plan, timeline, model_bound_s = _fastest(search, symmetric_tp=symmetric_tp)
    moves = ""
    if moving is not None:
        solve = functools.partial(
            plan_cluster,
            costs=costs,
            global_batch=global_batch,
            micro_batches=micro_batches,
            degrees=degrees,
            shards=shards,
            symmetric_tp=symmetric_tp,
            sends=sends,
            time_limit_s=time_limit_s / 2,
        )
        chosen = _nearest(plan, search, moving, solve)
        plan, moves = chosen.plan, chosen.line
        timeline = simulate(plan, cluster, costs, sends=sends)
    return Solution(
        plan=plan,
        timeline=timeline,
        model_bound_s=model_bound_s,
        compute_bound_s=_bound_s(search, cluster),
        num_shapes=search.num_shapes,
        num_simulated=search.num_simulated,
        solve_s=time.monotonic() - began,
        first_s=search.first_at - began if search.found else None,
        moves=moves,
        idle=idle_of(plan, cluster, [(found.plan, found.timeline.iteration_s) for found in search.found]),
    )


def _fastest(search: Search, *, symmetric_tp: bool) -> tuple[ClusterPlan, Timeline, float | None]:
    """The fastest plan with its simulated step, and the bound of the integer programs; None: they found no plan."""
    if not search.known:
        gpus = sorted({node.gpu for node in search.cluster.nodes})
        raise ClusterError(
            f"there are no costs of {search.costs.model} on any GPU of the cluster, {gpus}. Expected was at least one. Measure or"
            " price it there"
        )
    best, bound_s = _searched(search, symmetric_tp=symmetric_tp)
    best = _with_grid(best, search)
    fewer = [each for cluster in _without_a_kind(search.cluster) if (each := search.of(cluster)).known]
    for each in sorted(fewer, key=lambda each: _bound_s(each, each.cluster))[:_MOST_SMALLER]:
        if best is None or _bound_s(each, each.cluster) < best[1].iteration_s:
            tried, _ = _searched(each, symmetric_tp=symmetric_tp)
            best = min(filter(None, (best, tried)), key=_step_s, default=None)
            search.take(each)
    whole, sharded = _groups(search, symmetric_tp=symmetric_tp)
    best = _with_every(best, search, [*whole, *sharded])
    if best is None:
        raise ClusterError(search.why_nothing(search.known))
    plan, timeline = best
    return replace(plan, iteration_s=timeline.iteration_s), timeline, bound_s if math.isfinite(bound_s) else None


def _step_s(timed: _Timed) -> float:
    return timed[1].iteration_s


def _groups(search: Search, *, symmetric_tp: bool) -> tuple[list[list[UnitType]], list[list[UnitType]]]:
    """Units that plans are made of: those without shards, and those with them."""
    known = list(search.known)
    groups = [[u for u in known if u.tp == tp] for tp in sorted({u.tp for u in known})] if symmetric_tp else [known]
    whole = [[u for u in units if u.shards == 1] for units in groups]
    return whole, [units for units in groups if any(u.shards > 1 for u in units)]


def _searched(search: Search, *, symmetric_tp: bool) -> tuple[_Timed | None, float]:
    """The best plan of a search, and the bound of its integer programs. Plans with shards come last, and only add to the others."""
    best, bound_s = None, math.inf
    for groups in _groups(search, symmetric_tp=symmetric_tp):
        bound_s = min((bound_s, *map(search.run, groups)))
        if groups and search.found:
            best = search.best()
    return best, bound_s


def _without_a_kind(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster without the nodes of a kind that have one number of GPUs. On larger clusters, where a search takes longer, other
    nodes of the kind must remain: the search itself leaves out whole kinds."""
    is_small = sum(node.gpus for node in cluster.nodes) <= _SMALL
    for gpu, zone, size in sorted({(node.gpu, node.zone, node.gpus) for node in cluster.nodes}):
        rest = tuple(node for node in cluster.nodes if (node.gpu, node.zone, node.gpus) != (gpu, zone, size))
        if rest and (is_small or any((node.gpu, node.zone) == (gpu, zone) for node in rest)):
            yield replace(cluster, nodes=rest)


def _bound_s(search: Search, cluster: Cluster) -> float:
    return compute_bound(cluster, search.costs, search.shaper, search.known, search.global_batch, search.sizes)


def _with_grid(best: _Timed | None, search: Search) -> _Timed | None:
    """The best plan so far, or the grid in proportion to speed where that is faster."""
    grid = proportional_grid(search.cluster, search.costs, search.global_batch)
    if grid and search.allows(grid, search.known) and (best is None or grid.iteration_s < best[1].iteration_s):
        plan = replace(grid, planner="autohete")
        return plan, simulate(grid, search.cluster, search.costs, sends=search.sends)
    return best


def _with_every(best: _Timed | None, search: Search, groups: Sequence[Sequence[UnitType]]) -> _Timed | None:
    """The best plan so far, or a faster one among all plans of some nodes that hold few units, each group of units by itself."""
    few_units = list(_few_units(search))
    work = MOST_WORK if len(few_units) == 1 else MOST_WORK // 4 // max(1, len(few_units))
    for nodes in few_units:
        few = replace(search.cluster, nodes=nodes)
        if best is not None and _bound_s(search, few) >= best[1].iteration_s:
            continue
        every = Every(
            few,
            search.costs,
            search.shaper,
            Links(few),
            global_batch=search.global_batch,
            sizes=search.sizes,
            sends=search.sends,
        )
        for units in groups:
            best = every.fastest(units, best[1].iteration_s if best else math.inf, work) or best
        search.num_simulated += every.num_simulated
    return best


def _few_units(search: Search) -> Iterator[tuple[Node, ...]]:
    """Nodes of which all plans can be tried: all, or as many as hold few units. Of nodes that are alike the first are taken."""
    least = {unit.gpu: min(other.num_gpus for other in search.known if other.gpu == unit.gpu) for unit in search.known}
    alike: dict[tuple[str, str, int], list[Node]] = {}
    for node in search.cluster.nodes:
        if node.gpu in least and node.gpus >= least[node.gpu]:
            alike.setdefault((node.gpu, node.zone, node.gpus), []).append(node)
    kinds = [(nodes, nodes[0].gpus // least[nodes[0].gpu]) for nodes in alike.values()]

    def chosen(place: int, left: int, fewest_left: int) -> Iterator[tuple[Node, ...]]:
        """Nodes of the kinds from a place on, to which none can be added; ``fewest_left``: units of a node that was left out."""
        if place == len(kinds):
            if left < fewest_left:
                yield ()
            return
        nodes, units = kinds[place]
        most = min(len(nodes), left // units)
        for count in range(most, -1, -1):
            left_out = units if count < len(nodes) else MOST_UNITS + 1
            for rest in chosen(place + 1, left - count * units, min(fewest_left, left_out)):
                yield (*nodes[:count], *rest)

    found = (nodes for nodes in chosen(0, MOST_UNITS, MOST_UNITS + 1) if nodes)
    return itertools.islice(found, _MOST_CLUSTERS)


def _nearest(plan: ClusterPlan, search: Search, moving: Moving, solve: Callable[[Cluster], Solution]) -> Nearest:
    """The plan that does the most until nodes change, of this one, those that were simulated, and that of nodes with states."""
    cluster = search.cluster
    others = [replace(found.plan, iteration_s=found.timeline.iteration_s) for found in search.found]
    keeping = tuple(node for node in cluster.nodes if moving.held.get(node.name))
    if 0 < len(keeping) < len(cluster.nodes):
        with contextlib.suppress(ClusterError):  # raised where these alone do not hold the model
            others.append(solve(replace(cluster, nodes=keeping)).plan)
    return nearest([plan, *others], cluster, search.costs, moving)


def idle_of(plan: ClusterPlan, cluster: Cluster, simulated: Sequence[tuple[ClusterPlan, float]]) -> tuple[Idle, ...]:
    """The GPUs that a plan leaves alone; ``simulated``: other plans with their seconds."""
    used = plan.used()
    left = {gpu.name: cluster.count(gpu.name) - used.get(gpu.name, 0) for gpu in cluster.gpus}

    def with_more_s(gpu: str) -> float | None:
        return min((s for other, s in simulated if other.used().get(gpu, 0) > used.get(gpu, 0)), default=None)

    return tuple(Idle(gpu=gpu, count=count, with_more_s=with_more_s(gpu)) for gpu, count in left.items() if count)


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
        fits = [unit for unit in units if (unit.gpu, unit.zone, unit.shards) == (node.gpu, node.zone, 1)]
        if fits:
            rate += node.gpus * max(1 / (shaper.whole_s(unit, size) * unit.tp) for unit in fits for size in sizes)
    return global_batch / rate
