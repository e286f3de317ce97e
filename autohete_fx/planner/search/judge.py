"""The simulator among what the search finds, where the machine has contention: there the search's replays are estimates.

In: decisions with the search's scores. Out: the best of them by the simulator, which knows how much longer work takes beside other
work.
"""

from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.search import effort

_Decisions = tuple[BlockDecision, ...]


class Judge:
    """Judges plans of one problem, each once.

    Attributes:
        most: how many plans it can judge in its share of the time; 0 where a replay takes too long.
        favourite: the plan that the search thought best when it was asked last.
    """

    def __init__(self, problem: Problem, time_limit_s: float) -> None:
        self._problem = problem
        passes = problem.micro_batches if problem.training else 1
        work = effort.JUDGING_SHARE * time_limit_s * effort.JUDGED_BLOCKS_PER_SECOND
        self.most = min(effort.JUDGED, int(work / max(1, len(problem.costs)) / passes))
        self.favourite: _Decisions = ()
        self._scores: dict[_Decisions, float] = {}
        self._step_s: dict[_Decisions, float] = {}

    @property
    def teaches(self) -> bool:
        """Whether the search can learn from it how long work takes."""
        return bool(self._problem.machine.contention) and self.most > 0

    @property
    def ranked(self) -> list[_Decisions]:
        """All plans that were judged, the fastest first."""
        return sorted(self._step_s, key=lambda each: self._step_s[each])

    def note(self, decisions: _Decisions, score: float) -> None:
        """Take decisions that were found, with the score of the search."""
        self._scores[decisions] = score

    def best_of(self, count: int) -> tuple[_Decisions, float]:
        """Judge so many of those found since the last time. Returns the best of all, and its step in seconds."""
        found = sorted(self._scores, key=lambda each: self._scores[each])
        self.favourite = found[0] if found else self.favourite
        for each in found[:count]:
            if each not in self._step_s:
                self._step_s[each] = simulate(self._problem, each, events=False).step_s
        self._scores.clear()
        best = self.ranked[0]
        return best, self._step_s[best]
