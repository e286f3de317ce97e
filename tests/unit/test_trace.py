"""Traces: what was planned beside what was recorded."""

import json
from dataclasses import dataclass

import pytest
import torch

from autohete_fx.ir import Lane, LaneRecord
from autohete_fx.report import Trace
from autohete_fx.runtime.steps import StepClock


@dataclass(frozen=True)
class Event:
    lane: Lane
    label: str
    block: int
    start_s: float
    end_s: float


def record(lane: Lane, label: str, begin_s: float, end_s: float, num_bytes: int = 1024) -> LaneRecord:
    return LaneRecord(lane=lane, label=label, priority=0, num_bytes=num_bytes, begin_s=begin_s, end_s=end_s)


PLANNED = (Event(Lane.COMPUTE, "forward", 0, 0.0, 1.0), Event(Lane.H2D, "prefetch", 1, 0.0, 0.5))
TRACE = Trace(
    planned=PLANNED,
    records=(
        record(Lane.H2D, "prefetch", 9.0, 9.5),  # of a step whose begin is not known
        record(Lane.H2D, "prefetch", 10.0, 10.6),
        record(Lane.COMPUTE, "prefetch", 10.5, 10.6),
        record(Lane.H2D, "prefetch", 12.0, 12.8, 3072),
        record(Lane.UPDATE, "update", 13.5, 14.5),  # half of it in the next step
    ),
    steps_s=(10.0, 12.0, 14.0),
)


def test_busy_seconds_are_of_whole_steps():
    assert TRACE.num_steps == 2
    assert TRACE.busy_s(Lane.H2D) == pytest.approx((0.6 + 0.8) / 2)
    assert TRACE.busy_s(Lane.COMPUTE) == pytest.approx(0.1 / 2)
    assert TRACE.busy_s(Lane.UPDATE) == pytest.approx(0.5 / 2)
    assert TRACE.busy_s(Lane.D2H) == 0


def test_steps_whose_records_were_forgotten_do_not_count():
    later = Trace(planned=(), records=TRACE.records[3:], steps_s=(10.0, 12.0, 14.0))
    assert later.num_steps == 1 and later.busy_s(Lane.H2D) == pytest.approx(0.8)


def test_the_table_has_a_row_a_lane_that_works_or_was_to():
    header, _, *rows = TRACE.lanes_table().splitlines()
    assert header.split("  ")[0] == "lane"
    cells = {row.split()[0]: row.split()[1:] for row in rows}
    assert set(cells) == {"h2d"}, "the update ended behind the last whole step"
    assert " ".join(cells["h2d"]) == "500 ms 700 ms 2.00 KiB 50.0 ms"


def test_nothing_measured_yet_is_told_as_such():
    early = Trace(planned=PLANNED, records=(), steps_s=())
    assert early.busy_s(Lane.H2D) is None and early.num_steps == 0
    assert early.lanes_table().splitlines()[-1].split()[-1] == "-"
    assert json.loads(early.to_json())["traceEvents"]


def test_the_file_has_both_processes(tmp_path):
    TRACE.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["name"]) for e in bars} >= {
        (1, "forward 0"),
        (1, "prefetch 1"),
        (2, "prefetch"),
        (2, "update"),
    }
    assert min(e["ts"] for e in bars) == 0 and all(e["dur"] > 0 for e in bars)
    assert [e["ts"] for e in events if e["ph"] == "i"] == [1e6, 3e6, 5e6]


def test_begins_of_steps_stay_begins_when_the_oldest_are_forgotten():
    clock = StepClock(torch.device("cpu"), 3)
    begins = []
    for number in range(400):
        clock.begin_pass()
        begins += [clock._began_s[-1]] if number % 3 == 0 and number >= 3 else []
    assert clock.steps_s == tuple(begins[-len(clock.steps_s) :]) and len(clock.steps_s) >= 80
