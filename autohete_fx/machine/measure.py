"""The machine's capacities and rates, timed once and cached.

Enters a device and a way to make host tensors; leaves a `Machine`. Timing takes about two seconds. It times products, copies
within the device and both ways to host memory, AdamW steps on the device and on the host, and a file. An accelerator's lanes are
timed beside each other as well, and beside updates on the host (`contention`), which takes longer than all else. Each rate is the
best of a few repeats after a warm-up: others on the machine only ever slow one down.

A kernel of ours updates 16-bit parameters. `autohete doctor` gives it to be timed. No first plan waits for that: compilers take
seconds, and on a busy machine a ratio of two rates tells little.

A measurement may fall into a step that has a budget to keep. On CUDA it takes some 250 MiB, of what activations take later, and
640 MiB of pinned host memory. For a CPU device, where a budget may be smaller than that, every tensor timed here lies in mapped
host memory. There a 16-bit product may take 3 MiB of scratch, a copy to the device 1 MiB, and the disk's window 4 MiB.
"""

import functools
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autohete_fx.cache import device_name, load_machine, machine_key, store_machine
from autohete_fx.internals.modes import unset_fake_temporarily
from autohete_fx.ir import Lane, Machine
from autohete_fx.machine.contention import OnThread, measure_contention, work_of
from autohete_fx.machine.disk_rate import measure_disk
from autohete_fx.runtime.lanes.team import update_team
from autohete_fx.runtime.tiers import ram

_REPEATS, _SMALL_REPEATS = 4, 40
_ROUNDS, _ROUNDS_S = 8, 4.0
_COPY_BYTES = {"cpu": 24 * 2**20, "cuda": 128 * 2**20}
_TRANSFER_BYTES = 2**20
"""On a CPU device: what a training step moves at a time."""
# On a GPU more than its caches hold, and enough to hide what a launch costs.
_STREAM_BYTES = {"cpu": 24 * 2**20, "cuda": 128 * 2**20}
# Parameters, gradients and moments together more than a cache holds; beside a GPU that is the cache of a server.
_UPDATE_PARAMS = {"cpu": 2**22, "cuda": 2**24}
_SERVER_UPDATE_PARAMS = 2**25
_UPDATE_PARTS = 8
"""Beside other lanes they are updated in so many parts, by turns: each takes milliseconds, and all are more than a cache holds."""
_HOST_PRODUCT = 2048
"""Rows and columns of matrices that the host multiplies beside a GPU."""
_PRODUCTS = {"cpu": 1, "cuda": 8}
"""At a time: one of a GPU takes hardly longer than to launch it and to see that it is done."""
_PRODUCT_SIZE = {"cpu": 768, "cuda": 4096}
_SLOW_S, _TOO_SLOW_S = 0.02, 0.2
"""Where a product is expected to take the first, one of a third of its size is timed; where the second, a small one tells."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MakeHostTensor = Callable[[int], torch.Tensor]

IssueCopy = Callable[[Lane, torch.Tensor], Callable[[], torch.Tensor]]
"""Starts a copy of a tensor on a lane, as training does, and returns what waits for it and gives the copy."""

MixedStep = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], Callable[[], None]]
"""From a flat 16-bit parameter, its gradient and its states in fp32, master first, to what updates it as training does."""


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


MakeTensor = Callable[[int, torch.dtype], torch.Tensor]
"""A number of elements and a dtype to a 1-d tensor without contents."""


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


def _copy_figures(device: torch.device, make: "MakeTensor", issue: IssueCopy, beside: bool) -> dict[str, float]:
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


def _updated(make: MakeTensor, count: int) -> list[torch.Tensor]:
    """So many parameters in fp32, with gradients and both averages."""
    return [make(count, torch.float32).fill_(0.01) for _ in range(4)]


def _fused_step(device: torch.device, updated: Iterable[torch.Tensor]) -> Callable[[], None]:
    """A fused AdamW step of parameters, which are given with gradients and both averages."""
    params, grads, averages, squares = ([each] for each in updated)
    steps = [torch.ones((), device=device)]

    def step() -> None:
        torch.ops.aten._fused_adamw_.default(
            params,
            grads,
            averages,
            squares,
            [],
            steps,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return step


def _update_rate(device: torch.device, updated: Sequence[torch.Tensor]) -> float:
    """Parameters per second of such steps."""
    return updated[0].numel() / best_seconds(device, _fused_step(device, updated))


def _host_figures(device: torch.device, make: MakeTensor) -> dict[str, Any]:
    """What an accelerator's host does with the team of updates, and which lanes slow which others down."""
    host = torch.device("cpu")
    with update_team() as team:
        # Made by the thread that writes them: no other may write a tensor of inference mode, in which a program may measure.
        updated = team.submit(_updated, make, _SERVER_UPDATE_PARAMS).result()
        rate = team.submit(_update_rate, host, updated).result()
        parts = zip(*(each.chunk(_UPDATE_PARTS) for each in updated), strict=True)
        turns = itertools.cycle([_fused_step(host, part) for part in parts])
        work = {**work_of(device, make), Lane.UPDATE: OnThread(team, lambda: next(turns)())}
        return {
            "host_update_params_per_s": rate,
            "host_flops_per_s": team.submit(_host_product_rate).result(),
            "contention": measure_contention(device, work),
        }


def _mixed_update_speed(device: torch.device, make: MakeTensor, mixed_step: MixedStep) -> float:
    """Rate of the host's updates of 16-bit parameters, over that of fp32 ones, in the same memory."""
    host = torch.device("cpu")

    def timed() -> float:
        updated = _updated(make, _UPDATE_PARAMS["cpu"] if device.type == "cpu" else _SERVER_UPDATE_PARAMS)
        master, grads, *moments = updated
        weight, grad = grads.view(torch.bfloat16).fill_(0.01).chunk(2)
        steps = _fused_step(host, updated), mixed_step(weight, grad, (master, *moments))
        # By turns: who else works here for a while holds up both. Without a compiler the kernel takes many times as long.
        deadline, rounds = time.perf_counter() + _ROUNDS_S, list[list[float]]()
        while not rounds or (len(rounds) < _ROUNDS and time.perf_counter() < deadline):
            rounds.append([best_seconds(host, step, repeats=1) for step in steps])
        full_s, mixed_s = (min(seconds) for seconds in zip(*rounds, strict=True))
        return full_s / mixed_s

    if device.type == "cpu":
        return timed()
    with update_team() as team:
        return team.submit(timed).result()


def _host_product_rate() -> float:
    """Floating point operations a second of bf16 products on the host."""
    left, product = (torch.ones(_HOST_PRODUCT, _HOST_PRODUCT, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * _HOST_PRODUCT**3 / best_seconds(torch.device("cpu"), lambda: torch.mm(left, left, out=product))


def _plain_host_tensor(device: torch.device, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def measure_machine(
    device: torch.device,
    *,
    make_host_tensor: MakeHostTensor | None = None,
    issue_copy: IssueCopy | None = None,
    copies_run_beside: bool = True,
    offload_dir: str | None = None,
    mixed_step: MixedStep | None = None,
) -> Machine:
    """Time the machine.

    Args:
        device: the compute device.
        make_host_tensor: bytes to a 1-d uint8 tensor in the host tier. Without it, pinned memory for CUDA, and for
            a CPU a mapped file in ``offload_dir``.
        issue_copy: CPU only: how training copies. Without it, plain copies are timed, as if nothing ran beside them.
        copies_run_beside: CPU only: whether computation goes on while copies so issued run; what it loses to them is
            timed. Else it stands still for as long as they take.
        offload_dir: directory of states on disk, and of host memory for a CPU device; the temporary directory where None.
        mixed_step: updates 16-bit parameters; None where nobody asks how fast.
    """
    # the caller may be in the middle of tracing: nothing here may be traced or recorded for backward
    real = unset_fake_temporarily()
    with real, torch.no_grad(), tempfile.TemporaryDirectory(dir=offload_dir) as place:
        if make_host_tensor is None:
            names = (os.path.join(place, str(n)) for n in itertools.count())
            make_host_tensor = (
                functools.partial(_plain_host_tensor, device)
                if device.type == "cuda"
                else lambda n: torch.from_file(next(names), shared=True, size=n, dtype=torch.uint8)
            )
        allocate_host = make_host_tensor

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
        update_rate = _update_rate(device, _updated(make, _UPDATE_PARAMS.get(device.type, _UPDATE_PARAMS["cuda"])))
        figures: dict[str, Any] = {**copies, "host_update_params_per_s": update_rate}
        if device.type != "cpu":
            figures |= _host_figures(device, make_on_host)
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
            device_update_params_per_s=update_rate,
            mixed_update_speed=_mixed_update_speed(device, make_on_host, mixed_step) if mixed_step is not None else 0.0,
            **figures,
        )


def load_or_measure_machine(
    device: torch.device,
    *,
    make_host_tensor: MakeHostTensor | None = None,
    issue_copy: IssueCopy | None = None,
    copies_run_beside: bool = True,
    offload_dir: str | None = None,
) -> Machine:
    """The machine's figures from the cache, timed where it has none. Capacities are always today's."""
    key = machine_key(device, offload_dir)
    machine = load_machine(key)
    if machine is None:
        machine = measure_machine(
            device,
            make_host_tensor=make_host_tensor,
            issue_copy=issue_copy,
            copies_run_beside=copies_run_beside,
            offload_dir=offload_dir,
        )
        store_machine(key, machine)
    return replace(
        machine,
        device_bytes=device_capacity_bytes(device),
        host_bytes=host_capacity_bytes(device, offload_dir),
        disk_bytes=disk_capacity_bytes(offload_dir),
    )
