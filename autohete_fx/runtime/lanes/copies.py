"""How the lanes of a CPU device copy: with every thread that computes, or on the lane's own thread without the GIL."""

import ctypes
from collections.abc import Callable

import torch

from autohete_fx.graph.ops import is_dense
from autohete_fx.runtime.lanes.team import num_cores

_PIECE_BYTES = 64 * 2**20
_SERIAL_ELEMENTS = 32767
"""PyTorch parallelises element-wise work from 32768 elements on."""

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies a destination's worth from a source: ``copy(dst, src)``."""


def has_spare_core() -> bool:
    """Whether this process may use more cores than PyTorch computes with, so that copies can run beside compute."""
    return num_cores() > torch.get_num_threads()


def cpu_copy(in_background: bool) -> Copy:
    """How the lanes of a CPU device copy."""
    return copy_on_this_thread if in_background else copy_with_all_threads


def copy_with_all_threads(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy between CPU tensors of equal size as PyTorch does, with every thread that computes."""
    dst.copy_(src)


def copy_on_this_thread(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy between CPU tensors of equal size on this thread alone; without the GIL where both have one dense layout."""
    if dst.numel() == 0:
        return
    same_bits = dst.dtype == src.dtype and dst.is_conj() == src.is_conj() and dst.is_neg() == src.is_neg()
    if same_bits and dst.stride() == src.stride() and is_dense(dst.shape, dst.stride()):
        to, of, num_bytes = dst.data_ptr(), src.data_ptr(), dst.numel() * dst.element_size()
        for offset in range(0, num_bytes, _PIECE_BYTES):
            # ctypes lets go of the GIL for the call.
            ctypes.memmove(to + offset, of + offset, min(_PIECE_BYTES, num_bytes - offset))
    else:
        _copy_serially(dst, src)


def _copy_serially(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy any layouts in tiles that are too small for PyTorch to parallelise, and that suit the cache."""
    if dst.numel() <= _SERIAL_ELEMENTS:
        dst.copy_(src)
        return
    dim = max(range(dst.dim()), key=lambda d: dst.shape[d])
    half = dst.shape[dim] // 2
    _copy_serially(dst.narrow(dim, 0, half), src.narrow(dim, 0, half))
    _copy_serially(dst.narrow(dim, half, dst.shape[dim] - half), src.narrow(dim, half, dst.shape[dim] - half))
