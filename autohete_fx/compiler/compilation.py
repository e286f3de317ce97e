"""Compilations: what the backend decided and did for one graph, kept for people to read.

A compilation is plain data and can be stored beside the compiled code. A process that finds the code in a cache finds the same
report. `compilations` lists those of this process, oldest first.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Lane, Optimizer, Plan, Problem, Transfer
from autohete_fx.ir.files import spelled
from autohete_fx.planner.model.device_memory import MemoryLevel
from autohete_fx.planner.model.footprint import Footprint
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.simulation import Event, Simulation
from autohete_fx.planner.sweep import plans_by_budget, undecided_peak_bytes
from autohete_fx.report import tables, timeline
from autohete_fx.report.data import CurvePoint, Measured, ReportData, Stage, begins_with_backward, measured_step
from autohete_fx.report.saved import Report
from autohete_fx.report.trace import Trace
from autohete_fx.report.why import why
from autohete_fx.runtime.steps import StepClock


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphText:
    """One graph as text: as captured, and as rewritten."""

    graph: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The decisions for an earlier graph of a call, made together with the last one.

    Attributes:
        digest: of that graph, its sizes included.
        decisions: one a block.
        least: those that take least, if its code needs more memory under ``decisions`` than was thought.
        footprint: what it leaves on the device under ``decisions``.
    """

    digest: str
    decisions: tuple[BlockDecision, ...]
    least: tuple[BlockDecision, ...]
    footprint: Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """One compiled graph.

    Attributes:
        plan: every decision, and what it predicts.
        training: False for a graph compiled under ``no_grad``.
        device_budget_bytes: the limit that the plan keeps; None for none.
        owners: block index by parameter name.
        moved: where the optimizer states are that leave the device, by parameter name.
        footprint: what it holds on the device beside other graphs.
        between_bytes: of what the graph computes, on the device when its forward has returned.
        shares: of earlier graphs of its call, in their order; empty where they stay as they are.
        unsettled: where the plan takes least because later graphs of the call are not known yet: what it solves.
        graphs: texts of the forward and backward, or of the inference graph.
        transfers: inserted copies in schedule order.
        problem: what the plan solves; None where nobody kept it.
        events: the predicted timeline of a step.
        levels: the predicted device memory over it.
        number: which of its process's training graphs it is, from 1 on; 0 where it did not run.
        notes: what a user should know, such as that a plain optimizer's states were counted on the device.
        profile_source: where costs came from.
        compile_s: seconds by stage: grouping, profiling, solving, rewriting (of a training graph), and ``total``, code generation
            included (of one that was not just explained). Compilations whose code was above the budget are counted too.
        cached: whether this process found it in the cache.
        clock: what times its training steps in this process; not part of the stored compilation.
    """

    plan: Plan
    training: bool
    device_budget_bytes: int | None
    owners: Mapping[str, int]
    moved: Mapping[str, Optimizer] = field(default_factory=dict)
    footprint: Footprint = field(default_factory=Footprint)
    between_bytes: int = 0
    shares: tuple[Share, ...] = ()
    unsettled: Problem | None = None
    graphs: tuple[GraphText, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    problem: Problem | None = None
    events: tuple[Event, ...] = ()
    levels: tuple[MemoryLevel, ...] = ()
    number: int = 0
    notes: tuple[str, ...] = ()
    profile_source: str = ""
    compile_s: Mapping[str, float] = field(default_factory=dict)
    cached: bool = False
    clock: StepClock | None = field(default=None, compare=False, repr=False)

    @property
    def predicted_step_s(self) -> float:
        """Predicted seconds of one optimizer step."""
        return self.plan.step_s

    @property
    def predicted_peak_bytes(self) -> int:
        """Predicted peak device memory of a step."""
        return self.plan.peak_bytes

    @property
    def measured_step_s(self) -> float | None:
        """Median seconds of the steps trained so far, from one forward pass to the next; None before the third."""
        return None if self.clock is None else self.clock.step_s

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak device memory of this process since it was last reset, in bytes; where a report is written, of the steps that ended.

        It is None where nobody counts it, as on a CPU device in a process that never opened an `autohete_fx.MemoryMeter`.
        """
        return None if self.clock is None else self.clock.peak_bytes

    def comparison_table(self) -> str:
        """Prediction and measurement so far, side by side."""
        rows = [
            tables.ComparisonRow(name="measured", step_s=self.measured_step_s, peak_bytes=self.measured_peak_bytes),
            tables.ComparisonRow(name="predicted", step_s=self.predicted_step_s, peak_bytes=self.predicted_peak_bytes),
        ]
        return tables.comparison_table(rows, baseline="measured")

    def trace(self) -> Trace:
        """The lanes, as planned for a step and as recorded in this process; empty records for a graph that did not run."""
        records, steps_s = ((), ()) if self.clock is None else (self.clock.records(), self.clock.steps_s)
        return Trace(planned=self.events, records=records, steps_s=steps_s)

    def report(self) -> Report:
        """Everything so far as a page with pictures: ``.save(directory)`` writes it, a notebook shows it. The first call solves for
        a few other budgets, which takes seconds."""
        return Report(
            data=self._report_data(),
            graphs={f"{g.graph}.{at}.txt": getattr(g, at) for g in self.graphs for at in ("before", "after")},
            trace=self.trace(),
        )

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def _report_data(self) -> ReportData:
        return ReportData(
            device_name=self.problem.machine.device_name if self.problem else "an unknown device",
            torch_version=torch.__version__,
            training_graph=max(1, self.number),
            budget_bytes=self.device_budget_bytes,
            plan=self.plan,
            events=self.events,
            levels=self.levels,
            curve=() if self.problem is None else _curve(self.problem, self.plan),
            step=self._measured_step(),
            steps=() if self.clock is None else self.clock.step_records,
            measured_step_s=self.measured_step_s,
            measured_peak_bytes=self.measured_peak_bytes,
            notes=self.notes,
            profile_source=self.profile_source,
            compile_s=tuple(Stage(name=name, seconds=seconds) for name, seconds in self.compile_s.items()),
        )

    def _measured_step(self) -> Measured | None:
        if self.clock is None:
            return None
        recorder = self.clock.recorder
        run = self.clock.recent() if recorder is None or recorder.traced is None else recorder.traced
        return measured_step(
            run.begins_s,
            run.first_number,
            run.passes,
            run.records,
            run.memory,
            from_backward=begins_with_backward(self.events),
        )

    def plan_table(self) -> str:
        """The decisions as a table."""
        gathers = [each for each in self.transfers if each.op == "gather"]
        again = {each.block for each in gathers if each.graph == "backward"}
        return tables.plan_table(self.plan, gathered_again=again, gathered={each.block for each in gathers})

    def why(self) -> str:
        """Why the plan decides so, in words: see `autohete_fx.report.why`."""
        return why(self.plan)

    def transfers_table(self) -> str:
        """The inserted copies in schedule order."""
        return tables.transfers_table(self.transfers)

    def timeline(self, width: int = 100) -> str:
        """The predicted lanes of one step as text."""
        return timeline.render_timeline(self.events, width=width)

    def readable(self, graph: str, *, before: bool = False) -> str:
        """The ``forward``, ``backward`` or ``inference`` graph as text; inserted nodes show lane, priority, bytes and block."""
        for text in self.graphs:
            if text.graph == graph:
                return text.before if before else text.after
        raise KeyError(f"this compilation has no {graph!r} graph, it has {[text.graph for text in self.graphs]}")

    def __str__(self) -> str:
        kind = "training" if self.training else "inference"
        parts = [f"autohete {kind} graph", self.plan_table(), *(f"note: {note}" for note in self.notes)]
        if self.measured_step_s is not None:
            parts.append(self.comparison_table())
        return "\n".join(parts)

    def to_json(self) -> str:
        """As JSON text; `from_json` gives it back."""
        raw = dataclasses.asdict(dataclasses.replace(self, clock=None))
        del raw["clock"]
        raw["plan"] = self.plan.to_json()
        return json.dumps(raw, default=lambda value: value.value)

    @staticmethod
    def from_json(text: str) -> "Compilation":
        """Read what `to_json` wrote; ``cached`` becomes True. Raises ValueError, KeyError or TypeError on anything else."""
        raw = json.loads(text)
        raw["plan"] = Plan.from_json(raw["plan"])
        raw["moved"] = {name: Optimizer(place) for name, place in raw["moved"].items()}
        raw["footprint"] = Footprint(**raw["footprint"])
        raw["shares"] = tuple(spelled(Share, share) for share in raw["shares"])
        raw["unsettled"] = None if raw["unsettled"] is None else spelled(Problem, raw["unsettled"])
        raw["graphs"] = tuple(GraphText(**g) for g in raw["graphs"])
        raw["transfers"] = tuple(Transfer(**{**t, "lane": Lane(t["lane"])}) for t in raw["transfers"])
        raw["problem"] = None if raw["problem"] is None else spelled(Problem, raw["problem"])
        raw["events"] = tuple(spelled(Event, event) for event in raw["events"])
        raw["levels"] = tuple(spelled(MemoryLevel, level) for level in raw["levels"])
        raw["notes"] = tuple(raw["notes"])
        raw["cached"] = True
        return Compilation(**raw)


_compilations: list[Compilation] = []
_KEPT = 64


def record(compilation: Compilation) -> None:
    """Add to the process's list, dropping the oldest beyond 64."""
    _compilations.append(compilation)
    del _compilations[:-_KEPT]


def compilations() -> list[Compilation]:
    """The compilations of this process, oldest first (the last 64)."""
    return list(_compilations)


def replayed(problem: Problem, plan: Plan) -> Simulation:
    """The predicted step, with the timeline of its lanes and of its memory."""
    return simulate(dataclasses.replace(problem, schedule=plan.schedule), plan.decisions)


_CURVE_POINTS, _CURVE_LIMIT_S = 6, 1.0
"""Budgets of a report's curve, and the seconds that the solver may take for each."""


@functools.lru_cache(maxsize=8)
def _curve(problem: Problem, plan: Plan) -> tuple[CurvePoint, ...]:
    """Step time over budget. Budgets are the planner's, and as much more as the plan's code takes than the planner counts. Empty
    where nothing fits the device as the planner counts."""
    free = dataclasses.replace(problem, schedule=plan.schedule)
    more_bytes = plan.peak_bytes - simulate(free, plan.decisions, events=False).peak_bytes
    largest = min(undecided_peak_bytes(free), free.machine.device_bytes)
    try:
        solved = list(
            plans_by_budget(free, largest_bytes=largest, num_points=_CURVE_POINTS, time_limit_s=_CURVE_LIMIT_S)
        )
    except InfeasiblePlanError:
        return ()
    return tuple(
        CurvePoint(budget_bytes=(here.device_budget_bytes or 0) + more_bytes, step_s=found.step_s)
        for here, found in solved
    )
