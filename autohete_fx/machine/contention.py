"""Contention of an accelerator's lanes, timed: the share of its rate that each keeps while another works.

In: each lane's work, and a stream or a thread that does it. Out: `Machine.contention`, from the seconds of each lane's work alone,
and beside each other lane, which has enough to outlast it. Lanes of other ranks take part where a collective is among them: all
ranks time the same pairs in one order, and the slowest counts. A CPU has no such lanes: its processors copy, as
``Machine.copy_share`` says.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from autohete_fx.ir import Lane

Timed = Callable[[Lane, Lane | None], float]
"""From a lane, and maybe one beside it, to the seconds of the first one's work."""
Agree = Callable[[float], float]
"""From this rank's seconds to those that count for all."""

_LEAST_S = 0.02
_MOST_PIECES = 256
_OUTLASTS = 4
_REPEATS = 3
_NOTABLE = 0.95
"""A lane that keeps more of its rate is left alone: as much is within what timings differ by."""
_BYTES = 64 * 2**20
_SIDE = 4096


class LaneWork(Protocol):
    """A lane's work, in pieces that are done one after another."""

    def begin(self, count: int) -> None:
        """Have so many pieces done, from now on."""
        ...

    def finish(self) -> None:
        """Wait until they are done."""
        ...


class OnStream:
    """Work of the device.

    Args:
        device: the accelerator.
        issue: gives the current stream a piece, which takes the device far longer than to issue it.
        stream: for it; default one of its own.
    """

    def __init__(self, device: torch.device, issue: Callable[[], object], stream: torch.Stream | None = None) -> None:
        self.stream = torch.Stream(device) if stream is None else stream
        self._issue = issue

    def begin(self, count: int) -> None:
        """Issue so many pieces."""
        with self.stream:
            for _ in range(count):
                self._issue()

    def finish(self) -> None:
        """Wait until they are done."""
        self.stream.synchronize()


class OnThread:
    """Work of the host, on a thread of its own. ``finish`` raises what a piece raised.

    Args:
        thread: the one that works, and does nothing else meanwhile.
        do: does a piece. It leaves the interpreter to others for nearly all of the time that it takes.
    """

    def __init__(self, thread: ThreadPoolExecutor, do: Callable[[], object]) -> None:
        self._thread, self._do = thread, do
        self._begun: Future[None] | None = None

    def begin(self, count: int) -> None:
        """Have so many pieces done; returns when the thread has begun."""
        works = threading.Event()

        def run() -> None:
            works.set()
            for _ in range(count):
                self._do()

        self._begun = self._thread.submit(run)
        works.wait()

    def finish(self) -> None:
        """Wait until they are done."""
        if self._begun is not None:
            self._begun.result()


def contention_of(lanes: Sequence[Lane], timed: Timed) -> tuple[tuple[str, str, float], ...]:
    """The pairs of which the first is slower beside the second, and the share of its rate that it keeps."""
    alone_s = {lane: timed(lane, None) for lane in lanes}
    found = []
    for lane, beside in itertools.permutations(lanes, 2):
        kept = alone_s[lane] / timed(lane, beside)
        if kept < _NOTABLE:
            found.append((lane.value, beside.value, float(f"{kept:.2g}")))
    return tuple(found)


def measure_contention(
    device: torch.device, work: Mapping[Lane, LaneWork], agree: Agree = lambda seconds: seconds
) -> tuple[tuple[str, str, float], ...]:
    """Time the lanes of an accelerator and its host. Where a lane's work is a collective, all ranks call this.

    Args:
        device: the accelerator.
        work: of each lane, in pieces of at most some 20 milliseconds.
        agree: what makes one figure of all ranks' seconds.
    """
    counts = dict.fromkeys(work, 1)

    def seconds(lane: Lane, beside: Lane | None) -> float:
        torch.accelerator.synchronize(device)
        if beside is not None:
            work[beside].begin(_OUTLASTS * counts[beside])
        begin_s = time.perf_counter()
        work[lane].begin(counts[lane])
        work[lane].finish()
        took_s = time.perf_counter() - begin_s
        if beside is not None:
            work[beside].finish()
        return max(took_s, 1e-9)

    def best(lane: Lane, beside: Lane | None) -> float:
        return agree(min(seconds(lane, beside) for _ in range(_REPEATS)))

    counts |= {lane: min(_MOST_PIECES, math.ceil(_LEAST_S / best(lane, None))) for lane in work}
    return contention_of(list(work), best)


def work_of(device: torch.device, make_on_host: Callable[[int, torch.dtype], torch.Tensor]) -> dict[Lane, LaneWork]:
    """Work of the lanes that an accelerator has alone: products, and copies both ways.

    Args:
        device: the accelerator.
        make_on_host: a number of elements and a dtype to a 1-d tensor in host memory of homes.
    """
    homes = [make_on_host(_BYTES, torch.uint8).fill_(1) for _ in range(2)]
    up, down = (torch.ones(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    left, product = (torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {
        # On any other stream the library would keep a workspace of its own, for as long as the process lives.
        Lane.COMPUTE: OnStream(
            device, lambda: torch.mm(left, left, out=product), torch.accelerator.current_stream(device)
        ),
        Lane.H2D: OnStream(device, lambda: up.copy_(homes[0], non_blocking=True)),
        Lane.D2H: OnStream(device, lambda: homes[1].copy_(down, non_blocking=True)),
    }
