"""The optimizer's update on the CPU, as a share of a stream of the same bytes.

The stream is a kernel with trivial arithmetic, compiled by Inductor too, that reads gradient, master and moments and
writes weight, master and moments: 28 bytes a parameter for AdamW, 20 for Lion. The mixed update reads the old weight as
well, to honour edits of it; the second share is against a stream that does the same (30 and 22 bytes). fp32 updates stream
28 and 20 bytes: gradient, parameter and moments in; parameter and moments out.

Every repetition times each candidate right after the stream, and the figure is the median of the ratios of these
neighbours, because machines drift. Whole ``optimizer.step()`` calls are timed. Through the update lane, as where updates
overlap with what follows, that is a step of 16 parameters on the lane's thread and its OpenMP team, until all are done.
Two rows at the end are of Lion's seconds over AdamW's, beside what the planner takes it to be.

Host states lie in files. Where the system writes those back to a disk meanwhile, that is what is measured: give a directory in
RAM.

    python examples/benchmarks/host_update.py --params 128000000 --threads 1 2 --offload-dir /dev/shm
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from results import environment, print_figures, save
from torch import Tensor
from torch.nn import Parameter

import autohete_fx
from autohete_fx.ir import Optimizer, Overlap, Params, Schedule
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, open_tier

Run = Callable[[], object]

MOMENTS = {"AdamW": 2, "Lion": 1}
"""Of our optimizers: states as large as a parameter, beside the master weight of a 16-bit one."""


def main() -> None:
    """Print the machine, and a table for every number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=64_000_000, help="parameters, in one tensor")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--optimizers", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    parser.add_argument("--offload-dir", help="where the homes of host states are; default: a temporary directory")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    print_figures(environment())
    rows: list[dict[str, Any]] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        torch.compiler.reset()
        print(f"\n{threads} threads, {arguments.params:,} parameters, {arguments.repeats} repetitions")
        print(f"  {'':<50}{'ms':>8}{'GB/s':>8}   share of a stream")
        tier = open_tier("cpu", arguments.offload_dir)
        for name, num_bytes, alike, run in candidates(arguments.params, tier, arguments.optimizers):
            times = measure([*alike, run], arguments.repeats)
            shares = [median_ratio(stream, times[-1]) for stream in times[:-1]]
            step_s = statistics.median(times[-1])
            against = (f"{share:.2f} of {num_bytes + 2 * n} bytes" for n, share in enumerate(shares))
            rate = 1e-9 * num_bytes * arguments.params / step_s
            print(f"  {name:<50}{step_s * 1e3:>8.1f}{rate:>8.1f}   {', '.join(against)}", flush=True)
            rows.append({"threads": threads, "what": name, "GB/s": rate, "shares of streams": shares})
        for dtype in (torch.bfloat16, torch.float32):
            runs = [step_of(kind, arguments.params, dtype, Optimizer.DEVICE, tier) for kind in ("AdamW", "Lion")]
            adamw, lion = measure(runs, arguments.repeats)
            planned = autohete_fx.Lion([weight := Parameter(torch.ones(2, dtype=dtype))]).update_share_of(weight)
            ratio, what = median_ratio(lion, adamw), f"Lion over AdamW, {dtype}"
            print(f"  {what:<50}{ratio:>8.2f}, planned {planned:.2f}", flush=True)
            rows.append({"threads": threads, "what": what, "ratio": ratio, "planned": planned})
            save(arguments.json, rows, params=arguments.params, repeats=arguments.repeats)


def median_ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """Of neighbours."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def candidates(length: int, tier: HostTier, optimizers: Sequence[str]) -> Iterator[tuple[str, int, list[Run], Run]]:
    """Name, bytes a parameter, streams to compare with, and what is timed; one at a time, so that memory holds only one."""
    for kind in optimizers:
        num_bytes = 12 + 8 * MOMENTS[kind]
        for dtype in (torch.bfloat16, torch.float32):
            alike = partial(streams, length, dtype, MOMENTS[kind])
            for where in (Optimizer.DEVICE, Optimizer.HOST):
                name = f"autohete_fx.{kind}, {dtype}, {where.value} states"
                yield name, num_bytes, alike(), step_of(kind, length, dtype, where, tier)
            name = f"the same, {dtype}, through the update lane"
            yield name, num_bytes, alike(), through_lane(kind, length, dtype, tier)
    if "AdamW" in optimizers:
        yield "torch.optim.AdamW(fused=True), fp32", 28, streams(length, torch.float32, 2), torch_adamw(length)
        yield "grad.float(), torch fused, copy_ to bf16", 28, streams(length, torch.bfloat16, 2), cast_and_fused(length)


def streams(length: int, dtype: torch.dtype, num_moments: int) -> list[Run]:
    """The stream of the kernel's bytes but the old weight and, where the update reads that besides, of all of them."""
    weight, grad = torch.randn(2, length).to(dtype)
    moments = [torch.rand(length) for _ in range(num_moments)]
    if dtype == torch.float32:
        return [partial(_stream_full, weight, grad, *moments)]
    master = torch.randn(length)
    tensors = weight, grad, master, *moments
    return [partial(_stream_mixed, *tensors), partial(_stream_mixed_and_weight, *tensors)]


@torch.compile(dynamic=False)
def _stream_full(weight: Tensor, grad: Tensor, *moments: Tensor) -> None:
    weight += grad
    for moment in moments:
        moment += grad


@torch.compile(dynamic=False)
def _stream_mixed(weight: Tensor, grad: Tensor, master: Tensor, *moments: Tensor) -> None:
    value = grad.float()
    master += value
    for moment in moments:
        moment += value
    weight.copy_(master)


@torch.compile(dynamic=False)
def _stream_mixed_and_weight(weight: Tensor, grad: Tensor, master: Tensor, *moments: Tensor) -> None:
    value = grad.float() + weight.float()
    master += value
    for moment in moments:
        moment += value
    weight.copy_(master)


def step_of(kind: str, length: int, dtype: torch.dtype, where: Optimizer, tier: HostTier) -> Run:
    """A step of an optimizer of ours; host states bring parameter and gradient to the host too."""
    param = Parameter(torch.randn(length).to(dtype))
    optimizer: Any = getattr(autohete_fx, kind)([param], lr=1e-3)
    grad = torch.randn(length).to(dtype)
    if where is Optimizer.HOST:
        place_param(param, Placement(params=Params.HOST, optimizer=where, tier=tier, block=0))
        grad = tier.empty_like(grad).copy_(grad)
    param.grad = grad
    return optimizer.step


def through_lane(kind: str, length: int, dtype: torch.dtype, tier: HostTier) -> Run:
    """A step whose updates are work of the update lane, and the wait for them."""
    updates = Updates(Lanes("cpu", in_background=True))
    updates.schedule = Schedule(overlap=Overlap.STEP)
    params = [Parameter(piece.clone()) for piece in torch.randn(length).to(dtype).chunk(16)]
    optimizer: Any = getattr(autohete_fx, kind)(params, lr=1e-3)
    for block, param in enumerate(params):
        where = Placement(params=Params.HOST, optimizer=Optimizer.HOST, tier=tier, block=block, updates=updates)
        place_param(param, where)
        param.grad = tier.empty_like(param).normal_()

    def run() -> None:
        optimizer.step()
        assert updates.is_pending, "the step was over when it returned"
        optimizer.synchronize()

    return run


def torch_adamw(length: int) -> Run:
    """torch's fused step in fp32."""
    param = Parameter(torch.randn(length))
    param.grad = torch.randn(length)
    return torch.optim.AdamW([param], lr=1e-3, fused=True).step


def cast_and_fused(length: int) -> Run:
    """What one writes by hand around torch's fused step for bf16 parameters."""
    weight, grad = torch.randn(2, length).bfloat16()
    master = Parameter(weight.float())
    optimizer = torch.optim.AdamW([master], lr=1e-3, fused=True)

    def run() -> None:
        master.grad = grad.float()
        optimizer.step()
        weight.copy_(master.detach())

    return run


def measure(runs: Sequence[Run], repeats: int) -> list[list[float]]:
    """Seconds of every run, in turns; the first two rounds, which compile and touch the pages, are left out."""
    times: list[list[float]] = [[] for _ in runs]
    for repeat in range(repeats + 2):
        for run, seconds in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            if repeat > 1:
                seconds.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
