"""Device memory that the training graphs of one model take beside each other.

Dynamo hands over the graphs of a call one by one, each when it runs first. Those before the last do not know yet with whom they
share, and are planned to take least: they are *unsettled*. When the call is over, or its last graph is there, all are planned
as if they were one graph, and each gets its share. The unsettled ones are compiled again for it.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
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
        parameters: names of those that it reads, within the function's module: graphs of layers that share code are one.
        tensors: identities of these, which tell apart functions of modules whose parameters have the same names.
    """

    function: str
    part: str
    parameters: frozenset[str]
    tensors: frozenset[int] = field(default=frozenset(), compare=False)

    def may_run_beside(self, other: "Origin") -> bool:
        """Whether one step may run both, as far as can be told before they run. These are other parts of a function, and graphs
        without a parameter in common, such as a loss that is compiled apart.

        They may come from the same place, such as a decorator of several methods. Any other graph may be the same, compiled again
        for another shape or another path through the model. It shares parameters, or both have none and come from the same place.
        """
        if self.function == other.function and self.part != other.part:
            return True
        if not (self.parameters or other.parameters):
            return self.function != other.function
        return not self.shares_with(other)

    def shares_with(self, other: "Origin") -> bool:
        """Whether both read a parameter. In one function, that is one of the same name."""
        if self.function != other.function and self.tensors and other.tensors:
            return not self.tensors.isdisjoint(other.tensors)
        return not self.parameters.isdisjoint(other.parameters)


@dataclass(eq=False, slots=True, kw_only=True, weakref_slot=True)
class Run:
    """A forward of a graph, which lives as long as autograd may run its backward.

    Attributes:
        graph: that runs.
        footprint: what the graph leaves on the device.
        call: within which it runs; None outside of calls.
        parameters: identities of those that it is called with.
        is_over: whether its backward has run, or never will, as its call has failed.
    """

    graph: Origin
    footprint: Footprint
    call: weakref.ref[object] | None = None
    parameters: tuple[int, ...] = ()
    is_over: bool = False

    def end(self) -> None:
        """No backward is to come."""
        self.is_over = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How often a call runs a graph.

    Attributes:
        modules: with how many sets of parameters, as where layers share code.
        waiting: the most runs whose backward is yet to come.
        accumulates: whether a run finds gradients of an earlier one that its plan does not count.
    """

    modules: int = 1
    waiting: int = 1
    accumulates: bool = False


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
        eager_bytes: gradients and optimizer states of those of them that eager code trains.
        times: how often a call runs each graph, such as that of a layer where the function of their loop cannot be compiled.
        has_trained: whether a backward has run since the first call began.
        is_outdated: whether graphs were planned as if no step ran both, or as if a call ran each once, and one has done otherwise.
    """

    footprints: dict[Origin, Footprint] = field(default_factory=dict)
    unsettled: dict[Origin, Unsettled] = field(default_factory=dict)
    decided: dict[Origin, Share] = field(default_factory=dict)
    is_call_over: bool = False
    graph_breaks: list[str] = field(default_factory=list)
    num_calls: int = 1
    unread: tuple[weakref.ref[Tensor], ...] = ()
    eager_bytes: int = 0
    times: dict[Origin, Times] = field(default_factory=dict)
    has_trained: bool = False
    is_outdated: bool = False
    _before: frozenset[str] = frozenset()
    _met: set[frozenset[Origin]] = field(default_factory=set)
    _waiting: weakref.WeakSet[Run] = field(default_factory=weakref.WeakSet)
    _call: weakref.ref[object] | None = None
    _order: list[Origin] = field(default_factory=list)
    _expected: dict[Origin, str] = field(default_factory=dict)
    _call_of_runs: weakref.ref[object] | None = None
    _runs: dict[Origin, set[tuple[int, ...]]] = field(default_factory=dict)

    def afresh(self) -> "Shares":
        """The shares of a model whose graphs are all planned again. Known are their functions, which run beside each other, and how
        often a call runs them."""
        known = {graph.function for graph in (*self._order, *self.footprints)}
        return Shares(times=self.times, _met=self._met, _waiting=self._waiting, _before=self._before | known)

    def awaits_others(self, graph: Origin) -> bool:
        """Whether the model had graphs of another function before all were planned again, and that has none yet."""
        return bool(self._before - {known.function for known in (graph, *self._order, *self.footprints)})

    def runs_beside(self, graph: Origin, other: Origin) -> bool:
        """Whether one step runs both, which shows for some only when they do: functions that read a tied weight, for example."""
        return graph.may_run_beside(other) or frozenset((graph, other)) in self._met

    def read_by_others(self, graph: Origin) -> frozenset[str]:
        """Names of the parameters that other graphs of a step read, as far as these are known."""
        others = (*self.footprints, *self.unsettled, *self.decided)
        return frozenset[str]().union(*(other.parameters for other in others if self.runs_beside(graph, other)))

    def taken_by_others(
        self, graph: Origin, micro_batches: int, instead: Mapping[Origin, Footprint] | None = None
    ) -> int:
        """Device bytes that other graphs hold while this one runs; of parameters that they share with it, too.

        In a call, those before it hold their activations, and those after it have their gradients when its backward runs. All that
        is known of graphs of other calls is that a step may run them, too. A call may run a graph several
        times. Each run holds its activations until its backward, and each set of parameters is there with states and gradients.

        Args:
            instead: of footprints that are noted.
        """
        found = {**self.footprints, **(instead or {})}
        times, own = self._times_of(graph), found.get(graph, Footprint())
        accumulates = micro_batches == 1 and (times.accumulates or times.waiting > times.modules)
        earlier = own.gradient_bytes if accumulates else 0
        other_runs = _of_all_runs(own, times).total_bytes - own.total_bytes
        return (
            other_runs
            + earlier
            + sum(
                self._beside(graph, other, _of_all_runs(footprint, self._times_of(other)), micro_batches)
                for other, footprint in found.items()
                if self.runs_beside(graph, other)
            )
        )

    def least_bytes(self, micro_batches: int) -> int:
        """The highest peak of the graphs of the first call that take least, beside each other; 0 where there are none."""
        return max(
            (found.peak_bytes + self.taken_by_others(graph, micro_batches) for graph, found in self.unsettled.items()),
            default=0,
        )

    def _beside(self, graph: Origin, other: Origin, footprint: Footprint, micro_batches: int) -> int:
        place, place_of_other = self._place_of(graph), self._place_of(other)
        repeats = {self._times_of(graph), self._times_of(other)} != {Times()}  # both before and after
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
        self._meet(graph)
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
            self.has_trained = False
            self.num_calls += 1
        if self.is_call_over:
            return
        if not is_known:
            self._order.append(graph)
        if graph_break and graph_break not in self.graph_breaks:
            self.graph_breaks.append(graph_break)

    def note_run(self, run: Run, finds_gradients: Callable[[], bool]) -> None:
        """A graph runs.

        Args:
            finds_gradients: whether its parameters have gradients that its plan does not count.
        """
        graph = run.graph
        self.is_outdated |= self._meet(graph)
        self._waiting.add(run)
        if run.call is None:
            return
        if self._call_of_runs != run.call:
            self._call_of_runs, self._runs = run.call, {}
        seen, times = self._runs.setdefault(graph, set()), self._times_of(graph)
        accumulates = run.parameters in seen and finds_gradients()
        seen.add(run.parameters)
        waiting = [other for other in self._waiting if other.graph == graph and other.call == run.call]
        repeated = self.repeats
        self.times[graph] = Times(
            modules=max(times.modules, len(seen)),
            waiting=max(times.waiting, sum(not other.is_over for other in waiting)),
            accumulates=times.accumulates or accumulates,
        )
        self.is_outdated |= self.is_call_over and self.repeats and not repeated

    @property
    def is_step_over(self) -> bool:
        """Whether all forwards of the first call's step have run, as far as can be told: a backward has run, or none is to come."""
        return self.has_trained or not self.is_waiting

    @property
    def is_waiting(self) -> bool:
        """Whether the backward of any run is yet to come."""
        return any(not run.is_over for run in self._waiting)

    def note_backward(self, run: Run) -> int:
        """The backward of a run is over. Returns how many calls had run the graph, with the same parameters, whose backward was yet
        to come when it began."""
        alike = (r for r in self._waiting if (r.graph, r.parameters) == (run.graph, run.parameters))
        calls = {id(other.call or other) for other in alike if not other.is_over}  # runs of one call share a reference
        run.is_over = self.has_trained = True
        return len(calls)

    def _meet(self, graph: Origin) -> bool:
        """Note that the graph runs beside those whose backward is yet to come. Returns whether that is news of any of them."""
        news = {
            run
            for run in self._waiting
            if not (run.is_over or run.graph == graph or self.runs_beside(graph, run.graph))
        }
        for run in news:
            self._met.add(frozenset((graph, run.graph)))
            self.footprints.setdefault(run.graph, run.footprint)  # it may be noted as a version of the graph
        return bool(news)

    @property
    def repeats(self) -> bool:
        """Whether a call runs any graph more than once."""
        return any(times != Times() for times in self.times.values())

    @property
    def accumulates(self) -> bool:
        """Whether a call runs a graph beside gradients of an earlier run that its plan does not count."""
        return any(times.accumulates for times in self.times.values())

    def _times_of(self, graph: Origin) -> Times:
        return self.times.get(graph, Times())

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
        """The place of a graph, or of an earlier version of it, in the order of forwards; None where the first call had none.

        A version is of the same part of the same code. Other functions that read a tied weight are none.
        """
        versions = (
            place
            for place, known in enumerate(self._order)
            if graph.function == known.function and not self.runs_beside(graph, known)
        )
        return next(versions, None)

    def store(self, graph: Origin, footprint: Footprint, unsettled: Unsettled | None) -> None:
        """Replace the notes of earlier versions of this graph."""
        noted: dict[Origin, Any]
        for noted in (self.footprints, self.unsettled, self.decided):
            for other in list(noted):
                if graph.shares_with(other) and not self.runs_beside(graph, other):
                    del noted[other]
        self.footprints[graph] = footprint
        if unsettled is not None:
            self.unsettled[graph] = unsettled


def _of_all_runs(footprint: Footprint, times: Times) -> Footprint:
    return Footprint(
        resident_bytes=footprint.resident_bytes * times.modules,
        held_bytes=footprint.held_bytes * times.waiting,
        gradient_bytes=footprint.gradient_bytes * times.modules,
    )
