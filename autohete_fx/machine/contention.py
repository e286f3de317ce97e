"""Contention of an accelerator's lanes, timed: the share of its rate that each keeps while another works.

In: work of each lane. Out: `Machine.contention`, from the seconds of each lane's work alone, and beside each other lane, which has
enough to outlast it. Lanes of other ranks take part where a collective is among them: all ranks time the same pairs in one order,
and the slowest counts. A CPU has no such lanes: its processors copy, as ``Machine.copy_share`` says.
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from autohete_fx.ir import Lane

Issue = Callable[[], object]
"""Gives a piece of a lane's work to the current stream."""
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
    device: torch.device, work: Mapping[Lane, Issue], agree: Agree = lambda seconds: seconds
) -> tuple[tuple[str, str, float], ...]:
    """Time the lanes of an accelerator, each on a stream. Where a lane's work is a collective, all ranks call this.

    Args:
        device: the accelerator.
        work: of each lane, a piece that takes the device far longer than to issue it.
        agree: what makes one figure of all ranks' seconds.
    """
    streams, counts = {lane: torch.Stream(device) for lane in work}, dict.fromkeys(work, 1)

    def run(lane: Lane, count: int) -> None:
        with streams[lane]:
            for _ in range(count):
                work[lane]()

    def seconds(lane: Lane, beside: Lane | None) -> float:
        torch.accelerator.synchronize(device)
        if beside is not None:
            run(beside, _OUTLASTS * counts[beside])
        begin_s = time.perf_counter()
        run(lane, counts[lane])
        streams[lane].synchronize()
        took_s = time.perf_counter() - begin_s
        torch.accelerator.synchronize(device)
        return max(took_s, 1e-9)

    def best(lane: Lane, beside: Lane | None) -> float:
        return agree(min(seconds(lane, beside) for _ in range(_REPEATS)))

    counts |= {lane: min(_MOST_PIECES, math.ceil(_LEAST_S / best(lane, None))) for lane in work}
    return contention_of(list(work), best)


def work_of(device: torch.device, make_on_host: Callable[[int, torch.dtype], torch.Tensor]) -> dict[Lane, Issue]:
    """Work of the lanes that an accelerator has alone: products, and copies both ways.

    Args:
        device: the accelerator.
        make_on_host: a number of elements and a dtype to a 1-d tensor in host memory of homes.
    """
    homes = [make_on_host(_BYTES, torch.uint8).fill_(1) for _ in range(2)]
    up, down = (torch.ones(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    left, product = (torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {
        Lane.COMPUTE: lambda: torch.mm(left, left, out=product),
        Lane.H2D: lambda: up.copy_(homes[0], non_blocking=True),
        Lane.D2H: lambda: homes[1].copy_(down, non_blocking=True),
    }
