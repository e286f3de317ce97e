"""Step times: what is a step, which ones count, and what is shown beside the prediction."""

import itertools
import time

import pytest
import torch

from autohete_fx.compiler.compilation import Compilation
from autohete_fx.ir import Plan
from autohete_fx.runtime import cpu_counter
from autohete_fx.runtime.steps import StepClock

CPU = torch.device("cpu")


@pytest.fixture
def clock_times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock reads next, in order."""
    times: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: times.pop(0))
    return times


def test_the_first_step_is_left_out_and_the_median_counts(clock_times: list[float]):
    clock = StepClock(CPU, micro_batches=1)
    clock_times += [100.0, 102.0, 105.0, 115.0]
    found = []
    for _ in range(5):
        clock.begin_pass()
        found.append(clock.step_s)
    assert found == [None, None, None, 2.5, 3.0]


def test_a_step_of_several_micro_batches_is_one_step(clock_times: list[float]):
    clock = StepClock(CPU, micro_batches=3)
    clock_times += itertools.accumulate([1.0, 2.0, 4.0] * 3)
    assert [clock.begin_pass() for _ in range(12)] == [0, None, None, 1, None, None, 2, None, None, 3, None, None]
    assert clock.step_s == 7.0


def test_a_peak_is_shown_only_where_somebody_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_counter, "is_running", lambda: False)
    assert StepClock(CPU, micro_batches=1).peak_bytes is None
    monkeypatch.setattr(cpu_counter, "is_running", lambda: True)
    monkeypatch.setattr(cpu_counter, "peak_bytes", lambda: 12345)
    assert StepClock(CPU, micro_batches=1).peak_bytes == 12345


def test_a_compilation_shows_what_was_measured_beside_what_it_predicted(
    clock_times: list[float], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu_counter, "is_running", lambda: False)
    clock = StepClock(CPU, micro_batches=1)
    plan = Plan(labels=(), decisions=(), step_s=3.0, peak_bytes=2**20)
    compilation = Compilation(plan=plan, training=True, device_budget_bytes=None, owners={}, clock=clock)
    assert "measured" not in str(compilation)
    clock_times += [0.0, 2.0, 4.0]
    for _ in range(4):
        clock.begin_pass()
    measured, predicted = compilation.comparison_table().splitlines()[-2:]
    assert measured.split() == ["measured", "2.00", "s", "1.00x", "-", "-"]
    assert predicted.split() == ["predicted", "3.00", "s", "1.50x", "1.00", "MiB", "-"]
    assert str(compilation).endswith(compilation.comparison_table())
    stored = Compilation.from_json(compilation.to_json())
    assert stored.clock is None and stored.measured_step_s is None
