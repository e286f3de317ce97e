"""Grids of pipelines of one depth and degree, the best of each kind: equal ones, and ones in proportion to speed.

Enter a `Cluster`, a `CostTable` and a global batch; leaves a `ClusterPlan`, or None where no grid fits. `baselines` says more.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.planner.drafts import Draft, Drafts, evenly
from autohete_fx.cluster.planner.shapes import UnitType
from autohete_fx.cluster.spec import Cluster

_MOST_PERMUTED = 3
"""Up to so many types of GPU, grids have them in all orders; of more, by rising and by falling speed."""


def equal_grid(cluster: Cluster, costs: CostTable, global_batch: int) -> ClusterPlan | None:
    """The fastest grid of equal pipelines with equal stages; None where none fits."""
    drafts = Drafts(cluster, costs, global_batch)
    return drafts.fastest(_gridded(drafts, proportional=False), "equal grid")


def proportional_grid(cluster: Cluster, costs: CostTable, global_batch: int) -> ClusterPlan | None:
    """The fastest grid with layers and micro-batches in proportion to speed; None where none fits."""
    drafts = Drafts(cluster, costs, global_batch)
    return drafts.fastest(_gridded(drafts, proportional=True), "proportional grid")


def _in_proportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers with a given sum: rounded down, the largest remainders then up."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _grids(drafts: Drafts) -> Iterator[tuple[tuple[tuple[UnitType, ...], ...], bool]]:
    """The units of every grid, by pipeline and stage, and whether neighbours in a node are replicas rather than stages."""
    for tp in drafts.degrees():
        counts, seen = drafts.counts(tp), set()
        by_speed = sorted(counts, key=lambda unit: (drafts.shaper.whole_s(unit, 1), unit))
        many = len(by_speed) > _MOST_PERMUTED
        for order in [by_speed, by_speed[::-1]] if many else itertools.permutations(by_speed):
            units = tuple(unit for unit in order for _ in range(counts[unit]))
            for depth in range(1, min(len(units), drafts.num_layers) + 1):
                for width in range(1, len(units) // depth + 1):
                    stages = tuple(tuple(units[d : depth * width : width]) for d in range(width))
                    pipelines = tuple(units[d * depth : (d + 1) * depth] for d in range(width))
                    for grid in ((stages, True), (pipelines, False)):
                        if grid not in seen and (depth > 1 or not grid[1]):
                            seen.add(grid)
                            yield grid


def _gridded(drafts: Drafts, *, proportional: bool) -> Iterator[Draft]:
    """Every grid that fits, with its layers and micro-batches."""
    for rows, spread in _grids(drafts):
        depth, width = len(rows[0]), len(rows)
        kinds = dict.fromkeys(rows)
        for size, recompute in itertools.product(drafts.sizes, (False, True)):
            total = drafts.batch // size
            if total < depth * width:
                continue
            shapes = {}
            for units in kinds:
                cuts = _cuts_by_speed(drafts, units, size) if proportional else _even_cuts(drafts.num_layers, depth)
                shapes[units] = drafts.shape(units, cuts, size, spread=spread, recompute=recompute)
                if shapes[units] is None:
                    break
            made = [shapes.get(units) for units in rows]
            fitting = [shape for shape in made if shape is not None]
            if len(fitting) < width:
                continue
            weights = [1 / shape.slot_s for shape in fitting]
            counts = _in_proportion(total, weights) if proportional else evenly(total, width)
            if min(counts) >= depth:
                yield tuple(zip(fitting, counts, strict=True))


def _even_cuts(num_layers: int, depth: int) -> tuple[int, ...]:
    return tuple(place * num_layers // depth for place in range(depth + 1))


def _cuts_by_speed(drafts: Drafts, units: Sequence[UnitType], size: int) -> tuple[int, ...]:
    """Cuts that give each stage about its unit's share of the work, and one layer at least."""
    speeds = [1 / drafts.shaper.whole_s(unit, size) for unit in units]
    kinds = dict.fromkeys(drafts.costs.kinds)
    seconds = {
        kind: sum(
            speed * sum(drafts.costs.layer_s(kind, unit.gpu, unit.tp, size))
            for unit, speed in zip(units, speeds, strict=True)
        )
        for kind in kinds
    }
    done = [0.0, *itertools.accumulate(seconds[kind] for kind in drafts.costs.kinds)]
    cuts, share = [0], 0.0
    for place, speed in enumerate(speeds[:-1]):
        share += speed / sum(speeds)
        after = bisect.bisect_left(done, share * done[-1])
        nearest = after if done[after] - share * done[-1] < share * done[-1] - done[after - 1] else after - 1
        cuts.append(min(max(nearest, cuts[-1] + 1), drafts.num_layers - (len(units) - 1 - place)))
    return (*cuts, drafts.num_layers)
