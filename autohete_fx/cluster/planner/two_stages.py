"""AutoHet's planner (arXiv 2512.20953) in two stages: devices into groups, then stages and layers within each group.

Its code is not public: this is a reimplementation from the published description. From there: tensor parallelism is symmetric,
and pipelines may differ in depth. One integer program groups devices that hold the model, balanced and with the most effective
computing power. Another maps stages and balances layers under memory. SCIP solves both. The programs themselves (`_grouped`,
`_mapped`), idle devices, recomputation, and the search over widths and sizes of micro-batches are ours.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ortools.linear_solver.python import model_builder

from autohete_fx.cluster.costs import CostTable, StageCost
from autohete_fx.cluster.memory import memory_of
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.planner.drafts import MOST_SIMULATED, Draft, Drafts, evenly, stage_seconds
from autohete_fx.cluster.planner.shapes import Shape, UnitType
from autohete_fx.cluster.spec import Cluster

_SCIP = "limits/totalnodes = 500\nlimits/gap = 0.005\n"
"""Nodes rather than seconds: equal inputs give equal plans."""

MOST_COMPOSITIONS = 2_000
"""Groups are told apart by how many units they have of each type. Up to so many kinds a plan takes less than a minute."""

TWO_STAGES = "two stages"
"""`ClusterPlan.planner` of this module's plans."""
_Group = tuple[tuple[UnitType, int], ...]
"""Units of a pipeline by type."""


def two_stages(cluster: Cluster, costs: CostTable, global_batch: int) -> ClusterPlan | None:
    """The fastest plan of balanced groups of devices, each mapped and cut alone; None where none fits."""
    drafts = Drafts(cluster, costs, global_batch)
    made: list[Draft] = []
    for grouping in sorted(_groupings(drafts), key=lambda grouping: grouping.least_s):
        if len(made) >= 2 * MOST_SIMULATED:
            break
        made.extend(_pipelines(drafts, grouping))
    return drafts.fastest(made, TWO_STAGES)


def num_compositions(cluster: Cluster, costs: CostTable, global_batch: int) -> int:
    """How many compositions a group of devices may have, at the degree of tensor parallelism that has most."""
    drafts = Drafts(cluster, costs, global_batch)
    return max((math.prod(count + 1 for count in drafts.counts(tp).values()) for tp in drafts.degrees()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grouping:
    """Groups of devices, one a pipeline, by falling power; ``least_s``: estimated seconds of a step, stages perfectly balanced."""

    groups: tuple[_Group, ...]
    size: int
    least_s: float


def _groupings(drafts: Drafts) -> Iterator[_Grouping]:
    """The first stage, for each degree, width and size."""
    for tp, size in itertools.product(drafts.degrees(), drafts.sizes):
        counts = drafts.counts(tp)
        for width in range(1, min(sum(counts.values()), drafts.batch // size) + 1):
            powers = _powers(drafts, counts, size, drafts.batch // size // width)
            groups = _grouped(powers, counts, width)
            if groups:
                least = min(powers[group] for group in groups)
                yield _Grouping(groups=groups, size=size, least_s=drafts.batch / (width * least))


def _powers(drafts: Drafts, counts: Mapping[UnitType, int], size: int, micro_batches: int) -> dict[_Group, float]:
    """Effective computing power of every group that holds the model's states: samples a second, the pipeline's bubble in them."""
    found = {}
    for numbers in itertools.product(*(range(count + 1) for count in counts.values())):
        depth = sum(numbers)
        if not 0 < depth <= min(drafts.num_layers, micro_batches):
            continue
        group = tuple((unit, count) for unit, count in zip(counts, numbers, strict=True) if count)
        unit = group[0][0]
        states = memory_of(drafts.costs.sums(unit.gpu, unit.tp, size).stage(0, drafts.num_layers), drafts.costs, 0)
        room = sum(count * (drafts.memory_bytes[unit.gpu] - drafts.costs.overhead_bytes) for unit, count in group)
        if states.states_bytes <= room:
            power = sum(count / drafts.shaper.whole_s(unit, size) for unit, count in group)
            found[group] = power * micro_batches / (micro_batches + depth - 1)
    return found


def _grouped(powers: Mapping[_Group, float], counts: Mapping[UnitType, int], width: int) -> tuple[_Group, ...] | None:
    """Groups whose least power is largest, and of these the ones of most power.

    With ``n_c`` groups of composition ``c``, of power ``e_c`` and ``g_c,t`` units of type ``t``: the largest ``E`` for which there
    are whole numbers ``n_c`` of compositions with ``e_c >= E``, sum_c n_c = width, and sum_c g_c,t n_c <= G_t for each ``t``.
    """

    def at(least: float) -> tuple[_Group, ...] | None:
        useful = [group for group, power in powers.items() if power >= least]
        model = model_builder.Model()
        numbers = [model.new_int_var(0, width, "") for _ in useful]
        model.add(model_builder.LinearExpr.sum(numbers) == width)
        for unit, count in counts.items():
            model.add(
                model_builder.LinearExpr.weighted_sum(numbers, [dict(group).get(unit, 0) for group in useful]) <= count
            )
        model.maximize(model_builder.LinearExpr.weighted_sum(numbers, [powers[group] for group in useful]))
        solver = _solved(model)
        if solver is None:
            return None
        taken = [(group, round(solver.value(number))) for group, number in zip(useful, numbers, strict=True)]
        return tuple(group for group, count in taken for _ in range(count))

    best, levels = None, sorted(set(powers.values()))
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        found = at(levels[middle])
        if found is None:
            high = middle
        else:
            best, low = found, middle + 1
    return best and tuple(sorted(best, key=lambda group: -powers[group]))


def _solved(model: model_builder.Model) -> model_builder.Solver | None:
    """SCIP after it found a solution; None where it proved that there is none, or found none."""
    solver = model_builder.Solver("SCIP")
    solver.set_solver_specific_parameters(_SCIP)
    status = solver.solve(model)
    return solver if status in (model_builder.SolveStatus.OPTIMAL, model_builder.SolveStatus.FEASIBLE) else None


def _pipelines(drafts: Drafts, grouping: _Grouping) -> Iterator[Draft]:
    """The second stage for each group; pipelines packed on nodes, and spread over them."""
    total, width = drafts.batch // grouping.size, len(grouping.groups)
    kinds = dict.fromkeys(grouping.groups)
    mapped = {
        (group, recompute): _mapped(drafts, group, grouping.size, total // width, recompute=recompute)
        for group, recompute in itertools.product(kinds, (False, True))
    }
    for spread in (False, True):
        best: dict[_Group, Shape] = {}
        for (group, recompute), found in mapped.items():
            if found is None:
                continue
            shape = drafts.shape(*found, grouping.size, spread=spread, recompute=recompute)
            if shape and (
                group not in best or shape.seconds_of(total // width) < best[group].seconds_of(total // width)
            ):
                best[group] = shape
        if len(best) == len(kinds):
            yield tuple(zip((best[group] for group in grouping.groups), evenly(total, width), strict=True))


def _mapped(
    drafts: Drafts, group: _Group, size: int, micro_batches: int, *, recompute: bool
) -> tuple[tuple[UnitType, ...], tuple[int, ...]] | None:
    """Units in the order of stages, and cuts, for the fastest step of so many micro-batches under memory.

    Stage ``s`` is a unit of type ``t`` where x_s,t = 1, with l_s,t layers between embedding and head, which cost as much as their
    mean. It takes z_s = sum_t (a_t l_s,t + f_s,t x_s,t) seconds for a micro-batch, ``f`` those of embedding or head:

        minimise   sum_s z_s + (k - 1) Z
        subject to z_s <= Z for each s;  sum_t x_s,t = 1 for each s;  sum_s x_s,t = g_t for each t
                   m_s,t l_s,t <= (memory of t - bytes without them) x_s,t for each s, t;  sum_s,t l_s,t = layers
    """
    depth, linear = sum(count for _, count in group), model_builder.LinearExpr
    rows = {unit: _Row.of(drafts, unit, size, depth, recompute=recompute) for unit, _ in group}
    body = next(iter(rows.values())).body
    model = model_builder.Model()
    slowest_s = model.new_num_var(0.0, float("inf"), "")
    stands: dict[tuple[int, UnitType], model_builder.Variable] = {}
    layers: dict[tuple[int, UnitType], model_builder.Variable] = {}
    seconds = []
    for place in range(depth):
        terms = []
        for unit, row in rows.items():
            x, n = model.new_bool_var(""), model.new_int_var(0, len(body), "")
            stands[place, unit], layers[place, unit] = x, n
            most = (row.free_bytes[place] - row.fixed_bytes[place]) / row.layer_bytes[place]
            model.add(n <= max(0, min(len(body), int(most))) * x)
            if most < 0:
                model.add(x == 0)
            if not row.fixed_s[place]:
                model.add(n >= x)
            terms.append(row.layer_s * n + row.fixed_s[place] * x)
        seconds.append(linear.sum(terms))
        model.add(seconds[-1] <= slowest_s)
        model.add(linear.sum([stands[place, unit] for unit in rows]) == 1)
    for unit, count in group:
        model.add(linear.sum([stands[place, unit] for place in range(depth)]) == count)
    model.add(linear.sum(list(layers.values())) == len(body))
    model.minimize(linear.sum(seconds) + (micro_batches - 1) * slowest_s)
    solver = _solved(model)
    if solver is None:
        return None
    units = tuple(next(u for u in rows if solver.value(stands[place, u]) > 0.5) for place in range(depth))
    taken = itertools.accumulate(round(solver.value(layers[place, unit])) for place, unit in enumerate(units))
    return units, (0, *(body.start + done for done in itertools.islice(taken, depth - 1)), drafts.num_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Costs of one type of unit in the second stage; lists are by place.

    Attributes:
        body: the layers between embedding and head.
        layer_s: seconds of one of them.
        fixed_s: seconds of embedding or head, where the place has them.
        layer_bytes: of one layer.
        fixed_bytes: of embedding or head, where the place has them.
        free_bytes: of the GPU's memory for these.
    """

    body: range
    layer_s: float
    fixed_s: list[float]
    layer_bytes: list[float]
    fixed_bytes: list[float]
    free_bytes: list[float]

    @classmethod
    def of(cls, drafts: Drafts, unit: UnitType, size: int, depth: int, *, recompute: bool) -> "_Row":
        """The row of a unit in a pipeline of so many stages."""
        kinds = drafts.costs.kinds
        often = Counter(kinds).most_common(1)[0][0]
        body = range(kinds.index(often), len(kinds) - kinds[::-1].index(often))
        sums = drafts.costs.sums(unit.gpu, unit.tp, size)

        def cost(layers: range) -> StageCost:
            return sums.stage(layers.start, layers.stop, recomputed=len(layers) if recompute else 0)

        inner = cost(body)
        row = cls(
            body=body,
            layer_s=stage_seconds(inner) / len(body),
            fixed_s=[],
            layer_bytes=[],
            fixed_bytes=[],
            free_bytes=[],
        )
        for place in range(depth):
            ends = [range(body.start)] * (place == 0) + [range(body.stop, len(kinds))] * (place == depth - 1)
            ends = [cost(layers) for layers in ends if layers]
            held = [memory_of(end, drafts.costs, depth - place) for end in ends]
            memory = memory_of(inner, drafts.costs, depth - place)
            working_bytes = max([inner.working_bytes, *(end.working_bytes for end in ends)])
            row.fixed_s.append(sum(map(stage_seconds, ends)))
            row.layer_bytes.append((memory.states_bytes + memory.activations_bytes) / len(body))
            row.fixed_bytes.append(sum(part.states_bytes + part.activations_bytes for part in held))
            row.free_bytes.append(drafts.memory_bytes[unit.gpu] - drafts.costs.overhead_bytes - working_bytes)
        return row
