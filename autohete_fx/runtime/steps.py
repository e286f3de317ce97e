"""The seconds that training steps really take, to be held against a plan's prediction.

In: a call for every forward pass of a compiled graph. Out: the median seconds of a step and the device's peak. Why here and
not in the optimizer: any optimizer will do, and a forward pass follows the last one's step wherever that was taken. A
call costs a reading of the clock.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

from autohete_fx.ir import LaneRecord, PassRecord, StepRecord
from autohete_fx.runtime.meter import metered_peak_bytes
from autohete_fx.runtime.recorder import StepRecorder, StepsRun

_KEPT_PASSES = 256


class StepClock:
    """Times a training graph from one forward pass to the next.

    Args:
        device: whose peak is meant.
        micro_batches: forward passes of a step.
        records: gives what the lanes did.

    Attributes:
        recorder: of peaks and memory, for a report; None where nobody asked for one.
    """

    def __init__(
        self, device: torch.device, micro_batches: int, records: Callable[[], tuple[LaneRecord, ...]] = tuple
    ) -> None:
        self._device = device
        self.records = records
        self.recorder: StepRecorder | None = None
        self._micro_batches = micro_batches
        self._passes = 0
        self._began_s: deque[float] = deque(maxlen=_KEPT_PASSES + micro_batches)
        self._pass_records: deque[PassRecord] = deque(maxlen=2 * _KEPT_PASSES)

    def begin_pass(self) -> int | None:
        """A forward pass begins; returns how many steps came before it, None in the middle of one."""
        steps, passes = divmod(self._passes, self._micro_batches)
        self._passes += 1
        # The first step allocates, warms up and may compile the optimizer: it is no measure of the others.
        if steps:
            self._began_s.append(time.perf_counter())
        if self.recorder is not None and not passes:
            self.recorder.begin_step(steps, self.recent)
        return None if passes else steps

    def end_pass(self, label: str, begin_s: float) -> None:
        """A pass that began then has ended."""
        self._pass_records.append(PassRecord(label=label, begin_s=begin_s, end_s=time.perf_counter()))

    def recent(self) -> StepsRun:
        """The latest steps, without memory."""
        return StepsRun(
            begins_s=self.steps_s,
            first_number=self.first_step,
            passes=tuple(self._pass_records),
            records=self.records(),
        )

    @property
    def step_records(self) -> tuple[StepRecord, ...]:
        """The latest steps that ended: those of the recorder, which knows their peaks; else their times, the first one left out."""
        if self.recorder is not None:
            return tuple(self.recorder.steps)
        began_s = self.steps_s
        return tuple(
            StepRecord(number=self.first_step + i, step_s=end - begin)
            for i, (begin, end) in enumerate(itertools.pairwise(began_s))
        )

    @property
    def first_step(self) -> int:
        """The number of the first of ``steps_s``."""
        return -(-self._passes // self._micro_batches) - len(self.steps_s)

    @property
    def steps_s(self) -> tuple[float, ...]:
        """Begins of the latest steps, the first one left out."""
        forgotten = max(0, self._passes - self._micro_batches) - len(self._began_s)
        return tuple(self._began_s)[-forgotten % self._micro_batches :: self._micro_batches]

    @property
    def step_s(self) -> float | None:
        """Median seconds of the latest steps, the first one left out; None before there are two of them.

        Whatever happens between two forward passes is in it: the backward, the optimizer, and waiting for data.
        """
        if self.recorder is not None:  # it knows when a step ended, and what of the time after that was its own
            timed = [record.step_s for record in self.recorder.steps if record.number]
            return statistics.median(timed) if len(timed) > 1 else None
        began_s = list(self._began_s)
        steps = [end - begin for begin, end in zip(began_s, began_s[self._micro_batches :], strict=False)]
        return statistics.median(steps) if len(steps) > 1 else None

    @property
    def peak_bytes(self) -> int | None:
        """The device's peak since it was last reset, everything in the process counted; None where nobody counts it. With a
        recorder, the most of the steps that ended: what follows the last one, or another model, is not theirs."""
        if self.recorder is not None and self.recorder.steps:
            return self.recorder.peak_bytes
        return metered_peak_bytes(self._device)

    @property
    def num_passes(self) -> int:
        """How many forward passes have begun."""
        return self._passes
