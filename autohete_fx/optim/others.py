"""States of optimizers that are none of ours, as large as they turned out to be.

In: parameters that plans count, and the steps of all optimizers. Out: ``counted_state_bytes``. Plans count two states for each
parameter before its optimizer has stepped; AMSGrad has three, and L-BFGS many, all of them under its first parameter. Where an
optimizer holds more in sum, plans are made again with what it holds, as for a new optimizer.
"""

import logging
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.ir.sizes import format_bytes
from autohete_fx.optim.owners import note_change, optimizer_of
from autohete_fx.runtime.held import held
from autohete_fx.runtime.pending.fence import tensors_in

log = logging.getLogger(__name__)

_SMALL_BYTES = 64
"""Numbers of a parameter's steps and the like, which are not counted."""

_seen: MutableMapping[Tensor, int | None] = WeakIdKeyDictionary()  # parameter of a plan -> bytes; None: two each
_found: MutableMapping[Tensor, int] = WeakIdKeyDictionary()  # likewise, as the latest look found
_num_steps: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()
_is_watching = False


def watch(params: Iterable[Tensor]) -> None:
    """See to the steps of optimizers of these parameters, which a plan counts."""
    global _is_watching
    for param in params:
        _seen.setdefault(param, None)
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_post_hook(_after_step)


def counted_state_bytes(param: Tensor) -> int:
    """Bytes of a parameter's states, as far as known: two of its own size and dtype before a step has shown more."""
    seen = _seen.get(param)
    return 2 * param.numel() * param.element_size() if seen is None else seen


def absent_state_bytes(params: Iterable[Tensor]) -> int:
    """Bytes of states that plans count for these, and that no step has shown to be there."""
    without = (param for param in params if param.requires_grad and optimizer_of(param) is None)
    return max(0, sum(counted_state_bytes(param) - _found.get(param, 0) for param in without))


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    count = _num_steps[optimizer] = _num_steps.get(optimizer, 0) + 1
    if count & (count - 1):  # some grow over steps: the first, second, fourth and so on show it
        return
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    # Ranks that hold a parameter together would not all see as much of it.
    params = [param for param in params if param in _seen and optimizer_of(param) is None and held(param) is param]
    found = {param: _device_bytes(optimizer.state.get(param), param) for param in params}
    _found.update(found)
    found_bytes, counted_bytes = sum(found.values()), sum(map(counted_state_bytes, params))
    if found_bytes > counted_bytes + _SMALL_BYTES * len(params):
        # One without a gradient may get states yet.
        _seen.update({param: size for param, size in found.items() if size or param.grad is not None})
        log.warning(
            "%s holds %s of states after %d steps, where %s were counted: the model is planned again for that."
            " An optimizer of autohete_fx tells plans its states before the first step",
            type(optimizer).__qualname__,
            format_bytes(found_bytes),
            count,
            format_bytes(counted_bytes),
        )
        note_change()


def _device_bytes(state: object, param: Tensor) -> int:
    """Bytes of a parameter's states on its device; of views of a larger buffer, their own."""
    known = {each.untyped_storage().data_ptr() for each in (param, param.grad) if each is not None}
    viewed: dict[int, tuple[int, int]] = {}
    for t in tensors_in((state,)):
        storage = t.untyped_storage()
        if t.device == param.device and storage.data_ptr() not in known:
            _, so_far = viewed.get(storage.data_ptr(), (0, 0))
            viewed[storage.data_ptr()] = storage.nbytes(), so_far + t.nbytes
    return sum(map(min, viewed.values()))
