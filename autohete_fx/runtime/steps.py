"""The seconds that training steps really take, to be held against a plan's prediction.

In: a call for every forward pass of a compiled graph. Out: the median seconds of a step and the device's peak. Why here and
not in the optimizer: any optimizer will do, and a forward pass follows the last one's step wherever that was taken. A
call costs a reading of the clock.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

from autohete_fx.ir import LaneRecord
from autohete_fx.runtime.meter import metered_peak_bytes

_KEPT_PASSES = 256


class StepClock:
    """Times a training graph from one forward pass to the next.

    Args:
        device: whose peak is meant.
        micro_batches: forward passes of a step.
        records: gives what the lanes did.
    """

    def __init__(
        self, device: torch.device, micro_batches: int, records: Callable[[], tuple[LaneRecord, ...]] = tuple
    ) -> None:
        self._device = device
        self.records = records
        self._micro_batches = micro_batches
        self._passes = 0
        self._began_s: deque[float] = deque(maxlen=_KEPT_PASSES + micro_batches)

    def begin_pass(self) -> int | None:
        """A forward pass begins; returns how many steps are behind it, None in the middle of one."""
        steps, passes = divmod(self._passes, self._micro_batches)
        self._passes += 1
        # The first step allocates, warms up and may compile the optimizer: it is no measure of the others.
        if steps:
            self._began_s.append(time.perf_counter())
        return None if passes else steps

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
        began_s = list(self._began_s)
        steps = [end - begin for begin, end in zip(began_s, began_s[self._micro_batches :], strict=False)]
        return statistics.median(steps) if len(steps) > 1 else None

    @property
    def peak_bytes(self) -> int | None:
        """The device's peak since it was last reset, everything in the process counted; None where nobody counts it."""
        return metered_peak_bytes(self._device)
