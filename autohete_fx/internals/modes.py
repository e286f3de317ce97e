"""Modes that stand between a call of PyTorch's and its kernel, and tensors without memory."""

from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _get_function_stack_at, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._dispatch.python import no_python_dispatcher
from torch._guards import compile_context, detect_fake_mode, tracing
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "CopiedFakeTensorMode",
    "DataDependentOutputException",
    "DeviceContext",
    "DisableTorchFunction",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "StayOnMeta",
    "TorchDispatchMode",
    "compile_context",
    "detect_fake_mode",
    "disable_current_modes",
    "function_modes",
    "has_dispatch_modes",
    "no_python_dispatcher",
    "pop_function_mode",
    "push_function_mode",
    "tracing",
    "unset_fake_temporarily",
]


class CopiedFakeTensorMode(FakeTensorMode):
    """A fake mode whose tensors may be copied by `copy.deepcopy`.

    PyTorch copies a fake tensor's mode, too, with weak references to storages that two modes then free. The process crashes at a
    later garbage collection.
    """

    def __deepcopy__(self, memo: dict[int, object]) -> "CopiedFakeTensorMode":
        return self


class StayOnMeta(TorchFunctionMode):
    """Tensors without data stay where they are when a program converts them, or a module, to a device."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (Tensor.to, Tensor.cpu, Tensor.cuda) or not args[0].is_meta:
            return func(*args, **kwargs)
        given = (*args[1:], *kwargs.values())
        like = next((each for each in given if isinstance(each, Tensor)), args[0])
        return args[0].type(next((each for each in given if isinstance(each, torch.dtype)), like.dtype))


def function_modes() -> list[object]:
    """Those on this thread's stack, the lowest first."""
    return [_get_function_stack_at(at) for at in range(_len_torch_function_stack())]


def has_dispatch_modes() -> bool:
    """Whether any mode of the dispatcher is on, of tracing or of a user."""
    return bool(_len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch())
