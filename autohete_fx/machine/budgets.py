"""The machine's budgets, from options, and its measured rates.

In: a device and the options. Out: bytes and an `ir.Machine`.
"""

import functools
from collections.abc import Callable

import torch

from autohete_fx.graph import ops
from autohete_fx.ir import Lane, Machine
from autohete_fx.machine.devices import machine_of_rank
from autohete_fx.machine.measure import device_capacity_bytes, host_capacity_bytes, load_or_measure_machine
from autohete_fx.options import Options, resolve_bytes
from autohete_fx.runtime.lanes.lanes import has_spare_core
from autohete_fx.runtime.lanes.team import ranks_sharing_cores
from autohete_fx.runtime.session import Session
from autohete_fx.runtime.tiers.host import open_tier

_GRAIN = 64

_LEFT_SHARE = 32
"""The share of a process's memory that the caching allocator leaves in pieces that fit no tensor."""

CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""Bytes that cuBLAS keeps for a stream on the largest GPUs."""
_WORKSPACES_BYTES = 3 * CUBLAS_WORKSPACE_BYTES
"""Those of the streams of forward and of backward, and once for cuBLASLt."""


def device_budget_bytes(device: torch.device, options: Options) -> int | None:
    """The peak device memory allowed, in bytes: the option, else None on a CPU device.

    On CUDA it is what is free, but for what the libraries and the allocator take.
    """
    total = device_capacity_bytes(device)
    if options.memory_budget is not None:
        return resolve_bytes(options.memory_budget, total)
    if device.type == "cpu":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    # In steps of 1/64 of the card, so that the next process, which finds a little more or less, plans alike.
    step = total // _GRAIN
    takes = min((free + mine) // step * step, allowed)
    return max(1, takes - takes // _LEFT_SHARE - _WORKSPACES_BYTES)


def tuning_bytes(device: torch.device, options: Options) -> int:
    """Device bytes that Inductor takes in the first step beside the step's own tensors.

    It times variants of each of Triton's kernels where that first runs. In between it empties the device's cache by filling a
    buffer of its size.
    """
    if device.type != "cuda" or options.inner_backend == "eager":
        return 0
    return torch.cuda.get_device_properties(device).L2_cache_size


def host_budget_bytes(device: torch.device, options: Options) -> int | None:
    """Host memory allowed for homes: the option, else what the tier has. No other program can have pinned
    memory: an eighth of RAM stays for this process and the system."""
    total = host_capacity_bytes(device, options.offload_dir)
    if options.host_budget is not None:
        return resolve_bytes(options.host_budget, total)
    return total - total // 8 if device.type == "cuda" else total


def machine_of(device: torch.device, session: Session, options: Options, num_ranks: int = 1) -> Machine:
    """The machine's rates, measured once and cached; those of host memory and disk where the options put them.

    ``num_ranks``: how many share the host's memory and disk, of which this one gets its part. While it measures, they are idle.
    Its part of the cores is among the ranks that share them.
    """
    # Not the session's: what is measured may be more than its host budget, and would stay reserved.
    tier = functools.cache(lambda: open_tier(device, options.offload_dir))

    def host_tensor(num_bytes: int) -> torch.Tensor:
        # As the lanes copy: of the host's side, so that the driver knows which memory it is.
        return tier().host_view(tier().empty_strided((num_bytes,), (1,), torch.uint8))

    def issue_copy(lane: Lane, src: torch.Tensor) -> Callable[[], torch.Tensor]:
        dst = tier().empty_like(src) if lane is Lane.D2H else ops.empty_copy_of(src)
        handle = session.issue(lane, 0, dst, src)
        return lambda: session.wait(handle, src)

    ranks_of_cores = ranks_sharing_cores()
    alone = load_or_measure_machine(
        device,
        make_host_tensor=host_tensor,
        issue_copy=issue_copy,
        copies_run_beside=has_spare_core(),
        offload_dir=options.offload_dir,
        num_ranks=ranks_of_cores,
    )
    if num_ranks == ranks_of_cores == 1:
        return alone
    return machine_of_rank(alone, ranks_of_node=num_ranks, ranks_of_cores=ranks_of_cores)
