"""CUDA's record of allocations: what PyTorch's viewer of memory snapshots shows, and live bytes over time.

PyTorch names its parts with an underscore, although its documentation tells users to call them.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.cuda import memory as cuda_memory

_MOST_EVENTS = 200_000
_FREED = "free_requested"


def begin(device: torch.device) -> None:
    """Record allocations from now on, without stacks. Earlier records, by whomever, are forgotten."""
    cuda_memory._record_memory_history("all", context=None, max_entries=_MOST_EVENTS, device=device, clear_history=True)


def snapshot(device: torch.device) -> Any:
    """The records so far, and the state of the allocator."""
    return cuda_memory._snapshot(device)


def end() -> None:
    """Record no more."""
    cuda_memory._record_memory_history(None)


def levels(events: Iterable[Mapping[str, Any]], live_bytes: int, now_us: float) -> list[tuple[float, int]]:
    """Live bytes over time, as readings of ``time.perf_counter``.

    Args:
        events: of one device, oldest first, as a snapshot has them.
        live_bytes: after the last of them.
        now_us: the clock of the events, read together with ``time.perf_counter``.
    """
    ahead_s = time.perf_counter() - now_us / 1e6
    changes = [
        (event["time_us"] / 1e6 + ahead_s, -event["size"] if event["action"] == _FREED else event["size"])
        for event in events
        if event["action"] in ("alloc", _FREED)
    ]
    live = live_bytes - sum(change for _, change in changes)
    found = []
    for at_s, change in changes:
        live += change
        found.append((at_s, live))
    return found
