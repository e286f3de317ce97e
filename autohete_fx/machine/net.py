"""The link between ranks: what a gather and a reduce of all of them at once take, timed once and cached.

In: `Ranks`, and a machine that was measured alone. Out: the machine with the rate of a rank's link and the fixed cost of a
message. Where there are replicas, it also has the rate of the link between those. The time of a whole of S bytes over n ranks
is told by two figures, as NCCL's rings have it::

    seconds = (n - 1) * (net_latency_s + S / (n * net_bytes_per_s))

Two sizes tell both. All ranks measure together, or none: a cached figure counts where every rank has it. The slowest rank's
seconds count. A gather's and a reduce's seconds are averaged, because a machine has one rate for both. On CPUs that rate is a
mean of two unlike ones: gloo reduces by sending everything to everyone. Replicas all-reduce, which takes twice as long::

    seconds = 2 * (n - 1) * (net_latency_s + S / (n * replica_net_bytes_per_s))

Beside collectives, an accelerator's products and copies are slower, and they beside those: that is timed and cached, too.
"""

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autohete_fx.cache import load_text, machine_key, store_text
from autohete_fx.internals.modes import no_python_dispatcher, unset_fake_temporarily
from autohete_fx.ir import Lane, Machine
from autohete_fx.machine.contention import LaneWork, OnStream, measure_contention, work_of
from autohete_fx.machine.timing import best_seconds
from autohete_fx.runtime.shard.ranks import Ranks, forget_ranks, ranks_of

__all__ = [
    "Exchange",
    "figures_of",
    "leave_job",
    "listed_together",
    "load_or_measure_net",
    "measure_net",
    "measure_net_contention",
    "measure_replica_net",
    "ranks_of_job",
]

_SIZES = {"cpu": (2**15, 2**20), "cuda": (2**20, 2**27)}
"""Bytes of the whole, about: on CPUs little, because a measurement may fall into a step that has a budget to keep."""

Contention = tuple[tuple[str, str, float], ...]
"""As a `Machine` has it."""

Exchange = Callable[[str, Any], list[Any]]
"""From the subject of an exchange and this rank's value to the values of all ranks in their order."""


def ranks_of_job(device_type: str) -> Ranks | None:
    """All processes of the job that torchrun has started, this one among them; None where it has started none, or a single one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return None
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    return ranks_of(init_device_mesh(device_type, (dist.get_world_size(),)))


def leave_job() -> None:
    """End what `ranks_of_job` began: threads of process groups must not outlive the interpreter."""
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_ranks()


def load_or_measure_net(machine: Machine, ranks: Ranks, device: torch.device, exchange: Exchange) -> Machine:
    """The machine with the figures of its net, from the cache or timed. All ranks call it; all get the same figures.

    Args:
        machine: measured alone.
        exchange: of values with the other ranks.
    """
    shape = f"{ranks.count}x{ranks.num_replicas}"
    key = "|".join([machine_key(device), str(list(ranks.hosts)), dist.get_backend(ranks.group), shape])
    cached = exchange("net figures", load_text("net", key))
    if cached[0] is not None and len(set(cached)) == 1:
        rate, latency_s, replica_rate, pairs = json.loads(cached[0])
    else:
        rate, latency_s = measure_net(ranks, device, exchange)
        replica_rate = measure_replica_net(ranks, device, exchange)
        pairs = measure_net_contention(ranks, device, exchange)
        if pairs is not None:  # else a process that has room measures again
            store_text("net", key, json.dumps([rate, latency_s, replica_rate, pairs]))
    contention = listed_together(machine.contention, pairs)
    return replace(
        machine,
        net_bytes_per_s=rate,
        net_latency_s=latency_s,
        replica_net_bytes_per_s=replica_rate,
        contention=contention,
    )


def listed_together(alone: Contention, together: Iterable[Sequence[Any]] | None) -> Contention:
    """A machine's contention, of which updates were timed by one rank, and all else by all ranks at once.

    Updates are those of a process that has the host to itself, as their rate is: plans divide it. Where ranks had no room to time
    anything, all is as one rank timed it.
    """
    if together is None:
        return alone
    pairs = ((lane, beside, kept) for lane, beside, kept in together)
    return (*(each for each in alone if Lane.UPDATE.value in each[:2]), *pairs)


def measure_net(ranks: Ranks, device: torch.device, exchange: Exchange) -> tuple[float, float]:
    """Bytes a second of a rank's link in one direction, and seconds of a message, from gathers and reduces of all ranks.

    They are rounded, for links differ from moment to moment.
    """
    rows = [max(1, size // (4 * ranks.count)) for size in _SIZES["cuda" if device.type == "cuda" else "cpu"]]
    # Compilers measure in the middle of tracing, where `Ranks.exchange` says what the dispatcher does to gloo.
    with unset_fake_temporarily(), no_python_dispatcher(), torch.no_grad():
        mine = [_seconds(ranks, device, count) for count in rows]
    seconds = [max(times) for times in zip(*exchange("seconds of collectives", mine), strict=True)]
    rate, latency_s = figures_of([4 * count * ranks.count for count in rows], seconds, ranks.count)
    return float(f"{rate:.2g}"), float(f"{latency_s:.2g}")


def measure_net_contention(ranks: Ranks, device: torch.device, exchange: Exchange) -> Contention | None:
    """The contention of an accelerator's lanes with gathers of all ranks beside them. All ranks call it; none is timed on a CPU.

    It takes some 450 MiB of the device, of what activations take later, and 128 MiB of pinned host memory. Where a rank has no room
    for that, none measures, and the result is None. The others would wait for that rank in a gather.
    """
    if device.type == "cpu":
        return ()
    with unset_fake_temporarily(), no_python_dispatcher(), torch.no_grad():
        work = _work_beside(ranks, device)
        if not all(exchange("room to measure", work is not None)) or work is None:
            return None
        return measure_contention(device, work, lambda seconds: max(exchange("seconds beside others", seconds)))


def _work_beside(ranks: Ranks, device: torch.device) -> dict[Lane, LaneWork] | None:
    """The work of lanes, a gather's among it; None without room for it and for the whole that a gather makes."""
    numel = _SIZES["cuda"][1] // (4 * ranks.count)
    try:
        shard = torch.ones(numel, device=device)
        work = work_of(device, lambda count, dtype: torch.empty(count, dtype=dtype, pin_memory=True))
        gathers = OnStream(device, lambda: torch.ops.autohete.gather(shard, ranks.count, ranks.digest))
        # Last: the caching allocator has room for a gather's from now on, on its stream.
        with gathers.stream:
            torch.ones(numel * ranks.count, device=device)
    except RuntimeError:  # the host's is no OutOfMemoryError
        return None
    return {**work, Lane.NET: gathers}


def measure_replica_net(ranks: Ranks, device: torch.device, exchange: Exchange) -> float:
    """Likewise bytes a second of the link to the other replicas, from all-reduces of all of them at once; 0 without others."""
    if ranks.replicas is None:
        return 0.0
    group, mine = ranks.replicas, []
    counts = [size // 4 for size in _SIZES["cuda" if device.type == "cuda" else "cpu"]]
    with unset_fake_temporarily(), no_python_dispatcher(), torch.no_grad():
        for count in counts:
            values = torch.ones(count, device=device)
            average = functools.partial(dist.all_reduce, values, op=dist.ReduceOp.AVG, group=group)
            mine.append(best_seconds(device, average) / 2)
    seconds = [max(times) for times in zip(*exchange("seconds of all-reduces", mine), strict=True)]
    return float(f"{figures_of([4 * count for count in counts], seconds, ranks.num_replicas)[0]:.2g}")


def _seconds(ranks: Ranks, device: torch.device, num_rows: int) -> float:
    """The mean of a gather's and a reduce's, by the ops that training runs."""
    shard = torch.ones(num_rows, device=device)
    whole = torch.ones(num_rows * ranks.count, device=device)
    gather_s = best_seconds(device, lambda: torch.ops.autohete.gather(shard, ranks.count, ranks.digest))
    reduce_s = best_seconds(device, lambda: torch.ops.autohete.reduce(whole, ranks.count, ranks.digest))
    return (gather_s + reduce_s) / 2


def figures_of(sizes: Sequence[int], seconds: Sequence[float], num_ranks: int) -> tuple[float, float]:
    """Rate and latency that explain the seconds of a small whole and a large one. A large one that took hardly longer says that the
    rate is high, not that it has no end. Those of one rank, which sends nothing, are of a copy."""
    (small, large), (small_s, large_s) = sizes, seconds
    messages = max(1, num_ranks - 1)
    per_byte_s = max(large_s - small_s, large_s / 4) / (large - small)
    rate = messages / num_ranks / per_byte_s
    return rate, max(0.0, small_s - small * per_byte_s) / messages
