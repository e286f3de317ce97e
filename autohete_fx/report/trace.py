"""The lanes' plan and their records side by side, for a table or a trace viewer.

In: the planned events of one step, the records of the runtime, and when measured steps began. Out: a table of lanes, and
Chrome's trace format, which Perfetto (https://ui.perfetto.dev) opens.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autohete_fx.ir import Lane, LaneRecord
from autohete_fx.ir.files import write_text
from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.report.tables import aligned
from autohete_fx.report.timeline import LaneEvent

_PLANNED, _MEASURED = 1, 2
_PROCESSES = {_PLANNED: "planned", _MEASURED: "measured"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The lanes of a training graph.

    Attributes:
        planned: events of one step, which begins at 0.
        records: what ended since the runtime began to forget (the latest 8192), by end.
        steps_s: begin of every step that was timed, in seconds of ``time.perf_counter``; the last one has no end yet.
    """

    planned: Sequence[LaneEvent]
    records: Sequence[LaneRecord]
    steps_s: Sequence[float]

    @property
    def num_steps(self) -> int:
        """Whole steps that the records cover."""
        return max(0, len(self._covered()) - 1)

    def _covered(self) -> list[float]:
        """Begins of the steps of which no record was forgotten."""
        if not self.records:
            return list(self.steps_s)
        oldest_s = min(record.begin_s for record in self.records)
        later = [begin_s for begin_s in self.steps_s if begin_s >= oldest_s]
        return later if len(later) > 1 else list(self.steps_s[-2:])

    def busy_s(self, lane: Lane) -> float | None:
        """Measured seconds a step for which a lane worked, and the program was held on `Lane.COMPUTE`; None before the
        second step that was timed."""
        if not self.num_steps:
            return None
        covered = self._covered()
        inside = (_overlap_s(record, covered[0], covered[-1]) for record in self.records if record.lane is lane)
        return sum(inside) / self.num_steps

    def lanes_table(self) -> str:
        """A row a lane: seconds a step, as planned and as measured, what was moved, and how it was held up."""
        rows = []
        covered = self._covered()
        for lane in Lane:
            planned_s = sum(event.end_s - event.start_s for event in self.planned if event.lane is lane)
            records = [r for r in self.records if r.lane is lane and covered and covered[0] <= r.end_s <= covered[-1]]
            if lane is Lane.COMPUTE or not (planned_s or records):
                continue
            held_s = sum(r.end_s - r.begin_s for r in self._waits() if r.label in _labels(records))
            per_step = sum(record.num_bytes for record in records) // max(1, self.num_steps)
            rows.append(
                [
                    lane.value,
                    format_seconds(planned_s),
                    "-" if self.busy_s(lane) is None else format_seconds(self.busy_s(lane) or 0.0),
                    format_bytes(per_step),
                    "-" if not self.num_steps else format_seconds(held_s / self.num_steps),
                ]
            )
        header = ["lane", "planned a step", "measured a step", "bytes a step", "compute held"]
        return aligned(header, rows, right_from=1)

    def _waits(self) -> list[LaneRecord]:
        covered = self._covered()
        return [r for r in self.records if r.lane is Lane.COMPUTE and covered and covered[0] <= r.end_s <= covered[-1]]

    def to_json(self) -> str:
        """Chrome's trace format: process 1 is the planned step, process 2 all that was recorded; a thread a lane."""
        events = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in _PROCESSES.items()
        ]
        events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane.index, "args": {"name": lane.value}}
            for pid in _PROCESSES
            for lane in Lane
        ]
        for event in self.planned:
            name, begin_s, end_s = f"{event.label} {event.block}", event.start_s, event.end_s
            events.append(_bar(_PLANNED, event.lane, name, begin_s, end_s, {"block": event.block}))
        origin_s = min([*self.steps_s, *(r.begin_s for r in self.records)], default=0.0)
        for record in self.records:
            details = {"bytes": record.num_bytes, "priority": record.priority}
            begin_s, end_s = record.begin_s - origin_s, record.end_s - origin_s
            events.append(_bar(_MEASURED, record.lane, record.label, begin_s, end_s, details))
        for number, begin_s in enumerate(self.steps_s):
            mark = {"ph": "i", "s": "p", "name": f"step {number}", "pid": _MEASURED, "tid": Lane.COMPUTE.index}
            events.append({**mark, "ts": (begin_s - origin_s) * 1e6})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to a file, all at once. Raises OSError where it cannot be written."""
        write_text(path, self.to_json())


def _bar(pid: int, lane: Lane, name: str, begin_s: float, end_s: float, details: dict[str, int]) -> dict[str, object]:
    times = {"ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}
    return {"ph": "X", "pid": pid, "tid": lane.index, "name": name, **times, "args": details}


def _labels(records: Iterable[LaneRecord]) -> set[str]:
    return {record.label for record in records}


def _overlap_s(record: LaneRecord, begin_s: float, end_s: float) -> float:
    return max(0.0, min(record.end_s, end_s) - max(record.begin_s, begin_s))
