"""Pinned host memory in exact sizes: the memory below a CUDA device's.

In: byte counts. Out: chunks for the arena, page-locked and mapped into the device's address space. Why not PyTorch's
host allocator: it rounds up to powers of two and pins tensor by tensor. ``cudaHostRegister`` pins what ``mmap`` gave,
to the page, and unified addressing makes the host's pointer valid in kernels.

Pinning is slow where the kernel has to find page after page while the driver waits. A model keeps tens of GiB on the host.
Pages are therefore large where the system has such, and all threads touch them first. The mapping is private, since Linux makes
large pages of no other. Forked children do not inherit it: the kernel would copy for them what is pinned.

Nothing of CUDA is touched before the first chunk is made.
"""

import contextlib
import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autohete_fx.errors import HostMemoryError
from autohete_fx.runtime.tiers import ram
from autohete_fx.runtime.tiers.arena import Chunk, bytes_text

if TYPE_CHECKING:
    import torch

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped


def cuda_register(address: int, num_bytes: int, device: "torch.device | None" = None) -> int:
    """Page-lock a range and map it into the device, by default the current one. Returns the cudaError, 0 for success."""
    import torch

    with torch.cuda.device(device):  # a thread's current one may be another, where this would open a context
        error = int(_cudart().cudaHostRegister(address, num_bytes, _PORTABLE_AND_MAPPED))
        if error != 0:
            _clear_last_error()
    return error


def _clear_last_error() -> None:
    """CUDA keeps the error of a refused call, and PyTorch would raise it after the next kernel, whatever that is."""
    import torch

    from autohete_fx.internals.modes import disable_current_modes

    # A kernel that raises, and thereby clears, the error that we know of; tracing would launch none.
    with disable_current_modes(), contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def cuda_unregister(address: int, device: "torch.device | None" = None) -> None:
    """Undo ``cuda_register`` for the range that starts at ``address``, when ``device`` is done with all it was given.

    A model may be dropped while a kernel still reads its homes.
    """
    import torch

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        error = int(_cudart().cudaHostUnregister(address))
    assert error == 0, f"cudaHostUnregister returned error {error} for an address that was registered"


def pin(
    num_bytes: int,
    register: Callable[[int, int], int] = cuda_register,
    unregister: Callable[[int], None] = cuda_unregister,
) -> Chunk:
    """A pinned chunk of exactly ``num_bytes`` (rounded up to pages).

    Raises HostMemoryError where RAM is short (asked before, since the kernel's answer would be to kill a process) or
    where the driver refuses.
    """
    num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    available = ram.available_bytes()
    if num_bytes > available:
        raise HostMemoryError(
            f"asked to pin {bytes_text(num_bytes)}, but {bytes_text(available)} of RAM are available; "
            "free memory, or lower the host budget"
        )
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise HostMemoryError(
            f"asked to map {bytes_text(num_bytes)} of RAM: {error.strerror}; lower the host budget"
        ) from error
    _populate(mapping)
    chunk = Chunk(mapping)
    error = register(chunk.address, num_bytes)
    if error != 0:
        raise HostMemoryError(
            f"asked to pin {bytes_text(num_bytes)} ({bytes_text(available)} of RAM are available), and the driver "
            f"refused with cudaError {error}; lower the host budget, or raise the limit of locked memory (ulimit -l)"
        )
    chunk.on_release(unregister)
    return chunk


def _populate(mapping: mmap.mmap) -> None:
    """Have the kernel find all pages, large ones if it has them, on all threads."""
    import torch

    from autohete_fx.internals.modes import disable_current_modes

    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without it makes this slower, not wrong
            mapping.madvise(getattr(mmap, advice))
    with disable_current_modes():
        # More often than each page: PyTorch gives every thread tens of thousands of elements, however far apart they are.
        torch.frombuffer(mapping, dtype=torch.uint8)[:: mmap.PAGESIZE // 8].fill_(0)


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()  # initialises CUDA, so only when a chunk is asked for
