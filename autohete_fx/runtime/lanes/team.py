"""The threads that update on the host beside an accelerator.

In: the cores of this process. Out: a team that leaves some of them to the threads that launch kernels and issue copies. An update
ends with its slowest thread. One that shares its core with a launching thread holds up both, many times in each update.

GNU's OpenMP has the idle threads of a team spin for some milliseconds, until the next update. Where a process has more such threads
than cores, idle ones sleep at once, and each update begins by waking one after the other. A second team is enough for that. One
large operation on the CPU, such as a model's initialisation, makes one of the thread that launches.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_LEFT = 8
"""One core in so many is left to others, and at least one."""
_SOFT = 1
"""``omp_pause_soft``: what threads have set stays."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def update_threads() -> int:
    """How many threads update on the host beside an accelerator, no more than PyTorch computes with here."""
    cores = num_cores()
    return max(1, min(torch.get_num_threads(), cores - max(1, cores // _LEFT)))


def use_update_team() -> None:
    """Let this thread, and no other, compute with so many."""
    before, count = torch.get_num_threads(), update_threads()
    if count == before:
        return
    torch.set_num_threads(count)
    # PyTorch has told threads to come, too. Another thread, which has no team of its own yet, takes that back.
    other = threading.Thread(target=torch.set_num_threads, args=(before,))
    other.start()
    other.join()


def let_go_of_team() -> None:
    """End the threads that this one computes with. New ones come with its next large operation on the CPU."""
    pause = _pause_resources()
    if pause is not None:
        pause(_SOFT)


@functools.cache
def _pause_resources() -> Callable[[int], int] | None:
    """OpenMP's own; None where PyTorch computes without GNU's OpenMP."""
    try:
        library = ctypes.PyDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)
        return library.omp_pause_resource_all
    except (OSError, AttributeError):  # no such system, no such library, or one older than OpenMP 5
        return None


@contextmanager
def update_team() -> Iterator[ThreadPoolExecutor]:
    """A thread that computes with the team of updates. It ends with the context, after all that it was given."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(use_update_team).result()
        yield thread
