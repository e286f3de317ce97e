"""Drafts of plans: pipelines with their micro-batches, estimated, and the most promising ones simulated.

Enter a `Cluster`, a `CostTable`, a global batch, and drafts that `baselines` makes; leaves the fastest as a `ClusterPlan`.
"""

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import replace

from autohete_fx.cluster.costs import CostTable, StageCost
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.memory import memory_of
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.planner.place import placed
from autohete_fx.cluster.planner.shapes import Shape, Shaper, ShapeStage, UnitType
from autohete_fx.cluster.simulation.gradient_sums import last_sums_s, sums_of
from autohete_fx.cluster.simulation.simulate import simulate
from autohete_fx.cluster.spec import Cluster

MOST_SIMULATED = 10
_LARGEST_MICRO_BATCH = 16

Draft = tuple[tuple[Shape, int], ...]
"""Pipelines: a shape and its micro-batches each."""


class Drafts:
    """Shapes and plans of one cluster, one model and one batch, all units of a pipeline alike in what they recompute."""

    def __init__(self, cluster: Cluster, costs: CostTable, global_batch: int) -> None:
        self._cluster, self.costs, self._links = cluster, costs, Links(cluster)
        self.batch, self.num_layers = global_batch, len(costs.kinds)
        self.memory_bytes = {gpu.name: gpu.memory_bytes for gpu in cluster.gpus}
        self.shaper = Shaper(cluster, costs)
        known = {row.micro_batch for row in costs.times if row.micro_batch <= _LARGEST_MICRO_BATCH}
        self.sizes = tuple(sorted(size for size in known if not global_batch % size))
        self._shapes: dict[tuple[object, ...], Shape | None] = {}

    def degrees(self) -> list[int]:
        """Degrees of tensor parallelism that some node holds."""
        return sorted({unit.tp for unit in self.shaper.unit_types()})

    def counts(self, tp: int) -> dict[UnitType, int]:
        """How many units of each type the cluster has at a degree."""
        return {unit: self._cluster.units(unit.gpu, unit.zone, tp) for unit in self.shaper.unit_types((tp,))}

    def shape(
        self, units: tuple[UnitType, ...], cuts: tuple[int, ...], size: int, *, spread: bool, recompute: bool
    ) -> Shape | None:
        """A pipeline with given layers, all recomputed or none; None where they exceed memory."""
        key = units, cuts, size, spread, recompute
        if key not in self._shapes:
            self._shapes[key] = self._shape(*key)
        return self._shapes[key]

    def _shape(
        self, units: tuple[UnitType, ...], cuts: tuple[int, ...], size: int, spread: bool, recompute: bool
    ) -> Shape | None:
        hops = [self.shaper.hop_s(*pair, size, spread=spread) for pair in itertools.pairwise(units)]
        stages, slots, update_s = [], [], 0.0
        for place, unit in enumerate(units):
            first, stop = cuts[place], cuts[place + 1]
            recomputed = stop - first if recompute else 0
            cost = self.costs.sums(unit.gpu, unit.tp, size).stage(first, stop, recomputed=recomputed)
            if memory_of(cost, self.costs, len(units) - place).peak_bytes > self.memory_bytes[unit.gpu]:
                return None
            stages.append(ShapeStage(unit=unit, first=first, last=stop - 1, recomputed=recomputed, offloaded=0))
            slots.append(stage_seconds(cost))
            update_s = max(update_s, cost.update_s)
        around = [2 * (before + after) for before, after in zip([0.0, *hops], [*hops, 0.0], strict=True)]
        return Shape(
            stages=tuple(stages),
            micro_batch=size,
            spread=spread,
            fill_s=sum(slots) + 2 * sum(hops),
            slot_s=max(map(sum, zip(slots, around, strict=True))),
            after_s=update_s,
        )

    def fastest(self, made: Iterable[Draft], planner: str) -> ClusterPlan | None:
        """Simulate the drafts of the best estimates; the fastest plan, None where no draft has room on the nodes."""
        ranked = sorted(((_estimate_s(draft), draft) for draft in made), key=lambda row: row[0])
        kept: list[tuple[float, ClusterPlan]] = []
        for seconds, draft in ranked:
            if len(kept) == MOST_SIMULATED and seconds >= kept[-1][0]:
                break  # sums of gradients only add
            plan = placed(self._cluster, draft, model=self.costs.model, planner=planner)
            if plan is not None:
                estimate_s = seconds + last_sums_s(plan, sums_of(plan, self.costs, self._links))
                bisect.insort(kept, (estimate_s, plan), key=lambda row: row[0])
                del kept[MOST_SIMULATED:]
        timed = [
            replace(plan, iteration_s=simulate(plan, self._cluster, self.costs, links=self._links).iteration_s)
            for _, plan in kept
        ]
        return min(timed, key=lambda plan: plan.iteration_s, default=None)


def stage_seconds(cost: StageCost) -> float:
    """Seconds of a stage for one micro-batch."""
    return cost.forward_s + cost.backward_s + cost.accumulate_s


def _estimate_s(draft: Draft) -> float:
    """A step, sums of gradients aside."""
    return max(shape.seconds_of(count) for shape, count in draft)


def evenly(total: int, parts: int) -> list[int]:
    """Parts of a number that differ by 1 at most, larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]
