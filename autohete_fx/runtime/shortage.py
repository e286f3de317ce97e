"""The message for a device's allocator that refuses memory although a plan was to keep its budget.

In: the allocator's error and figures, and what the plan predicts. Out: a text that says which plan, what it predicts, what is
taken and how, and which budget to ask for. A plan counts live tensors. The memory that the process may take runs out. Tensors
that are not the plan's fill it, too, and pieces of freed memory that are too small for the next tensor.
"""

import re
from dataclasses import dataclass

import torch

from autohete_fx.ir.sizes import format_bytes

_REQUEST = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_GRAIN_BYTES = 2**20
"""Steps of the budget to ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """How a device's memory was used when some was refused, in bytes.

    Attributes:
        requested: what was refused; 0 where the error does not tell.
        allocated: in live tensors of this process.
        reserved: taken by this process: live tensors and pieces that none fits in.
        capacity: what this process could take in all.
    """

    requested: int
    allocated: int
    reserved: int
    capacity: int

    @property
    def in_pieces(self) -> int:
        """Taken, and of no use."""
        return max(0, self.reserved - self.allocated)


def device_use(error: BaseException, device: torch.device) -> DeviceUse:
    """The memory of a CUDA device in use now."""
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return DeviceUse(
        requested=requested_bytes(str(error)),
        allocated=torch.cuda.memory_allocated(device),
        reserved=reserved,
        capacity=min(free + reserved, allowed),
    )


def requested_bytes(message: str) -> int:
    """The bytes that were asked for, as PyTorch's message says; 0 where it does not."""
    found = _REQUEST.search(message)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def budget_that_fits(use: DeviceUse, predicted_peak_bytes: int) -> int:
    """The largest budget, in bytes, with which the process would have kept within its capacity; less than the plan's peak.

    Bytes above the plan's peak are not the plan's, and stay; the pieces stay as well.
    """
    foreign = max(0, use.allocated + use.requested - predicted_peak_bytes)
    fits = min(use.capacity - use.in_pieces - foreign, predicted_peak_bytes - 1)
    return max(0, fits // _GRAIN_BYTES * _GRAIN_BYTES)


def shortage_text(use: DeviceUse, plan: str, predicted_peak_bytes: int, budget_bytes: int | None) -> str:
    """One paragraph.

    Args:
        plan: what to call it.
        predicted_peak_bytes: of the plan.
        budget_bytes: that it was made for; None for no limit.
    """
    within = "without a limit" if budget_bytes is None else f"for a budget of {format_bytes(budget_bytes)}"
    fits = budget_that_fits(use, predicted_peak_bytes)
    advice = (
        f"ask for memory_budget='{fits // 2**20}MiB' or less"
        if fits
        else "no memory_budget would do: free what else this process holds on the device"
    )
    return (
        f"autohete_fx: {plan}, made {within}, predicts a peak of {format_bytes(predicted_peak_bytes)}. When"
        f" {format_bytes(use.requested)} more were refused, this process had {format_bytes(use.allocated)} in live tensors"
        f" and {format_bytes(use.in_pieces)} in pieces that fit none, of {format_bytes(use.capacity)} that it could take;"
        f" {advice}, or set PYTORCH_ALLOC_CONF=expandable_segments:True, which leaves fewer such pieces"
    )
