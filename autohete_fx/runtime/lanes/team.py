"""The threads that update on the host beside an accelerator.

In: the cores of this process. Out: a team that leaves some of them to the threads that launch kernels and issue copies. An update
ends with its slowest thread. One that shares its core with a launching thread holds up both, many times in each update.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_LEFT = 8
"""One core in so many is left to others, and at least one."""


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


@contextmanager
def update_team() -> Iterator[ThreadPoolExecutor]:
    """A thread that computes with the team of updates. It ends with the context, after all that it was given."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(use_update_team).result()
        yield thread
