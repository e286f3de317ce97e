"""Calls of modules: what stands in their place, and whether Dynamo compiled them; and what changes all their tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

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


@contextmanager
def before_apply(look: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside, ``look`` sees each module whose tensors are about to be changed, as by ``Module.to``."""
    apply = nn.Module._apply

    def applied(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        look(self)
        return apply(self, fn, recurse)

    nn.Module._apply = applied
    try:
        yield
    finally:
        nn.Module._apply = apply


def is_wrapper_of_dynamo(module: nn.Module) -> bool:
    """Whether the module is what ``torch.compile`` made of another one."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def not_compiled(module: nn.Module) -> nn.Module:
    """The module of which ``torch.compile`` may have made this one."""
    wrapper: Any = module
    return wrapper._orig_mod if is_wrapper_of_dynamo(module) else module
