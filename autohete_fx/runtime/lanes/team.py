"""The threads that update on the host beside an accelerator.

In: the cores of this process, and how many of a job's ranks share them. Out: a team that leaves some of them to the threads that
launch kernels and issue copies. An update ends with its slowest thread. One that shares its core with a launching thread holds up
both, many times in each update.

Ranks that share cores update at once, each with an even part of them. PyTorch's torchrun tells each to compute with one thread,
which counts as no wish. Where a user sets ``OMP_NUM_THREADS``, a team has as many instead, but leaves the same cores to others.

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


def cores() -> frozenset[int]:
    """Those that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def num_cores() -> int:
    """How many this process may use."""
    return len(cores())


def _alone() -> int | None:
    return None


_count: Callable[[], int | None] = _alone


def share_cores(count: Callable[[], int | None]) -> None:
    """Have teams that begin later take their part of the cores.

    Args:
        count: how many ranks share cores with this process, itself included; None while it is no rank. Asked each time.
    """
    global _count
    _count = count


def ranks_sharing_cores() -> int:
    """How many ranks share cores with this process, itself included."""
    return _count() or 1


def update_threads() -> int:
    """How many threads update on the host beside an accelerator.

    They are as many as PyTorch computes with here, but for the cores that are left to others. A rank has no more than an even part
    of the cores, unless the user set ``OMP_NUM_THREADS``. Where torchrun chose one thread, it has that part.
    """
    threads, most, num_ranks = torch.get_num_threads(), _cores_for_updates(), _count()
    if num_ranks is not None:
        chosen = os.environ.get("OMP_NUM_THREADS")
        is_torchruns = chosen == "1" and threads == 1 and ranks_by_torchrun() > 1
        part = most // num_ranks
        if is_torchruns or chosen is None:
            threads = part if is_torchruns else min(threads, part)
    return max(1, min(threads, most))


def ranks_by_torchrun() -> int:
    """How many processes of this job torchrun has started on this host; it has several compute with one thread each."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def threads_of_all(num_ranks: int, *, on_device: bool) -> int:
    """How many threads update when so many ranks that share cores do at once, no more than there are cores for.

    Args:
        num_ranks: 1 for those of this process.
        on_device: the device is this CPU, where updates run with the threads that compute.
    """
    of_each, most = (torch.get_num_threads(), num_cores()) if on_device else (update_threads(), _cores_for_updates())
    return max(of_each, min(num_ranks * of_each, most))


def _cores_for_updates() -> int:
    count = num_cores()
    return count - max(1, count // _LEFT)


def use_update_team(num_threads: int | None = None) -> None:
    """Let this thread, and no other, compute with so many, or with `update_threads`."""
    before, count = torch.get_num_threads(), num_threads or update_threads()
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


def with_index(device: torch.device) -> torch.device:
    """The device, by its number where it is the current one of its kind."""
    if device.type == "cpu" or device.index is not None or not torch.accelerator.is_available():
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def select_device(device: torch.device) -> None:
    """Have this thread work with an accelerator, and no other. A new thread's is the first one of all: a copy or a wait would open
    a context there. That takes half a GiB, maybe of another rank's device."""
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.set_device_index(device)


@contextmanager
def update_team(device: torch.device, num_threads: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """A thread that computes with the team of updates beside a device, or with so many. It ends with the context, after all that it
    was given."""
    with ThreadPoolExecutor(1, initializer=select_device, initargs=(with_index(device),)) as thread:
        thread.submit(use_update_team, num_threads).result()
        yield thread
