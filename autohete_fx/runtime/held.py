"""The part of a parameter that this rank holds, where the parameter is a `DTensor`, as tensor parallelism makes them.

In: parameters. Out: for a DTensor an ``nn.Parameter`` of this rank's alone over the memory of the local tensor, the same object
each time. Any other parameter is held by itself. Plans, placements, lanes and updates know held parameters only, and need not
know that other ranks have parts of the same whole. Nobody else refers to a held parameter: gradients, hooks and optimizer
states are the DTensor's.
"""

import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.internals import versions
from autohete_fx.internals.modes import DisableTorchFunction, disable_current_modes
from autohete_fx.internals.tensors import local_of

TensorT = TypeVar("TensorT", bound=Tensor)

_held = WeakIdKeyDictionary()  # DTensor -> its held parameter
_wholes = WeakIdKeyDictionary()  # held parameter -> weak reference to its DTensor


def held(param: TensorT) -> TensorT:
    """This rank's part of a parameter; the parameter itself where it is no DTensor."""
    if not versions.is_dtensor(param):
        return param
    found: Any
    with DisableTorchFunction():  # or a fence would wait for its memory
        local, found = local_of(param), _held.get(param)
        if found is None:
            with disable_current_modes(), torch.inference_mode(False):
                found = _held[param] = nn.Parameter(local.detach(), requires_grad=param.requires_grad)
            _wholes[found] = weakref.ref(param)
        elif found.data_ptr() != local.data_ptr() or found.shape != local.shape or found.device != local.device:
            found.data = local.detach()  # somebody gave the DTensor another local tensor
        if found.requires_grad != param.requires_grad:
            found.requires_grad_(param.requires_grad)
    return found


def is_held(param: Tensor) -> bool:
    """Whether anybody has asked for the held parameter of a DTensor."""
    return param in _held


def whole_of(param: Tensor) -> Tensor | None:
    """The DTensor that a held parameter is this rank's part of; None for any other parameter."""
    reference = _wholes.get(param)
    return None if reference is None else reference()


def move(param: Tensor, data: Tensor) -> None:
    """Give a held parameter other memory with the same values, and its DTensor with it."""
    whole = whole_of(param)
    if whole is not None:
        with torch.no_grad():
            local_of(whole).data = data
    param.data = data
