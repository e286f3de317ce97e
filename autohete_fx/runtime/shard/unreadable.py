"""What eager code gets where it asks a module for a parameter of which this rank holds a shard.

To gather it there would hang wherever one rank asks and another does not, and the shard itself would be a silently local value. So
the caller gets a tensor without memory that knows the whole's size, dtype and device, and refuses everything else. It is the same
tensor for each who asks for the same shard, so that tied parameters can be told.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.errors import ShardError
from autohete_fx.internals.modes import DisableTorchFunction
from autohete_fx.runtime.shard.parts import Part

_ANSWERED = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.nelement,
        Tensor.stride,
        Tensor.is_contiguous,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.element_size,
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.layout.__get__,  # type: ignore[attr-defined]
        Tensor.itemsize.__get__,  # type: ignore[attr-defined]
        Tensor.nbytes.__get__,  # type: ignore[attr-defined]
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
        Tensor.is_quantized.__get__,  # type: ignore[attr-defined]
        Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    }
)


class Unreadable(nn.Parameter):
    """A parameter whose values other ranks hold too."""

    _autohete_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Of the shard."""
        return self._autohete_device

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
        size = next((tuple(a.shape) for a in args if isinstance(a, Unreadable)), ())
        name = getattr(func, "__name__", str(func))
        raise ShardError(
            f"eager code called {name} with a parameter of size {size}, of which each rank holds a shard. Expected were reads in"
            " compiled code, or within autohete_fx.gathered(model). Compile the model, or put 'with autohete_fx.gathered(model):'"
            " around this code on all ranks"
        )


_made = WeakIdKeyDictionary()


def unreadable(param: Tensor, part: Part) -> Tensor:
    """What stands for a shard in eager code, also in what Dynamo runs eagerly within compiled functions."""
    outside: Callable[[Tensor, Part], Tensor] = torch.compiler.disable(_unreadable)  # type: ignore[assignment]
    return outside(param, part)


def _unreadable(param: Tensor, part: Part) -> Tensor:
    found = _made.get(param)
    if found is None or found.requires_grad != param.requires_grad:
        with torch.no_grad():
            found = torch.empty(part.size, dtype=param.dtype, device="meta").as_subclass(Unreadable)
        with DisableTorchFunction():
            found.requires_grad_(param.requires_grad)
        found._autohete_device = param.device
        _made[param] = found
    return found
