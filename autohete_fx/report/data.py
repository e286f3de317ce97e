"""The data of a report: what was predicted of a training graph's steps and what was measured, as one value.

In: a compilation's plan, its replay, and records of steps that ran. Out: a `ReportData`, saved as a versioned JSON file, from which
the page is drawn again at any time. Every figure of the page stands here; what was not measured is None or empty.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autohete_fx.errors import ReportError
from autohete_fx.ir import Lane, LaneRecord, MemoryRecord, PassRecord, Plan, StepRecord
from autohete_fx.ir.files import SavedAs, check_numbers, spelled
from autohete_fx.ir.plan import DIFFERENCES
from autohete_fx.planner.model.device_memory import MemoryLevel
from autohete_fx.planner.model.simulation import Event

REPORT_VERSION = 1

PROGRAM = ("forward", "backward", "between")
"""The labels of measured bars of the program's own work, which stand on the lane compute."""
HELD = "held"
"""The beginning of the labels of measured bars for which a wait held the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Measured work of a lane, in seconds since the measured step began, as `Event` is planned work.

    Attributes:
        lane: on the compute lane stand passes of the program, and times for which a wait held it.
        label: ``forward``, ``backward`` or ``between`` for passes, ``held: prefetch`` for waits, else as `LaneRecord` has it.
        num_bytes: that were moved.
    """

    lane: Lane
    label: str
    start_s: float
    end_s: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The fastest plan that was found for a device budget.

    Attributes:
        budget_bytes: as the compiled code would take it.
        step_s: predicted.
    """

    budget_bytes: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Seconds that a stage of the compilation took."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One step as it ran.

    Attributes:
        number: of the step, from 0 on.
        step_s: its seconds.
        bars: what its lanes did.
        memory: what was live over it, times in seconds since it began; empty where that was not recorded.
    """

    number: int
    step_s: float
    bars: tuple[Bar, ...]
    memory: tuple[MemoryRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything that a report shows.

    Attributes:
        device_name: of the machine that was planned for.
        torch_version: that compiled.
        training_graph: which of the process's training graphs it is, from 1 on.
        budget_bytes: the limit that the plan keeps; None for none.
        plan: every decision, and what it predicts.
        events: the predicted lanes of a step.
        levels: predicted device memory over that step, as the planner adds it up.
        curve: step time over budget, by rising budget; empty where nobody solved for it.
        step: the latest step whose lanes were recorded; None before there is one.
        steps: the steps that were timed.
        measured_step_s, measured_peak_bytes: the median of the steps but the first, and the most that was measured; None where
            there is none.
        notes: of the compilation.
        profile_source: where costs came from.
        compile_s: by stage.
    """

    device_name: str
    torch_version: str
    training_graph: int
    budget_bytes: int | None
    plan: Plan
    events: tuple[Event, ...]
    levels: tuple[MemoryLevel, ...]
    curve: tuple[CurvePoint, ...]
    step: Measured | None
    steps: tuple[StepRecord, ...]
    measured_step_s: float | None
    measured_peak_bytes: int | None
    notes: tuple[str, ...]
    profile_source: str
    compile_s: tuple[Stage, ...]
    schema_version: int = REPORT_VERSION

    @property
    def peak_level(self) -> MemoryLevel | None:
        """The moment at which the planner counts most."""
        return max(self.levels, key=lambda level: level.num_bytes, default=None)

    @property
    def begins_with_backward(self) -> bool:
        """Whether the step is shown from its backward on, up to the end of the next forward, which updates overlap."""
        return begins_with_backward(self.events)

    def to_json(self) -> str:
        """As JSON text; `from_json` gives back an equal value."""
        return json.dumps(asdict(self), default=lambda value: value.value) + "\n"

    @staticmethod
    def from_json(text: str) -> "ReportData":
        """Read the data of a report. Raises ReportError where the text is none, or of another schema version."""
        return _FILES.parse(text, _data_of)

    @staticmethod
    def load(path: str | Path) -> "ReportData":
        """Read a file. Raises ReportError, which names it, where there is none or it is damaged."""
        return _FILES.load(path, ReportData.from_json)


_SIGNED = (*DIFFERENCES, "block", "at_s", "start_s", "end_s")
"""Entries that may be below 0: work may be of no block, and a time before the step's begin."""


def _data_of(raw: dict[str, Any]) -> ReportData:
    data = spelled(ReportData, raw)
    check_numbers("", raw, _SIGNED)
    times = {"measured_step_s": data.measured_step_s, "step_s of step": data.step and data.step.step_s}
    if data.events or data.levels:
        times["step_s of plan"] = data.plan.step_s
    for name, seconds in times.items():
        if seconds == 0:
            raise ValueError(f"{name} is 0; expected seconds above 0")
    blocks = [each.block for each in (*data.events, *data.levels)]
    if blocks and not -1 <= min(blocks) <= max(blocks) < len(data.plan.labels):
        raise ValueError(f"block is {max(blocks, key=abs)}; expected one of the plan's {len(data.plan.labels)}")
    return data


_FILES = SavedAs(
    kind="report",
    writer="Report.save",
    again="write the report again",
    schema_version=REPORT_VERSION,
    error=ReportError,
)


def begins_with_backward(events: Sequence[Event]) -> bool:
    """Whether a replayed step begins after a forward."""
    first = next((event for event in events if event.lane is Lane.COMPUTE), None)
    return first is not None and first.label != "forward"


def measured_step(
    steps_s: Sequence[float],
    first_number: int,
    passes: Sequence[PassRecord],
    records: Sequence[LaneRecord],
    memory: Sequence[MemoryRecord],
    *,
    from_backward: bool,
) -> Measured | None:
    """The latest whole step of which everything is known.

    Args:
        steps_s: begins of steps, one after the other.
        first_number: of the first of them.
        passes, records, memory: by time.
        from_backward: whether a step is to begin when its first forward ends.
    """
    begins = list(steps_s)
    if from_backward:
        ends = [p.end_s for p in passes if p.label == "forward"]
        begins = [next((end_s for end_s in ends if end_s > begin_s), None) for begin_s in steps_s]
    known = [(first_number + i, begin_s) for i, begin_s in enumerate(begins) if begin_s is not None]
    oldest_s = max(min((p.begin_s for p in passes), default=0.0), memory[0].at_s if memory else 0.0)
    for (number, begin_s), (_, end_s) in reversed(list(itertools.pairwise(known))):
        if begin_s < oldest_s or (memory and memory[-1].at_s < begin_s):
            continue
        return Measured(
            number=number,
            step_s=end_s - begin_s,
            bars=tuple(_bars(begin_s, end_s, passes, records)),
            memory=_memory(begin_s, end_s, memory),
        )
    return None


def _bars(begin_s: float, end_s: float, passes: Sequence[PassRecord], records: Sequence[LaneRecord]) -> list[Bar]:
    def bar(lane: Lane, label: str, start_s: float, stop_s: float, num_bytes: int = 0) -> Bar:
        return Bar(
            lane=lane,
            label=label,
            start_s=max(start_s, begin_s) - begin_s,
            end_s=min(stop_s, end_s) - begin_s,
            num_bytes=num_bytes,
        )

    inside = sorted((p for p in passes if p.end_s > begin_s and p.begin_s < end_s), key=lambda p: p.begin_s)
    found, at_s = [], begin_s
    for each in inside:
        if each.begin_s > at_s:
            found.append(bar(Lane.COMPUTE, "between", at_s, each.begin_s))
        found.append(bar(Lane.COMPUTE, each.label, each.begin_s, each.end_s))
        at_s = max(at_s, each.end_s)
    if at_s < end_s:
        found.append(bar(Lane.COMPUTE, "between", at_s, end_s))
    for record in records:
        if record.end_s > begin_s and record.begin_s < end_s:
            label = f"{HELD}: {record.label}" if record.lane is Lane.COMPUTE else record.label
            found.append(bar(record.lane, label, record.begin_s, record.end_s, record.num_bytes))
    return found


def _memory(begin_s: float, end_s: float, memory: Sequence[MemoryRecord]) -> tuple[MemoryRecord, ...]:
    before = [record for record in memory if record.at_s <= begin_s]
    inside = [record for record in memory if begin_s < record.at_s < end_s]
    first = [MemoryRecord(at_s=0.0, num_bytes=before[-1].num_bytes)] if before else []
    return (*first, *(MemoryRecord(at_s=r.at_s - begin_s, num_bytes=r.num_bytes) for r in inside))
