"""Where each parameter lives, and who decided so.

In: a ``Parameter`` and the ``Placement`` that a plan gives it. Out: its data on the device or in a home of the host tier, and a
record that the optimizer reads at every step. The record is keyed by the identity of the tensor and holds it weakly. Nothing is
stored on the ``Parameter``, so pickling, deepcopying and dropping it are unaffected. A copy is simply a parameter that nobody
placed, in ordinary memory.

A parameter without a record lives where its data lives, and its optimizer states live beside it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.graph.ops import SMALLEST_COPY_BYTES
from autohete_fx.internals.modes import disable_current_modes
from autohete_fx.ir import Optimizer, Params
from autohete_fx.runtime.disk import DiskTier
from autohete_fx.runtime.held import move
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.tiers.host import HostTier, is_home


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan's decision about one parameter.

    Attributes:
        params: where the parameter lives between its uses.
        optimizer: where its optimizer states live and its update runs.
        tier: gives the homes, and names the device.
        block: index of the block that owns the parameter; smaller is needed sooner in forward.
        updates: where its updates on the host run without the caller; None: they never do.
        disk: gives the homes of states that the optimizer is to have on disk.
    """

    params: Params
    optimizer: Optimizer
    tier: HostTier
    block: int
    updates: Updates | None = None
    disk: DiskTier | None = None


_placements = WeakIdKeyDictionary()


_kept = WeakIdKeyDictionary()


def keep_in_place(param: Tensor) -> None:
    """Somebody else decides where the parameter is: from now on no plan moves it."""
    _kept[param] = True


def is_movable(param: Tensor) -> bool:
    """Whether a parameter follows its block's decisions; a small one stays on the device with all that belongs to it."""
    return param not in _kept and param.numel() * param.element_size() >= SMALLEST_COPY_BYTES


def placement_of(param: Tensor) -> Placement | None:
    """The latest placement of a parameter; None where nobody placed it."""
    return _placements.get(param)


def place_param(param: Tensor, placement: Placement) -> None:
    """Move ``param.data`` to where the placement says, and record the placement.

    Values are kept exactly, strides too where the parameter is dense. Does nothing to data that is already there.
    Its gradient follows only when the device itself changes. As with ``Module.to``, tensors that alias the old
    data (``param.data``, a detached view) keep the old memory. The data moves before the record changes, so an
    allocation that fails leaves both as they were.

    Raises:
        HostMemoryError: the tier has no room for the home.
    """
    # Compilers place parameters in the middle of tracing, and users may compile under inference mode; the parameter
    # outlives both as an ordinary tensor.
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        tier, data = placement.tier, param.data
        if placement.params is Params.HOST:
            if not tier.owns(data):
                home = tier.empty_like(data)
                # Data on the CPU goes there by the CPU: to the driver, a copy to the device would end in host memory.
                (tier.host_view(home) if data.device.type == "cpu" else home).copy_(data)
                _set_data(param, home)
        elif data.device != tier.device or is_home(data):
            _set_data(param, torch.empty_like(data, device=tier.device).copy_(data))
    _placements[param] = placement


def _set_data(param: Tensor, data: Tensor) -> None:
    grad = param.grad
    if grad is not None and grad.device != data.device:
        # A tensor refuses data on another device than its gradient's.
        param.grad = None
        move(param, data)
        param.grad = grad.to(data.device)
    else:
        move(param, data)
