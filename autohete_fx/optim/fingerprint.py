"""Fingerprints: whether a tensor holds the bits that it held before, told on its own device.

In: a dense tensor. Out: an int64, equal for equal bits, and else different but for one chance in 2**64. It is the sum over all
words of a mixture of the word and its place (the finaliser of SplitMix64; Steele, Lea and Flood, 2014). Sums of integers do not
depend on their order, so every run of the kernel agrees. One pass that reads the memory once.
"""

import functools
import logging
import warnings

import torch
from torch import Tensor

from autohete_fx.internals.small_kernels import LONGEST, Kernel, compile_kernel

log = logging.getLogger(__name__)

_TILE = 1 << 20
"""Words that are mixed at a time where Inductor cannot compile."""

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""2**64 over the golden ratio, and SplitMix64's multipliers, as signed numbers."""

_WORDS = (torch.int64, torch.int32, torch.int16)


def fingerprint(t: Tensor) -> Tensor:
    """The fingerprint of a dense tensor whose elements have 2, 4 or 8 bytes: one int64 on its device."""
    found = torch.empty(1, dtype=torch.int64, device=t.device)
    fingerprint_into(t, found)
    return found


def fingerprint_into(t: Tensor, out: Tensor) -> None:
    """`fingerprint`, into what it returned before."""
    words = _words(t)
    if words.numel() <= LONGEST:
        _sum_up(words, out)
    else:
        parts = words.split(LONGEST)
        sums = torch.empty(len(parts), dtype=torch.int64, device=t.device)
        for part, slot in zip(parts, sums.split(1), strict=True):
            _sum_up(part, slot)
        _sum_up(sums, out)


def _sum_up(words: Tensor, out: Tensor) -> None:
    kernel = _compiled(words.dtype, words.device)
    if kernel is None or words.numel() < 2:  # one element is a shape of its own for the tracer
        _in_tiles(words, out)
    else:
        kernel([words, out])


def _words(t: Tensor) -> Tensor:
    """The memory of a dense tensor as the widest integers that fit."""
    flat = t.detach().as_strided((t.numel(),), (1,), t.storage_offset())
    begin, length = (n * t.element_size() for n in (t.storage_offset(), t.numel()))
    return flat.view(next(word for word in _WORDS if begin % word.itemsize == length % word.itemsize == 0))


def _mixed(words: Tensor, first_place: int = 0) -> Tensor:
    places = torch.arange(first_place, first_place + words.numel(), device=words.device)
    mixed = words.long() * _GOLDEN + places
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    return (mixed ^ _shifted(mixed, 31)).sum().reshape(1)


def _shifted(t: Tensor, by: int) -> Tensor:
    """To the right, with zeros on the left: PyTorch's own keeps the sign, so two numbers would become one."""
    return (t >> by) & ((1 << (64 - by)) - 1)


def _kernel(words: Tensor, out: Tensor) -> tuple[()]:
    out.copy_(_mixed(words))
    return ()


def _in_tiles(words: Tensor, out: Tensor) -> None:
    out.zero_()
    for n, tile in enumerate(words.split(_TILE)):
        out += _mixed(tile, n * _TILE)


@functools.cache
def _compiled(word: torch.dtype, device: torch.device) -> Kernel | None:
    """By Inductor; None where it cannot compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own deprecations
            kernel = compile_kernel(_kernel, (word,), device, fixed=[(1, torch.int64)])
            _verify(kernel, word, device)
            return kernel
    except Exception as error:  # the toolchain's errors share no base class
        log.warning(
            "fingerprints of %s are made in eager operations, which is as exact and slower: %r. Install a working C++ compiler"
            " (or Triton, on a GPU) to have the fast ones",
            word,
            error,
        )
        return None


def _verify(kernel: Kernel, word: torch.dtype, device: torch.device) -> None:
    words = torch.arange(-700, 700, device=device).to(word) * 37
    expected, found = torch.zeros(2, 1, dtype=torch.int64, device=device)
    _in_tiles(words, expected)
    kernel([words, found])
    assert torch.equal(expected, found), "the compiled fingerprint disagrees with eager"
