"""How many pipelines of each shape there are: the integer program whose least step `solve` explains.

Enter `Shape`s, the GPUs of each type and a global batch; leave counts of shapes and what is proven of the step.
"""

import math
from collections.abc import Mapping, Sequence

from ortools.sat.python import cp_model

from autohete_fx.cluster.planner.shapes import Shape

_PRECISION = 2e-3
"""The share of a step's seconds at which the search for the least ends."""


class Counts:
    """The integer program over counts of shapes."""

    def __init__(
        self,
        counts: Mapping[tuple[str, str], int],
        global_batch: int,
        rooms: Mapping[tuple[tuple[str, str], int], int] | None = None,
        mosts: Mapping[tuple[tuple[str, str], int], int] | None = None,
    ) -> None:
        """The program for the nodes of a cluster. Units of numbers that divide each other always fit these.

        Args:
            counts: GPUs by type and zone.
            global_batch: samples of a step.
            rooms: by these and a number of GPUs, those of the nodes that units of at least so many can take, where a rest stays.
            mosts: by the same, how many such units the nodes hold, where the room alone allows more.
        """
        self._counts, self._batch, self._rooms, self._mosts = counts, global_batch, rooms or {}, mosts or {}
        self.bound_s = 0.0

    def most(self, shapes: Sequence[Shape], seconds: float) -> tuple[float, list[tuple[Shape, int]]]:
        """A bound on the samples of a step of so many seconds, and shapes with counts that come near it."""
        values = [shape.micro_batch * shape.micro_batches_in(seconds) for shape in shapes]
        useful = self._undominated([(shape, value) for shape, value in zip(shapes, values, strict=True) if value])
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
        for (kind, least), room in self._rooms.items():
            taken = [sum(shape.sizes_of_units(kind, least)) for shape, _ in useful]
            model.add(sum(gpus * n for gpus, n in zip(taken, numbers, strict=True)) <= room)
        for (kind, least), most in self._mosts.items():
            taken = [len(shape.sizes_of_units(kind, least)) for shape, _ in useful]
            model.add(sum(units * n for units, n in zip(taken, numbers, strict=True)) <= most)
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

    def _undominated(self, valued: list[tuple[Shape, int]]) -> list[tuple[Shape, int]]:
        """Of shapes that take the same GPUs and rooms, in as many units, the one of most samples."""
        best: dict[tuple[object, ...], tuple[Shape, int]] = {}
        for shape, value in valued:
            rooms = (sum(shape.sizes_of_units(kind, least)) for kind, least in self._rooms)
            mosts = (len(shape.sizes_of_units(kind, least)) for kind, least in self._mosts)
            key = *sorted(shape.gpus().items()), *rooms, *mosts
            if key not in best or value > best[key][1]:
                best[key] = shape, value
        return list(best.values())
