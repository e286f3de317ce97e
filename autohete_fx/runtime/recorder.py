"""Records training steps for a report: the peak of each, and device memory over two of them.

In: a call where a step begins. Out: a `StepRecord` a step, and of the steps that were traced all that a report draws. Two are
traced at a time: a plan's step under an overlapping schedule begins after a forward, and so lies in two of the program.

Cost: a peak is read and started over once a step. While steps are traced, each allocation also reads the clock.
"""

import pickle
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autohete_fx.internals import memory_history
from autohete_fx.ir import LaneRecord, MemoryRecord, PassRecord, StepRecord
from autohete_fx.runtime import cpu_counter
from autohete_fx.runtime.meter import MemoryMeter, device_live_bytes

TRACED_STEPS = 2
_TRACED_FROM = (1, 20)
"""Steps from which on two are traced: soon, so that there is something to see; and again when caches and clocks have settled."""
_KEPT_STEPS = 4096
_POINTS = 4000
"""About how many times of a traced step memory is noted for, on a CPU device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRun:
    """Consecutive steps as they ran; times are readings of ``time.perf_counter``.

    Attributes:
        begins_s: of each step; the last one need not have ended.
        first_number: of the first of them.
        passes: of the graph.
        records: of the lanes.
        memory: live bytes; empty where they were not recorded.
    """

    begins_s: tuple[float, ...] = ()
    first_number: int = 0
    passes: tuple[PassRecord, ...] = ()
    records: tuple[LaneRecord, ...] = ()
    memory: tuple[MemoryRecord, ...] = ()


class StepRecorder:
    """The steps of one training graph.

    Args:
        device: whose memory is meant.
        on_step: called with every step that ended.
        on_traced: called after steps that were traced.

    Attributes:
        steps: the latest ones.
        traced: those that were traced last; None before.
        peak_bytes: the most of all steps so far.
    """

    def __init__(
        self, device: torch.device, on_step: Callable[[StepRecord], None], on_traced: Callable[[], None]
    ) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=_KEPT_STEPS)
        self.traced: StepsRun | None = None
        self.peak_bytes = 0
        self._device = device
        self._on_step, self._on_traced = on_step, on_traced
        self._meter = MemoryMeter(device)
        self._began_s: float | None = None
        self._is_tracing = False
        self._resolution_s = 0.0
        self._snapshot: Any = None

    def begin_step(self, number: int, recent: Callable[[], StepsRun]) -> None:
        """A step begins, and with it the one before ends. ``recent`` tells of the steps so far."""
        now_s = time.perf_counter()
        if self._began_s is not None:
            self._meter.__exit__(None, None, None)
            ended = StepRecord(number=number - 1, step_s=now_s - self._began_s, peak_bytes=self._meter.peak_bytes)
            self.peak_bytes = max(self.peak_bytes, self._meter.peak_bytes)
            self.steps.append(ended)
            self._on_step(ended)
            if self._is_tracing and number - TRACED_STEPS in _TRACED_FROM:
                self.traced = replace(recent(), memory=self._end_trace())
                self._on_traced()
            if number in _TRACED_FROM:
                self._begin_trace(ended.step_s)
        self._meter.__enter__()
        self._began_s = time.perf_counter()

    def close(self) -> None:
        """No step follows: the one under way, of which nobody knows when it ends, does not count."""
        if self._began_s is not None:
            self._meter.__exit__(None, None, None)
            self._began_s = None
        if self._is_tracing:
            self._end_trace()

    def save_snapshot(self, path: Path) -> None:
        """Write CUDA's allocations of the steps that were traced last, for PyTorch's viewer; nothing on a CPU device."""
        if self._snapshot is not None:
            path.write_bytes(pickle.dumps(self._snapshot))

    def _begin_trace(self, step_s: float) -> None:
        self._is_tracing = True
        if self._device.type == "cpu":
            self._resolution_s = step_s / _POINTS
            cpu_counter.begin_history(self._resolution_s)
        else:
            memory_history.begin(self._device)

    def _end_trace(self) -> tuple[MemoryRecord, ...]:
        self._is_tracing = False
        found: list[tuple[float, int]] = []
        if self._device.type == "cpu":
            for at_s, most, last in cpu_counter.end_history():
                found.append((at_s, most))
                if last != most:
                    found.append((at_s + self._resolution_s, last))
        else:
            now_us, live = time.time() * 1e6, device_live_bytes(self._device)
            self._snapshot = memory_history.snapshot(self._device)
            memory_history.end()
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            found = memory_history.levels(self._snapshot["device_traces"][index], live, now_us)
        return tuple(MemoryRecord(at_s=at_s, num_bytes=num_bytes) for at_s, num_bytes in found)
