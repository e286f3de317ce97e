"""Device memory that the training graphs of one model take beside each other.

Dynamo hands over the graphs of a call one by one, each when it runs first. Those before the last do not know yet with whom they
share, and are planned to take least: they are *unsettled*. When the call is over, or its last graph is there, all are planned
as if they were one graph, and each gets its share. The unsettled ones are compiled again for it.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autohete_fx.compiler.compilation import Footprint, Share
from autohete_fx.ir import BlockDecision, Problem

_MOST_CALLS = 4


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a graph comes from, which tells graphs that run beside each other from one graph compiled again.

    Attributes:
        function: what Dynamo compiled it of, by file and name.
        part: of that function, between two graph breaks.
        parameters: names of those that it reads.
    """

    function: str
    part: str
    parameters: frozenset[str]

    def is_version_of(self, other: "Origin") -> bool:
        """Whether it is the same part of the same code, compiled for another shape or path. Functions with a parameter in common,
        such as a tied weight, are no versions of each other."""
        return self.function == other.function and not self.runs_beside(other)

    def runs_beside(self, other: "Origin") -> bool:
        """Whether one step runs both: other parts of a function, and graphs without a parameter in common, such as a loss that is
        compiled apart. They may come from the same place, such as a decorator of several methods. Any other graph is the same,
        compiled again for another shape or another path through the model. It shares parameters, or both have none and come from
        the same place."""
        if self.function == other.function and self.part != other.part:
            return True
        if not (self.parameters or other.parameters):
            return self.function != other.function
        return self.parameters.isdisjoint(other.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsettled:
    """A graph that is planned to take least.

    Attributes:
        digest: of the graph, its sizes included.
        problem: what its plan solves, as if no other graph took anything.
        decisions: of its plan.
        footprint: what it leaves on the device.
        small_bytes: the part of that which no decision changes.
        modelled_bytes, peak_bytes: its peak without other graphs, as the planner counts and as its code has it.
    """

    digest: str
    problem: Problem
    decisions: tuple[BlockDecision, ...]
    footprint: Footprint
    small_bytes: int
    modelled_bytes: int
    peak_bytes: int


@dataclass(slots=True)
class Shares:
    """The shares of one model's graphs.

    Attributes:
        footprints: what each graph leaves on the device, or will once it is compiled for its share.
        unsettled: the graphs of the first call that take least, in the order of their forwards.
        decided: for those of them that are to be compiled again, what they will take.
        is_call_over: whether all graphs of the first call are known.
        graph_breaks: why graphs of the first call end before their functions, and where.
        num_calls: how many calls were planned like the first one.
        unread: parameters and buffers that no graph read when the last one was compiled.
        times: how often a call runs each graph, where a frame cannot be compiled and the modules that it calls share code.
    """

    footprints: dict[Origin, Footprint] = field(default_factory=dict)
    unsettled: dict[Origin, Unsettled] = field(default_factory=dict)
    decided: dict[Origin, Share] = field(default_factory=dict)
    is_call_over: bool = False
    graph_breaks: list[str] = field(default_factory=list)
    num_calls: int = 1
    unread: tuple[weakref.ref[Tensor], ...] = ()
    times: dict[Origin, int] = field(default_factory=dict)
    _call: weakref.ref[object] | None = None
    _order: list[Origin] = field(default_factory=list)
    _expected: dict[Origin, str] = field(default_factory=dict)
    _call_of_runs: weakref.ref[object] | None = None
    _runs: dict[Origin, int] = field(default_factory=dict)

    def read_by_others(self, graph: Origin) -> frozenset[str]:
        """Names of the parameters that other graphs of a step read, as far as these are known."""
        others = (*self.footprints, *self.unsettled, *self.decided)
        return frozenset[str]().union(*(other.parameters for other in others if graph.runs_beside(other)))

    def taken_by_others(
        self, graph: Origin, micro_batches: int, instead: Mapping[Origin, Footprint] | None = None
    ) -> int:
        """Device bytes that other graphs hold while this one runs; of parameters that they share with it, too.

        In a call, those before it hold their activations, and those after it have their gradients when its backward runs. All that
        is known of graphs of other calls is that a step may run them, too. Where a call runs a graph several times, each of the
        other times takes as much as the first.

        Args:
            instead: of footprints that are noted.
        """
        found = {**self.footprints, **(instead or {})}
        own = found.get(graph, Footprint()).total_bytes * (self.times.get(graph, 1) - 1)
        return own + sum(
            self._beside(graph, other, footprint, micro_batches) * self.times.get(other, 1)
            for other, footprint in found.items()
            if graph.runs_beside(other)
        )

    def least_bytes(self, micro_batches: int) -> int:
        """The highest peak of the graphs of the first call that take least, beside each other; 0 where there are none."""
        return max(
            (found.peak_bytes + self.taken_by_others(graph, micro_batches) for graph, found in self.unsettled.items()),
            default=0,
        )

    def _beside(self, graph: Origin, other: Origin, footprint: Footprint, micro_batches: int) -> int:
        place, place_of_other = self._place_of(graph), self._place_of(other)
        repeats = max(self.times.get(graph, 1), self.times.get(other, 1)) > 1  # both before and after
        if place is None or place_of_other is None or repeats:
            return footprint.total_bytes
        is_before = place_of_other < place
        held = footprint.held_bytes if is_before else 0
        gradients = 0 if is_before and micro_batches == 1 else footprint.gradient_bytes
        return footprint.resident_bytes + held + gradients

    def note_graph(self, graph: Origin, digest: str, graph_break: str, call: object) -> None:
        """A graph is compiled within a call: in the first one, the next that runs.

        A graph of theirs that comes again for other sizes is the first of a call that is planned like the first one. The others
        are likely to come for these sizes, too. That happens `_MOST_CALLS` times at most, because code for earlier sizes is
        forgotten then; afterwards such graphs take least.
        """
        is_new_call = call is None or self._call is None or self._call() is not call
        self._call = None if call is None else weakref.ref(call)
        share = self.decided.get(graph)
        is_expected = digest == (self._expected.get(graph) if share is None else share.digest)
        is_several = len(self._order) > 1
        is_known = self._place_of(graph) is not None
        if self.is_call_over and is_new_call and is_several and is_known and not is_expected:
            self.is_call_over = False
            self.decided.clear()
            self.unsettled.clear()
            self._expected.clear()
            self.num_calls += 1
        if self.is_call_over:
            return
        if not is_known:
            self._order.append(graph)
        if graph_break and graph_break not in self.graph_breaks:
            self.graph_breaks.append(graph_break)

    def note_run(self, graph: Origin, call: object) -> None:
        """A graph runs within a call."""
        if self._call_of_runs is None or self._call_of_runs() is not call:
            self._call_of_runs, self._runs = weakref.ref(call), {}
        self._runs[graph] = self._runs.get(graph, 0) + 1
        self.times[graph] = max(self.times.get(graph, 1), self._runs[graph])

    @property
    def repeats(self) -> bool:
        """Whether a call runs any graph more than once."""
        return any(times > 1 for times in self.times.values())

    def end_call(self) -> list[Origin]:
        """The first call is over. Returns the graphs that are to be compiled again for their shares."""
        self.is_call_over, self._call = True, None
        if self.num_calls > _MOST_CALLS or self.repeats:  # each of the times would get what is left for one
            return []
        # Where none of them knew that it was the last, none is decided. The first that comes again, which its digest tells, is
        # planned with all others.
        are_all = {self._place_of(graph) for graph in self.unsettled}.issuperset(range(len(self._order)))
        self._expected = {graph: found.digest for graph, found in self.unsettled.items() if are_all}
        return [*self.decided, *self._expected]

    def in_order(self, graphs: Iterable[Origin]) -> list[Origin]:
        """Graphs of the first call, and others after them, in the order of their forwards."""

        def place(graph: Origin) -> int:
            found = self._place_of(graph)
            return len(self._order) if found is None else found

        return sorted(graphs, key=place)

    def _place_of(self, graph: Origin) -> int | None:
        """The place of a graph, or of an earlier version of it, in the order of forwards; None where the first call had none."""
        return next((place for place, known in enumerate(self._order) if graph.is_version_of(known)), None)

    def store(self, graph: Origin, footprint: Footprint, unsettled: Unsettled | None) -> None:
        """Replace the notes of earlier versions of this graph."""
        noted: dict[Origin, Any]
        for noted in (self.footprints, self.unsettled, self.decided):
            for other in list(noted):
                if not (graph.runs_beside(other) or graph.parameters.isdisjoint(other.parameters)):
                    del noted[other]
        self.footprints[graph] = footprint
        if unsettled is not None:
            self.unsettled[graph] = unsettled
