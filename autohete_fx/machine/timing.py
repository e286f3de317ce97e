"""The time that a call takes on a device, at best."""

import time
from collections.abc import Callable

import torch

_REPEATS = 4

MakeTensor = Callable[[int, torch.dtype], torch.Tensor]
"""A number of elements and a dtype to a 1-d tensor without contents."""


def best_seconds(device: torch.device, run: Callable[[], object], *, repeats: int = _REPEATS) -> float:
    """Best of a few timed runs, after one that warms up."""
    best = float("inf")
    for _ in range(repeats + 1):
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
    return max(best, 1e-9)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
