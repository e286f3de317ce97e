"""The stand-in that eager code gets where it asks a module for a parameter of which this rank holds a shard.

To gather it there would hang wherever one rank asks and another does not, and the shard itself would be a silently local value. The
caller therefore gets a tensor without memory that knows the whole's size, dtype and device, and refuses everything else. It is
the same tensor for each who asks for the same shard, so that tied parameters can be told.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.errors import ShardError
from autohete_fx.internals.modes import DisableTorchFunction
from autohete_fx.runtime.pending.fence import tensors_in
from autohete_fx.runtime.shard.parts import Part

_METHODS = "size dim numel nelement stride is_contiguous is_floating_point is_complex element_size"
_PROPERTIES = "shape ndim dtype layout itemsize nbytes requires_grad is_sparse is_quantized is_leaf"
_ANSWERED = frozenset(
    [getattr(Tensor, name) for name in _METHODS.split()]
    + [getattr(Tensor, name).__get__ for name in _PROPERTIES.split()]
)
"""Questions that a shard's stand-in answers, as PyTorch hands it to ``__torch_function__``."""
_GRAD, _REQUIRES_GRAD = cast(Any, Tensor).grad, cast(Any, Tensor).requires_grad
_OF_TRAINING = frozenset([_GRAD.__get__, _GRAD.__set__, _REQUIRES_GRAD.__set__, Tensor.requires_grad_])
"""What training asks of a parameter, in place of compiled code."""


class Unreadable(nn.Parameter):
    """A parameter whose values other ranks hold too."""

    _autohete_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The shard's device."""
        return self._autohete_device

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a parameter of which each rank holds a shard has no {name!r}. Expected was a whole one, or a DTensor, as by code that"
            " divides parameters itself, such as fully_shard. Divide a model by one of the two"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Unreadable(size={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _ANSWERED:
            with DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        given = tensors_in((*args, *(kwargs or {}).values()))
        size = next((tuple(t.shape) for t in given if isinstance(t, Unreadable)), ())
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):  # of an attribute
            name = getattr(getattr(func, "__self__", func), "__name__", name)
        expected = (
            "Expected were reads in compiled code, or within autohete_fx.gathered(model). Compile the model, or put 'with"
            " autohete_fx.gathered(model):' around this code on all ranks"
        )
        if func in _OF_TRAINING:
            expected = (
                "Expected was the parameter itself, to train or to freeze it. Take it from model.named_parameters(), not from an"
                " attribute of its module"
            )
        raise ShardError(
            f"eager code called {name} with a parameter of size {size}, of which each rank holds a shard. {expected}"
        )


_made = WeakIdKeyDictionary()


def unreadable(param: Tensor, part: Part) -> Tensor:
    """The stand-in for a shard in eager code, also in code that Dynamo runs eagerly within compiled functions."""
    untraced: Callable[[Tensor, Part], Tensor] = cast(Any, torch.compiler.disable)(_unreadable)
    return untraced(param, part)


def _known_of(param: Tensor) -> tuple[bool, torch.dtype, torch.device]:
    """What changes of a parameter that stays the object that it was."""
    return param.requires_grad, param.dtype, param.device


def _unreadable(param: Tensor, part: Part) -> Tensor:
    found = _made.get(param)
    if found is None or _known_of(found) != _known_of(param):
        with torch.no_grad():
            found = torch.empty(part.full_size, dtype=param.dtype, device="meta").as_subclass(Unreadable)
        with DisableTorchFunction():
            found.requires_grad_(param.requires_grad)
        found._autohete_device = param.device
        _made[param] = found
    return found
