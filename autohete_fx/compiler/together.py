"""Plan the graphs of one call together: what each of them may leave on the device, decided when the last of them is known.

In: a graph's own problem, and the *unsettled* graphs of its call (`autohete_fx.compiler.shares`). Out: what these are to get under
the best plan of all, as if they were one graph; they are compiled again for it. The graph is planned within what that leaves. Where
this comes to nothing, they get what takes least, as they have it now.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from autohete_fx.compiler.captured import CapturedGraph
from autohete_fx.compiler.compilation import Footprint, Share
from autohete_fx.compiler.shares import Origin
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.planner.model.footprint import footprint_of
from autohete_fx.planner.sharing import divided, joined
from autohete_fx.planner.solve import solve


class Together:
    """A graph among the unsettled graphs of its call.

    Args:
        captured: the graph.
        own: what its plan would solve beside them as they are.

    Attributes:
        others: the unsettled graphs, in the order of their forwards.
    """

    def __init__(self, captured: CapturedGraph, own: Problem) -> None:
        self.others = captured.unsettled
        self._captured = captured
        self._shares, self._passes = captured.model.shares, captured.options.micro_batches
        alone_bytes = self._taken(captured.origin, dict.fromkeys(self.others, Footprint()))
        self._own = dataclasses.replace(own, fixed_bytes=own.fixed_bytes - captured.others_bytes + alone_bytes)

    def best(self, budget_bytes: int) -> tuple[tuple[Share, ...], tuple[BlockDecision, ...]] | None:
        """The others' shares under the best plan of all, and the decisions for the graph itself.

        None where no plan keeps the budget, and where a call runs a graph more than once, which no problem of all blocks says.
        """
        if self._shares.repeats:
            return None
        problems = {origin: other.problem for origin, other in self.others.items()} | {self._captured.origin: self._own}
        order = self._shares.in_order(problems)
        excess = max(0, *(other.peak_bytes - other.modelled_bytes for other in self.others.values()))
        problem = joined([problems[origin] for origin in order])
        problem = dataclasses.replace(problem, device_budget_bytes=budget_bytes - excess)
        try:
            plan = solve(problem, time_limit_s=self._captured.options.solver_time_limit_s)
        except InfeasiblePlanError:
            return None
        divided_plan = dict(zip(order, divided([problems[origin] for origin in order], plan.decisions), strict=True))
        shares = tuple(self._share(origin, divided_plan[origin]) for origin in self.others)
        return shares, divided_plan[self._captured.origin]

    def _share(self, origin: Origin, decisions: tuple[BlockDecision, ...]) -> Share:
        other = self.others[origin]
        moved = footprint_of(other.problem, decisions)
        footprint = dataclasses.replace(moved, resident_bytes=moved.resident_bytes + other.small_bytes)
        return Share(digest=other.digest, decisions=decisions, least=other.decisions, footprint=footprint)

    @property
    def least(self) -> tuple[Share, ...]:
        """The others' shares that take least, as they are planned now."""
        return tuple(
            Share(digest=each.digest, decisions=each.decisions, least=each.decisions, footprint=each.footprint)
            for each in self.others.values()
        )

    def beside(self, shares: Sequence[Share]) -> int:
        """Device bytes that others hold while the graph runs, where the unsettled ones get these."""
        return self._taken(self._captured.origin, self._footprints(shares))

    def peak_beside(self, decisions: Sequence[BlockDecision], shares: Sequence[Share]) -> int:
        """The highest peak of the others, in bytes, where each takes least beside these shares of the rest and these decisions.

        A graph whose share turns out to need more than was thought falls back on that. Unread bytes are known only now.
        """
        moved = footprint_of(self._own, decisions)
        resident = moved.resident_bytes + self._captured.small_bytes(training=True)
        own = dataclasses.replace(moved, resident_bytes=resident)
        beside = {**self._footprints(shares), self._captured.origin: own}
        highest = max(other.peak_bytes + self._taken(origin, beside) for origin, other in self.others.items())
        return highest + self._captured.unread_bytes

    def _footprints(self, shares: Sequence[Share]) -> dict[Origin, Footprint]:
        return dict(zip(self.others, (share.footprint for share in shares), strict=True))

    def _taken(self, origin: Origin, instead: Mapping[Origin, Footprint]) -> int:
        return self._shares.taken_by_others(origin, self._passes, instead)
