"""Local search: in come decisions that fit the budgets, out come decisions that fit and replay no slower.

The integer program is exact at prefetch distance 1 but may stop before it is done, and knows no other distance. Here
decisions are changed one block or two blocks at a time, and prefetches moved earlier, wherever the budget still holds
and the replay says that it is faster (AutoHete's "safe prefetch"). Memory is judged by `formulation.device_bytes`,
which is cheap to update, and time by `simulate`. Work is counted in replays and never in seconds: the same input gives
the same decisions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np

from autohete_fx.ir import Activations, BlockDecision, Optimizer, Params, Problem
from autohete_fx.planner.formulation import choices, device_bytes
from autohete_fx.planner.simulate import host_bytes, simulate

MAX_PREFETCH_DISTANCE = 6
FEW_BLOCKS = 6
"""Up to so many blocks every change of every two blocks is tried; beyond, only exchanges."""

Score = tuple[float, int]
Change = Mapping[int, BlockDecision]


def moves_copies(decision: BlockDecision) -> bool:
    """Whether a block under this decision copies anything ahead of its use."""
    return decision.params is Params.HOST or decision.activations is Activations.OFFLOAD


class Improver:
    """Local search over one problem, within a number of replayed blocks that all its calls share."""

    def __init__(self, problem: Problem, replayed_blocks: int) -> None:
        self.problem = problem
        self.num_blocks = len(problem.costs)
        self.one_micro_batch = replace(problem, micro_batches=1)
        self.options = [choices(problem, block) for block in range(self.num_blocks)]
        self.replays_left = replayed_blocks // self.num_blocks
        self.rows: dict[tuple[int, BlockDecision], np.ndarray] = {}
        self.resolution_s = 1e-9 * sum(c.forward_s + c.backward_s + c.recompute_s for c in problem.costs) or 1e-12

    def row(self, block: int, decision: BlockDecision) -> np.ndarray:
        """`device_bytes` as an array, computed once."""
        key = (block, decision)
        if key not in self.rows:
            self.rows[key] = np.array(device_bytes(self.problem, block, decision), dtype=np.int64)
        return self.rows[key]

    def device_use(self, decisions: Sequence[BlockDecision]) -> np.ndarray:
        """Device bytes in use in every span."""
        rows = (self.row(block, decision) for block, decision in enumerate(decisions))
        return np.sum(list(rows), axis=0) + self.problem.fixed_bytes

    def fits(self, device_use: np.ndarray, decisions: Sequence[BlockDecision]) -> bool:
        """Whether both budgets hold."""
        device, host = self.problem.device_budget_bytes, self.problem.host_budget_bytes
        if device is not None and int(device_use.max()) > device:
            return False
        return host is None or sum(host_bytes(self.problem, b, d) for b, d in enumerate(decisions)) <= host

    def score(self, decisions: Sequence[BlockDecision]) -> Score:
        """Replayed time, then how much is moved off the device and how early: smaller is better."""
        self.replays_left -= 1
        replay = simulate(self.one_micro_batch, decisions, events=False)
        passes = self.problem.micro_batches if self.problem.training else 1
        step_s = passes * (replay.forward_s + replay.backward_s) + replay.optimizer_s
        moved = sum(
            100
            * ((d.activations is not Activations.KEEP) + (d.params is Params.HOST) + (d.optimizer is Optimizer.HOST))
            + d.prefetch_distance
            for d in decisions
        )
        return (round(step_s / self.resolution_s), moved)

    def improve(self, start: Sequence[BlockDecision]) -> tuple[BlockDecision, ...]:
        """Change decisions until no change helps, or the replays are used up. ``start`` fits the budgets."""
        best = self.prefetch_safely(start)
        while self.replays_left > 0:
            changed = self._climb(best)
            if changed == best:
                return best
            best = self.prefetch_safely(changed)
        return best

    def _climb(self, start: Sequence[BlockDecision]) -> tuple[BlockDecision, ...]:
        """Take every change that helps; begin again after a round in which one did."""
        current = tuple(start)
        use, score = self.device_use(current), self.score(current)
        helped = True
        while helped:
            helped = False
            for change in self._changes(current):
                if self.replays_left <= 0:
                    return current
                if all(current[block] == decision for block, decision in change.items()):
                    continue
                candidate = tuple(change.get(block, decision) for block, decision in enumerate(current))
                moved = use + sum(
                    self.row(block, new) - self.row(block, current[block]) for block, new in change.items()
                )
                if self.fits(moved, candidate) and (new_score := self.score(candidate)) < score:
                    current, use, score, helped = candidate, moved, new_score, True
        return current

    def _changes(self, start: tuple[BlockDecision, ...]) -> Iterator[Change]:
        """Changes worth a try, at the distances that the blocks have in ``start``."""
        for block, decision in enumerate(start):
            for option in self.options[block]:
                yield {block: replace(option, prefetch_distance=decision.prefetch_distance)}
                yield {block: option}
        for one, other in combinations(range(self.num_blocks), 2):
            if self.num_blocks <= FEW_BLOCKS:
                for pair in product(self.options[one], self.options[other]):
                    yield dict(zip((one, other), pair, strict=True))
            elif self._exchangeable(start, one, other):
                yield {one: start[other], other: start[one]}

    def _exchangeable(self, decisions: tuple[BlockDecision, ...], one: int, other: int) -> bool:
        def allowed(block: int, decision: BlockDecision) -> bool:
            return replace(decision, prefetch_distance=1) in self.options[block]

        return allowed(one, decisions[other]) and allowed(other, decisions[one])

    def prefetch_safely(self, start: Sequence[BlockDecision]) -> tuple[BlockDecision, ...]:
        """Move prefetches earlier where the budget holds and the replay is faster; later where it is no slower."""
        start = tuple(start)
        movable = [block for block, decision in enumerate(start) if moves_copies(decision)]
        if not movable:
            return tuple(replace(decision, prefetch_distance=1) for decision in start)
        best, best_score = start, self.score(start)
        farthest = min(MAX_PREFETCH_DISTANCE, self.num_blocks - 1)
        for reach in range(1, farthest + 1):
            candidate = self._reach(start, movable, reach)
            if candidate != best and self.replays_left > 0 and (score := self.score(candidate)) < best_score:
                best, best_score = candidate, score
        helped = True
        while helped and self.replays_left > 0:
            helped = False
            for block, distance in product(movable, range(1, farthest + 1)):
                candidate = list(best)
                candidate[block] = replace(best[block], prefetch_distance=distance)
                if distance == best[block].prefetch_distance or not self.fits(self.device_use(candidate), candidate):
                    continue
                if (score := self.score(candidate)) < best_score:
                    best, best_score, helped = tuple(candidate), score, True
        return best

    def _reach(self, start: tuple[BlockDecision, ...], movable: list[int], reach: int) -> tuple[BlockDecision, ...]:
        """Every block's copies as far ahead as ``reach`` and the budget allow, beginning with the last block."""
        reached = [replace(decision, prefetch_distance=1) for decision in start]
        use = self.device_use(reached)
        for block in reversed(movable):
            for distance in range(reach, 1, -1):
                farther = replace(reached[block], prefetch_distance=distance)
                moved = use + self.row(block, farther) - self.row(block, reached[block])
                if self.fits(moved, reached):
                    reached[block], use = farther, moved
                    break
        return tuple(reached)
