"""The variables of an integer program, and sums of what their options are worth.

In comes a problem, out comes a model that has nothing but choices. `formulation` has the mathematics, and adds the rows.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from autohete_fx.ir import BlockDecision, Lane, Overlap, Problem
from autohete_fx.planner.model.choices import activation_choices, joined, place_choices
from autohete_fx.planner.model.figures import overlap_of, sends_at_once
from autohete_fx.planner.model.work import (
    COPY_WEIGHT,
    MOVED_IN_PASSES,
    MOVED_ONCE,
    Work,
    added_up,
    copies_of_updated,
    durations,
)

TICKS = 2**20

Linear = Any  # sums of variables: cp_model's stubs do not type them


class Variables:
    """The choices of a problem with at least one block, and numbers beside them."""

    def __init__(self, problem: Problem) -> None:
        assert problem.costs
        self.problem = problem
        self.num_blocks = len(problem.costs)
        self.model = cp_model.CpModel()
        total_s = sum(cost.forward_s + cost.backward_s + cost.recompute_s for cost in problem.costs)
        self.tick_s = (total_s or 1.0) / TICKS
        self.horizon = 2**50
        held = (c.saved_bytes + c.param_bytes + c.grad_bytes + c.optimizer_bytes for c in problem.costs)
        self.bytes_unit = sum(held) + problem.fixed_bytes or 1
        self.units: dict[int, int] = {}  # of the variables that are no choices, in which the relaxation counts
        self.treated = [activation_choices(problem, block) for block in range(self.num_blocks)]
        self.placed = [place_choices(problem, block) for block in range(self.num_blocks)]
        self.overlap = overlap_of(problem)
        self.updates_begin_together = self.overlap is not Overlap.BACKWARD
        self.sends_at_once = sends_at_once(problem)
        self._seconds = [self._seconds_of(block) for block in range(self.num_blocks)]
        self.streams = any(place.streams for placed in self.placed for place in placed)
        copied = [work.index for work in copies_of_updated(problem)]
        self.waiting = [  # by option, whether any copies up wait for an update on the host
            (seconds[Work.HOST_UPDATE.index] > 0) & (seconds[copied].sum(axis=0) > 0) for seconds in self._seconds
        ]
        self.chosen: list[list[cp_model.IntVar]] = []
        self._add_choices()

    def _add_choices(self) -> None:
        for block, kinds in enumerate(zip(self.treated, self.placed, strict=True)):
            variables = [
                [self.model.new_bool_var(f"{name}[{block},{k}]") for k in range(len(options))]
                for name, options in zip("xy", kinds, strict=True)
            ]
            for of_kind in variables:
                self.model.add_exactly_one(of_kind)
            self.chosen.append([variable for of_kind in variables for variable in of_kind])

    def _of_block(self, block: int, quantity: Callable[[BlockDecision], Any]) -> NDArray[Any]:
        """What every x and every y of a block adds to a quantity."""
        return self._added(block, np.array([quantity(option) for option in self._options(block)]))

    def _options(self, block: int) -> tuple[BlockDecision, ...]:
        return *self.treated[block], *self.placed[block]

    def _added(self, block: int, worth: NDArray[Any]) -> NDArray[Any]:
        """Likewise, given what each of its options is worth by itself."""
        treated, placed = np.split(worth, [len(self.treated[block])])
        return np.concatenate([treated - treated[0], placed])

    def _seconds_of(self, block: int) -> NDArray[np.float64]:
        """By kind of work, the seconds of every option of a block."""
        return self._of_block(block, lambda option: durations(self.problem, block, option).seconds).T

    def _ticks(self, block: int, works: Iterable[Work]) -> NDArray[np.int64]:
        """By option of a block, the ticks of some work, rounded down."""
        found = np.zeros(self._seconds[block].shape[1], dtype=np.int64)
        for together in added_up(works):
            seconds = self._seconds[block][[work.index for work in together]].sum(axis=0)
            found += np.floor(seconds / self.tick_s).astype(np.int64)
        return found

    def _least(self, block: int, works: Iterable[Work]) -> int:
        """The least ticks that some work of a block takes, whatever it chooses."""
        return sum(int(part.min()) for part in np.split(self._ticks(block, works), [len(self.treated[block])]))

    def _most(self, block: int, works: Sequence[Work]) -> int:
        """Likewise the most, of a lane that all others slow down."""
        ticks = sum(int(part.max()) + 1 for part in np.split(self._ticks(block, works), [len(self.treated[block])]))
        return ceil(min(self.horizon, ticks * max((self._slowed(work.lane) for work in works), default=1)))

    def _slowed(self, lane: Lane) -> float:
        """By how many times work of a lane takes longer at most, beside other work."""
        return 1 / prod(self.problem.machine.kept(lane, beside) for beside in Lane if beside is not lane)

    def _weighted(self, by_block: Sequence[NDArray[np.int64]], blocks: Iterable[int] | None = None) -> Linear:
        """The sum over blocks of what the chosen option is worth; ``by_block`` in the order of ``blocks``, or all."""
        variables: list[cp_model.IntVar] = []
        weights: list[int] = []
        for block, values in zip(range(self.num_blocks) if blocks is None else blocks, by_block, strict=True):
            for option in np.flatnonzero(values):
                variables.append(self.chosen[block][option])
                weights.append(int(values[option]))
        return cp_model.LinearExpr.weighted_sum(variables, weights)

    def _sum(self, blocks: Iterable[int], works: Iterable[Work], *, waiting: bool = False) -> Linear:
        """Ticks of some blocks' work; if asked, only of options of which copies up wait for an update on the host."""
        listed, summed = list(blocks), tuple(works)
        values = [self._ticks(block, summed) for block in listed]
        if waiting:
            values = [ticks * self.waiting[block] for block, ticks in zip(listed, values, strict=True)]
        return self._weighted(values, listed)

    def _number(self, name: str, unit: int, most: int | None = None) -> cp_model.IntVar:
        variable = self.model.new_int_var(0, self.horizon if most is None else most, name)
        self.units[variable.index] = unit
        return variable

    def _time(self, name: str) -> cp_model.IntVar:
        return self._number(name, TICKS)

    def _ticks_of_copies(self) -> Linear:
        passes = self.problem.micro_batches if self.problem.training else 1
        values = [
            COPY_WEIGHT * (passes * self._ticks(block, MOVED_IN_PASSES) + self._ticks(block, MOVED_ONCE))
            for block in range(self.num_blocks)
        ]
        return self._weighted([np.floor(each).astype(np.int64) for each in values])

    def decisions(self, values: Sequence[Sequence[float]]) -> tuple[BlockDecision, ...]:
        """The decisions that the choices' values, of every block 0 or 1, stand for."""
        found = []
        for treated, placed, of_block in zip(self.treated, self.placed, values, strict=True):
            first, second = np.split(np.array(of_block), [len(treated)])
            found.append(joined(treated[int(np.argmax(first))], placed[int(np.argmax(second))]))
        return tuple(found)
