"""Norms of gradients in homes, taken by the device before they left it.

A step that clips needs the norm of every gradient before its first update. In: gradients on the device, and the homes that they
are copied to. Out: their norms, for as long as the homes hold what was copied there. Why: the CPU would have to read all
gradients once more, while nothing else can run. The device reads them at its own memory's rate, next to the copy.

They are right as long as nobody has touched the gradient. The fence drops the norm of what is given to anybody, and ``step()``
takes those that are missing from the gradients themselves. Homes are fresh, so nobody has a view of one from before.
"""

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autohete_fx.internals.tensors import has_foreach_support
from autohete_fx.runtime.pending.addresses import address_of
from autohete_fx.runtime.tiers.host import lease_of


@dataclass(frozen=True, slots=True)
class _Taken:
    norm: Tensor
    lease: "weakref.ref[ctypes.Array[ctypes.c_char]]"
    version: int
    layout: tuple[Any, ...]


class Norms:
    """The known norms of gradients of the last backward pass, by the memory of their homes, which it does not keep."""

    def __init__(self) -> None:
        self._taken: dict[int, _Taken] = {}

    def __bool__(self) -> bool:
        return bool(self._taken)

    def take(self, grad: Tensor, home: Tensor) -> None:
        """The norm of a gradient that is copied to a home, which will be ``.grad``."""
        address, lease = address_of(home), lease_of(home)
        if address is not None and lease is not None and _layout_of(grad)[:3] == _layout_of(home)[:3]:
            [norm] = norms_of([grad])
            self._taken[address] = _Taken(norm, weakref.ref(lease), home._version, _layout_of(home))

    def of(self, grad: Tensor) -> Tensor | None:
        """The norm of what is such a home as it was; None where that is not known."""
        taken = self._taken.get(address_of(grad) or 0)
        if taken is None or taken.lease() is None or taken.lease() is not lease_of(grad):
            return None
        return taken.norm if (grad._version, _layout_of(grad)) == (taken.version, taken.layout) else None

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Somebody may have written to these."""
        for t in tensors:
            self._taken.pop(address_of(t) or 0, None)

    def clear(self) -> None:
        """They are no longer of use, or somebody may have written to any gradient."""
        self._taken.clear()


def _layout_of(t: Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.dtype, t.storage_offset()


def norms_of(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The norms of tensors of one device and dtype, as ``torch.nn.utils.get_total_norm`` takes them: how many there are changes
    no bit."""
    if tensors and has_foreach_support(list(tensors), tensors[0].device):
        return torch.ops.aten._foreach_norm.Scalar(list(tensors), 2.0)
    return [torch.linalg.vector_norm(t, 2.0) for t in tensors]
