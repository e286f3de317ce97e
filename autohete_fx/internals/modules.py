"""Modules: what stands in the place of their calls, whether Dynamo compiled them, and how they are converted without memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_CALL = (
    "_compiled_call_impl"  # the attribute of a module that a call of it runs instead of its forward, where it has one
)


def put_before_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """From now on calls of this module run ``call`` with their arguments, as they run compiled code after ``module.compile``."""
    setattr(module, _CALL, call)


def before_call(module: nn.Module) -> object:
    """The function before calls of this module: compiled code, or that of `put_before_call`; None where there is none."""
    return getattr(module, _CALL)


def take_from_call(module: nn.Module) -> None:
    """Calls of this module run its forward again."""
    setattr(module, _CALL, None)


def call_as_is(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the module with its hooks, past what stands before its calls."""
    return module._call_impl(*args, **kwargs)


def is_wrapper_of_dynamo(module: nn.Module) -> bool:
    """Whether the module is what ``torch.compile`` made of another one."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


@contextmanager
def converted_by_replacing() -> Iterator[None]:
    """Meanwhile conversions of modules, such as ``module.to(dtype)``, replace parameters. Tied ones stay tied.

    PyTorch swaps the contents of two fake tensors, which it refuses where anything has a weak reference to one of them.
    """
    replaced: dict[Tensor, nn.Parameter] = {}

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param not in replaced:
                with torch.no_grad():
                    replaced[param] = nn.Parameter(fn(param), requires_grad=param.requires_grad)
            setattr(module, name, replaced[param])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, fn(buffer))
        return module

    with mock.patch.object(nn.Module, "_apply", apply):
        yield
