"""How host and device share their link: copies both ways at once, and kernels that work on host memory where it is.

In: a device with memory of its own, and a way to make homes. Out: bytes a second. Why: the planner takes the two directions for
independent of each other and lets no kernel of a plan work on homes. These figures tell a reader how far that holds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autohete_fx.machine.timing import best_seconds

_BYTES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The figures of a link beside single copies.

    Attributes:
        both_ways_bytes_per_s: of a copy up and one down at the same time, summed.
        kernel_reads_bytes_per_s, kernel_writes_bytes_per_s: of a kernel that reads from a home, or writes to one.
    """

    both_ways_bytes_per_s: float
    kernel_reads_bytes_per_s: float
    kernel_writes_bytes_per_s: float


def measure_link(
    device: torch.device, make_home: Callable[[int], Tensor], host_view: Callable[[Tensor], Tensor]
) -> Link | None:
    """Time a link; None for a CPU device, whose host memory is its own.

    Args:
        make_home: bytes to a 1-d uint8 tensor on ``device`` that lies in host memory.
        host_view: of such a tensor, the same on the CPU.
    """
    return None if device.type == "cpu" else _timed(device, make_home, host_view)


def _timed(device: torch.device, make_home: Callable[[int], Tensor], host_view: Callable[[Tensor], Tensor]) -> Link:
    homes = [make_home(_BYTES).fill_(1) for _ in range(2)]
    up, down = (torch.ones(_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    streams = [torch.Stream(device) for _ in range(2)]
    source, target = map(host_view, homes)

    def copy_both() -> None:
        with streams[0]:
            up.copy_(source, non_blocking=True)
        with streams[1]:
            target.copy_(down, non_blocking=True)

    # As numbers, and not by a copy, for which the driver would take its copy engine.
    there, here = homes[0].view(torch.float32), up.view(torch.float32)
    with torch.no_grad():
        return Link(
            both_ways_bytes_per_s=2 * _BYTES / best_seconds(device, copy_both),
            kernel_reads_bytes_per_s=_BYTES / best_seconds(device, lambda: torch.add(there, 1.0, out=here)),
            kernel_writes_bytes_per_s=_BYTES / best_seconds(device, lambda: torch.add(here, 1.0, out=there)),
        )
