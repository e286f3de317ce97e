"""What is recorded of steps: the peak of each, memory over those that are traced, and nothing that meters of others would miss."""

import gc
import time
from pathlib import Path

import pytest
import torch

from autohete_fx.internals import memory_history
from autohete_fx.ir import PassRecord, StepRecord
from autohete_fx.report.data import measured_step
from autohete_fx.runtime import recorder as recorders
from autohete_fx.runtime.meter import MemoryMeter, device_live_bytes
from autohete_fx.runtime.recorder import StepRecorder, StepsRun
from autohete_fx.runtime.steps import StepClock

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture(autouse=True)
def _settled() -> None:
    device_live_bytes("cpu")
    gc.collect()


def mib(n: int) -> torch.Tensor:
    return torch.empty(n * MIB, dtype=torch.uint8)


def run(recorder: StepRecorder, sizes: list[int]) -> None:
    """Steps that each allocate so much for a while, and the begin of one more."""
    for number, size in enumerate(sizes):
        recorder.begin_step(number, StepsRun)
        held = mib(size)
        time.sleep(0.005)
        del held
        time.sleep(0.002)
    recorder.begin_step(len(sizes), StepsRun)


def test_each_step_has_its_own_peak():
    ended: list[StepRecord] = []
    recorder = StepRecorder(CPU, ended.append, lambda: None)
    before = device_live_bytes(CPU)
    with MemoryMeter(CPU) as around:
        run(recorder, [9, 2, 5])
    assert [step.number for step in ended] == [0, 1, 2] == [step.number for step in recorder.steps]
    assert [step.peak_bytes - before for step in ended if step.peak_bytes] == [9 * MIB, 2 * MIB, 5 * MIB]
    assert recorder.peak_bytes - before == around.peak_bytes - before == 9 * MIB, "the user's meter sees all"
    assert all(0.006 < step.step_s < 5 for step in ended)
    recorder.close()
    recorder.close()


def test_memory_is_traced_over_two_steps():
    traced: list[int] = []
    recorder = StepRecorder(CPU, lambda step: None, lambda: traced.append(len(recorder.steps)))
    before = device_live_bytes(CPU)
    run(recorder, [9, 2, 5])
    recorder.close()
    assert traced == [3] and recorder.traced is not None
    levels = [record.num_bytes - before for record in recorder.traced.memory]
    assert max(levels) == 5 * MIB and 2 * MIB in levels and levels[-1] == 0
    times = [record.at_s for record in recorder.traced.memory]
    assert times == sorted(times) and times[-1] <= time.perf_counter()


def test_the_time_of_a_report_is_not_that_of_a_step(monkeypatch: pytest.MonkeyPatch):
    clock = StepClock(CPU, 1)
    clock.recorder = StepRecorder(CPU, lambda step: None, lambda: time.sleep(0.3))
    for _ in range(6):
        clock.begin_pass()
    assert clock.step_s is not None and clock.step_s < 0.1
    assert all(step.step_s < 0.1 for step in clock.step_records if step.number)
    assert clock.peak_bytes == clock.recorder.peak_bytes
    with MemoryMeter("cpu"):
        torch.empty(8 * MIB, dtype=torch.uint8)  # of another model: not of these steps
    assert clock.peak_bytes == clock.recorder.peak_bytes


def test_steps_without_a_recorder_are_numbered():
    clock = StepClock(CPU, micro_batches=2)
    for _ in range(9):
        clock.begin_pass()
        clock.end_pass("forward", time.perf_counter())
    assert [step.number for step in clock.step_records] == [1, 2, 3] and clock.first_step == 1
    assert all(step.peak_bytes is None for step in clock.step_records)
    assert len(clock.recent().passes) == 9 and len(clock.recent().begins_s) == 4


def forward(begin_s: float, end_s: float) -> PassRecord:
    return PassRecord(label="forward", begin_s=begin_s, end_s=end_s)


def test_a_step_may_begin_where_its_forward_ends():
    passes = (forward(10.0, 11.0), forward(20.0, 22.0), forward(30.0, 31.0))
    found = measured_step((10.0, 20.0, 30.0), 1, passes, (), (), from_backward=True)
    assert found is not None and (found.number, found.step_s) == (2, 9.0)
    assert [(bar.label, bar.start_s, bar.end_s) for bar in found.bars] == [("between", 0.0, 8.0), ("forward", 8.0, 9.0)]
    found = measured_step((10.0, 20.0, 30.0), 1, passes, (), (), from_backward=False)
    assert found is not None and (found.number, found.step_s) == (2, 10.0)
    assert [bar.label for bar in found.bars] == ["forward", "between"]
    assert measured_step((10.0,), 1, passes, (), (), from_backward=False) is None


def test_events_of_cuda_are_levels_over_time():
    now_us = time.time() * 1e6
    events = [
        {"action": "segment_alloc", "size": 1 << 21, "time_us": now_us - 5e6},
        {"action": "alloc", "size": 100, "time_us": now_us - 4e6},
        {"action": "alloc", "size": 50, "time_us": now_us - 3e6},
        {"action": "free_requested", "size": 100, "time_us": now_us - 2e6},
        {"action": "free_completed", "size": 100, "time_us": now_us - 1e6},
    ]
    found = memory_history.levels(events, live_bytes=1050, now_us=now_us)
    assert [num_bytes for _, num_bytes in found] == [1100, 1150, 1050]
    assert found[0][0] == pytest.approx(time.perf_counter() - 4, abs=0.5)


def test_on_cuda_the_history_is_kept_as_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With PyTorch's functions replaced: no line of this has run on a GPU."""
    cuda, calls = torch.device("cuda", 0), []
    trace = [{"action": "alloc", "size": 7, "time_us": time.time() * 1e6}]
    monkeypatch.setattr(memory_history, "begin", lambda device: calls.append("begin"))
    monkeypatch.setattr(memory_history, "end", lambda: calls.append("end"))
    monkeypatch.setattr(memory_history, "snapshot", lambda device: {"device_traces": [trace]})
    monkeypatch.setattr(recorders, "device_live_bytes", lambda device: 1007)
    monkeypatch.setattr("autohete_fx.runtime.meter.reset_peak", lambda device: None)
    monkeypatch.setattr("autohete_fx.runtime.meter.device_live_bytes", lambda device: 1000)
    monkeypatch.setattr("autohete_fx.runtime.meter._device_peak_bytes", lambda device: 1007)
    recorder = StepRecorder(cuda, lambda step: None, lambda: None)
    recorder.save_snapshot(tmp_path / "snapshot.pickle")
    assert not list(tmp_path.iterdir()), "nothing was traced yet"
    run(recorder, [1, 1, 1])
    recorder.save_snapshot(tmp_path / "snapshot.pickle")
    recorder.close()
    assert calls == ["begin", "end"] and (tmp_path / "snapshot.pickle").stat().st_size
    assert recorder.traced is not None and [r.num_bytes for r in recorder.traced.memory] == [1007]
