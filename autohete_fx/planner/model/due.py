"""The blocks at which copies and collectives of others are due: in come decisions, out come lists by block."""

from collections.abc import Callable, Iterator, Sequence

from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.ir.decision import GATHER_DISTANCE
from autohete_fx.planner.model.figures import Whole, whole_of


class Due:
    """For each block, in ascending order the blocks of which something is issued or waited for there.

    Attributes:
        before: blocks that it comes before by their prefetch distance, after: those that it comes after.
        before_gather, after_gather: likewise, and by one block more where the forward, or the backward, gathers.
        before_reduced: likewise, where gradients are reduced.
    """

    def __init__(self, problem: Problem, decisions: Sequence[BlockDecision]) -> None:
        self._decisions, self._last = decisions, len(decisions) - 1
        whole = [whole_of(problem, block) for block in range(len(decisions))]
        self.before, self.after = self._before(whole, lambda _: 0), self._after(whole, lambda _: 0)
        self.before_gather = self._before(whole, lambda moved: moved.gathered)
        self.after_gather = self._after(whole, lambda moved: moved.gathered_again)
        self.before_reduced = self._before(whole, lambda moved: moved.reduced)

    def gathers_in_forward(self, block: int) -> Iterator[int]:
        """The blocks whose gathers the forward of a block issues, those included that gather nothing."""
        return self._ahead(block, range(self._last + 1))

    def gathers_in_backward(self, block: int) -> Iterator[int]:
        """Likewise the backward of a block."""
        return self._ahead(block, range(self._last, -1, -1))

    def reduces(self, block: int) -> Iterator[int]:
        """The blocks whose reduces are waited for after the backward of a block."""
        if block + GATHER_DISTANCE <= self._last:
            yield block + GATHER_DISTANCE
        if block == 0:
            yield block

    @staticmethod
    def _ahead(block: int, order: range) -> Iterator[int]:
        if block == order[0]:
            yield block
        if block != order[-1]:
            yield block + GATHER_DISTANCE * order.step

    def _before(self, whole: Sequence[Whole], moved: Callable[[Whole], int]) -> list[list[int]]:
        return self._at(lambda block, far: max(0, block - far - bool(moved(whole[block])) * GATHER_DISTANCE))

    def _after(self, whole: Sequence[Whole], moved: Callable[[Whole], int]) -> list[list[int]]:
        return self._at(lambda block, far: min(self._last, block + far + bool(moved(whole[block])) * GATHER_DISTANCE))

    def _at(self, place: Callable[[int, int], int]) -> list[list[int]]:
        placed: list[list[int]] = [[] for _ in self._decisions]
        for block, decision in enumerate(self._decisions):
            placed[place(block, decision.prefetch_distance)].append(block)
        return placed
