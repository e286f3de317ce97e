"""The machine's capacities and rates, timed once and cached.

Enters a device and a way to make host tensors; leaves a `Machine`. Timing takes about two seconds. It times products, copies
within the device and both ways to host memory, AdamW steps on the device and on the host, and a file. An accelerator's lanes are
timed beside each other as well, and beside updates on the host (`contention`), which takes longer than all else. Each rate is the
best of a few repeats after a warm-up: others on the machine only ever slow one down.

A measurement may fall into a step that has a budget to keep. On CUDA it takes some 250 MiB, of what activations take later, and
640 MiB of pinned host memory. For a CPU device, where a budget may be smaller than that, every tensor timed here lies in mapped
host memory. There a 16-bit product may take 3 MiB of scratch, a copy to the device 1 MiB, and the disk's window 4 MiB.

Ranks that share a host measure one after another, each with as many threads as all of them update with. `machine_of_rank` makes one
rank's part of that.
"""

import functools
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autohete_fx.cache import device_name, load_machine, machine_key, store_machine
from autohete_fx.errors import HostMemoryError
from autohete_fx.internals.modes import unset_fake_temporarily
from autohete_fx.ir import Lane, Machine
from autohete_fx.machine.disk_rate import measure_disk
from autohete_fx.machine.timing import MakeTensor, best_seconds
from autohete_fx.machine.update_rates import (
    MixedStep,
    host_figures,
    mixed_update_speed,
    remembered_mixed_update_speed,
    update_rate,
)
from autohete_fx.runtime.lanes.team import threads_of_all, update_team
from autohete_fx.runtime.tiers import ram
from autohete_fx.runtime.tiers.mapped_files import map_file

log = logging.getLogger(__name__)

_SMALL_REPEATS = 40
_COPY_BYTES = {"cpu": 24 * 2**20, "cuda": 128 * 2**20}
_TRANSFER_BYTES = 2**20
"""On a CPU device: what a training step moves at a time."""
# On a GPU more than its caches hold, and enough to hide what a launch costs.
_STREAM_BYTES = {"cpu": 24 * 2**20, "cuda": 128 * 2**20}
_PRODUCTS = {"cpu": 1, "cuda": 8}
"""At a time: one of a GPU takes hardly longer than to launch it and to see that it is done."""
_PRODUCT_SIZE = {"cpu": 768, "cuda": 4096}
_SLOW_S, _TOO_SLOW_S = 0.02, 0.2
"""Where a product is expected to take the first, one of a third of its size is timed; where the second, a small one tells."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MakeHostTensor = Callable[[int], torch.Tensor]

IssueCopy = Callable[[Lane, torch.Tensor], Callable[[], torch.Tensor]]
"""Starts a copy of a tensor on a lane, as training does, and returns what waits for it and gives the copy."""


def device_capacity_bytes(device: torch.device) -> int:
    """Memory of the device; for a CPU the physical RAM, or what a container may use of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return ram.capacity_bytes()


def host_capacity_bytes(device: torch.device, offload_dir: str | None = None) -> int:
    """Capacity of the tier below the device, in bytes: RAM for CUDA; for a CPU what is free in ``offload_dir``."""
    if device.type == "cuda":
        return device_capacity_bytes(torch.device("cpu"))
    return _free_bytes(offload_dir or tempfile.gettempdir())


def disk_capacity_bytes(offload_dir: str | None = None) -> int:
    """Bytes that are free where optimizer states on disk would be; 0 where files are kept in RAM."""
    directory = offload_dir or tempfile.gettempdir()
    return 0 if _is_in_ram(directory) else _free_bytes(directory)


def _free_bytes(directory: str) -> int:
    """What is free on a disk, up to an eighth less: it changes by the minute, and equal problems are to stay equal, or nothing
    that was compiled for them would be found again."""
    free_bytes = shutil.disk_usage(directory).free
    grain_bytes = 1 << max(0, free_bytes.bit_length() - 4)
    return free_bytes // grain_bytes * grain_bytes


def _is_in_ram(directory: str) -> bool:
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as lines:
        mounts = (line.split() for line in lines)
        return any(each[2] == number and each[each.index("-") + 1] in ("tmpfs", "ramfs") for each in mounts)


def _product_rates(device: torch.device, make: MakeTensor) -> tuple[tuple[str, float], ...]:
    """Of random numbers: a GPU multiplies constants faster than it ever multiplies in training, because it takes less power."""
    random = torch.Generator(device).manual_seed(0)  # the program's own is left as it is
    size = _PRODUCT_SIZE.get(device.type, 1024)
    rates = []
    for dtype in _DTYPES:
        side = size
        if dtype is not torch.float32:
            # without hardware for it, a 16-bit product on a CPU is slower by orders: time a small one first. It is over sooner than
            # a busy machine lets all its threads run: one of many is not held up
            rate = _product_rate(device, make, dtype, size // 8, random, repeats=_SMALL_REPEATS)
            expected_s = 2 * size**3 / rate
            side = 0 if expected_s > _TOO_SLOW_S else size // 3 if expected_s > _SLOW_S else size
        if side:
            rate = _product_rate(device, make, dtype, side, random)
        rates.append((str(dtype).removeprefix("torch."), rate))
    return tuple(rates)


def _product_rate(
    device: torch.device, make: MakeTensor, dtype: torch.dtype, side: int, random: torch.Generator, **how: int
) -> float:
    """Floating point operations a second of a square product."""
    count = _PRODUCTS.get(device.type, 1)
    left, right, product = (make(side**2, dtype).uniform_(-1, 1, generator=random).view(side, side) for _ in range(3))
    run = functools.partial(_repeated, count, left, right, product)
    return 2 * side**3 * count / best_seconds(device, run, **how)


def _repeated(count: int, left: torch.Tensor, right: torch.Tensor, product: torch.Tensor) -> None:
    for _ in range(count):
        torch.mm(left, right, out=product)


def _device_bandwidth(device: torch.device, make: MakeTensor) -> float:
    num_bytes = _STREAM_BYTES.get(device.type, _STREAM_BYTES["cpu"])
    source, target = (make(num_bytes, torch.uint8).fill_(1) for _ in range(2))
    return 2 * num_bytes / best_seconds(device, lambda: target.copy_(source))


def _copy_rates(device: torch.device, on_device: torch.Tensor, on_host: torch.Tensor) -> tuple[float, float, float]:
    """Bytes per second up and down, and the seconds of a tiny copy."""
    num_bytes = on_device.nbytes
    down = num_bytes / best_seconds(device, lambda: on_host.copy_(on_device, non_blocking=True))
    up = num_bytes / best_seconds(device, lambda: on_device.copy_(on_host, non_blocking=True))
    few, many = on_device[:64], on_host[:64]
    return up, down, best_seconds(device, lambda: few.copy_(many, non_blocking=True))


class _Transfers:
    """Copies issued and waited for as training does."""

    def __init__(self, issue: IssueCopy, sources: Sequence[torch.Tensor]) -> None:
        self.issue = issue
        self.sources = sources

    def seconds(self, device: torch.device, lane: Lane) -> float:
        """Seconds of copying all, one after another."""

        def run() -> None:
            for source in self.sources:
                self.issue(lane, source)()

        return best_seconds(device, run)

    def share_lost(self, device: torch.device, alone_s: float, compute: Callable[[], object]) -> float:
        """Seconds by which computation takes longer while copies run, for each second that these take alone."""
        compute_s = best_seconds(device, compute)
        count = 1 + int(4 * alone_s / compute_s)  # outlasts the copies, slowed down as they may be

        def run() -> None:
            waiting = [self.issue(Lane.D2H, source) for source in self.sources]
            for _ in range(count):
                compute()
            for wait in waiting:
                wait()

        return min(2.0, max(0.0, (best_seconds(device, run) - count * compute_s) / alone_s))


def _copy_figures(device: torch.device, make: MakeTensor, issue: IssueCopy, beside: bool) -> dict[str, float]:
    """Rates of a CPU device's copies, what each costs whatever its size, and what computation loses to them."""
    num_bytes = _COPY_BYTES["cpu"]
    count = num_bytes // _TRANSFER_BYTES
    pieces = make(num_bytes, torch.uint8).fill_(1).chunk(count)
    transfers = _Transfers(issue, pieces)
    tiny = _Transfers(issue, [piece[:64] for piece in pieces])
    (down_s, tiny_down_s), (up_s, tiny_up_s) = (
        (transfers.seconds(device, lane), tiny.seconds(device, lane)) for lane in (Lane.D2H, Lane.H2D)
    )
    side = _PRODUCT_SIZE["cpu"]
    left, right, product = (make(side**2, torch.float32).fill_(0.5).view(side, side) for _ in range(3))
    return {
        "h2d_bytes_per_s": num_bytes / max(up_s - tiny_up_s, up_s / 4),
        "d2h_bytes_per_s": num_bytes / max(down_s - tiny_down_s, down_s / 4),
        "latency_s": (tiny_up_s + tiny_down_s) / (2 * count),
        "copy_share": 1.0
        if not beside
        else transfers.share_lost(device, down_s, lambda: torch.mm(left, right, out=product)),
    }


def _plain_host_tensors(device: torch.device, directory: str | None) -> MakeHostTensor:
    """Makes pinned memory for CUDA, and a mapped file in the directory for a CPU."""
    if device.type == "cuda":
        return lambda n: torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=True)
    place = Path(directory or tempfile.gettempdir())
    return lambda n: torch.frombuffer(map_file(n, place).mapping, dtype=torch.uint8)


def _in_ram(num_bytes: int) -> torch.Tensor:
    """Mapped as host memory of a CPU device is, but with no file."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def _update_figures(device: torch.device, make: MakeTensor, make_on_host: MakeTensor, num_ranks: int) -> dict[str, Any]:
    """Rates of updates on the device and on the host, and of products on the host where it has cores beside those of the device."""
    on_device = update_rate(device, make)
    figures: dict[str, Any] = {"device_update_params_per_s": on_device, "host_update_params_per_s": on_device}
    threads = threads_of_all(num_ranks, on_device=device.type == "cpu")
    if device.type != "cpu":
        figures |= host_figures(device, make_on_host, threads)
    elif threads > torch.get_num_threads():
        with update_team(device, threads) as team:
            figures["host_update_params_per_s"] = team.submit(update_rate, device, make).result()
            products = team.submit(_product_rates, device, make).result()
            figures["host_flops_per_s"] = dict(products)["bfloat16"]
    return figures


def measure_machine(
    device: torch.device,
    *,
    make_host_tensor: MakeHostTensor | None = None,
    issue_copy: IssueCopy | None = None,
    copies_run_beside: bool = True,
    offload_dir: str | None = None,
    mixed_step: MixedStep | None = None,
    num_ranks: int = 1,
) -> Machine:
    """Time the machine.

    Raises:
        HostMemoryError: host memory, or for a CPU device ``offload_dir``, has no room for what is timed.

    Args:
        device: the compute device.
        make_host_tensor: bytes to a 1-d uint8 tensor in the host tier. Without it, pinned memory for CUDA, and for
            a CPU a mapped file in ``offload_dir``.
        issue_copy: CPU only: how training copies. Without it, plain copies are timed, as if nothing ran beside them.
        copies_run_beside: CPU only: whether computation goes on while copies so issued run; what it loses to them is
            timed. Else it stands still for as long as they take.
        offload_dir: directory of states on disk, and of host memory for a CPU device; the temporary directory where None.
        mixed_step: updates 16-bit parameters; None where nobody asks how fast.
        num_ranks: how many share this one's cores, it among them, and are idle now. The rates are of updates of all of them at
            once.
    """
    # the caller may be in the middle of tracing: nothing here may be traced or recorded for backward
    real = unset_fake_temporarily()
    with real, torch.no_grad():
        allocate_host = make_host_tensor or _plain_host_tensors(device, offload_dir)

        def make_on_host(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return allocate_host(numel * dtype.itemsize).view(-1).view(dtype)

        def make_on_device(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(numel, dtype=dtype, device=device)

        make = make_on_host if device.type == "cpu" else make_on_device
        num_bytes = _COPY_BYTES.get(device.type, _COPY_BYTES["cpu"])
        up, down, latency = _copy_rates(
            device, make(num_bytes, torch.uint8).fill_(1), make_on_host(num_bytes, torch.uint8)
        )
        copies = {"h2d_bytes_per_s": up, "d2h_bytes_per_s": down, "latency_s": latency}
        if device.type == "cpu" and issue_copy is not None:
            copies = _copy_figures(device, make, issue_copy, copies_run_beside)
        figures: dict[str, Any] = {**copies, **_update_figures(device, make, make_on_host, num_ranks)}
        return Machine(
            device_name=device_name(device.type, device.index),
            device_type=device.type,
            device_bytes=device_capacity_bytes(device),
            host_bytes=host_capacity_bytes(device, offload_dir),
            disk_bytes=disk_capacity_bytes(offload_dir),
            device_flops_per_s=_product_rates(device, make),
            backward_flops_per_s=(),
            device_bytes_per_s=_device_bandwidth(device, make),
            disk_bytes_per_s=measure_disk(offload_dir),
            mixed_update_speed=mixed_update_speed(device, make_on_host, mixed_step) if mixed_step is not None else 0.0,
            **figures,
        )


def load_or_measure_machine(
    device: torch.device,
    *,
    make_host_tensor: MakeHostTensor | None = None,
    issue_copy: IssueCopy | None = None,
    copies_run_beside: bool = True,
    offload_dir: str | None = None,
    num_ranks: int = 1,
) -> Machine:
    """The machine's figures from the cache, timed where it has none. Capacities are always today's.

    The speed of 16-bit updates is that which `autohete doctor` found, if it did.

    ``num_ranks``: see `measure_machine`. Ranks of another number have figures of their own.
    """
    threads = threads_of_all(num_ranks, on_device=device.type == "cpu")
    key = f"{machine_key(device, offload_dir)}|{num_ranks} ranks|{threads} threads"
    machine = load_machine(key)
    if machine is None:
        try:
            machine = measure_machine(
                device,
                make_host_tensor=make_host_tensor,
                issue_copy=issue_copy,
                copies_run_beside=copies_run_beside,
                offload_dir=offload_dir,
                num_ranks=num_ranks,
            )
            store_machine(key, machine)
        except HostMemoryError as error:
            if device.type != "cpu":
                raise
            log.warning("the machine is measured as if it offloaded into RAM, and measured again next time: %s", error)
            machine = measure_machine(device, make_host_tensor=_in_ram, offload_dir=offload_dir, num_ranks=num_ranks)
    return replace(
        machine,
        device_bytes=device_capacity_bytes(device),
        host_bytes=host_capacity_bytes(device, offload_dir),
        disk_bytes=disk_capacity_bytes(offload_dir),
        mixed_update_speed=remembered_mixed_update_speed(device),
    )
