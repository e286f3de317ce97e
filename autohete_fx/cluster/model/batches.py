"""Batches of samples: a tensor, a tuple of tensors, or a mapping of names to tensors, samples first. And shapes of tensors."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autohete_fx.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tensor's shape and dtype; the first dimension is that of the traced micro-batch where it is as long.

    Attributes:
        requires_grad: whether a gradient goes back for it, of a tensor that one layer hands to a later one.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor without values."""
        return torch.empty(self.sizes, dtype=self.dtype, device=device, requires_grad=self.requires_grad)


def shape_of(tensor: Tensor, requires_grad: bool = False) -> Shape:
    """The shape of a tensor."""
    return Shape(sizes=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The arguments of a model's forward.

    Attributes:
        tensors: by name of the argument, or by its place written out.
        given: how the user gave them: ``tensor``, ``tuple`` or ``mapping``.
    """

    tensors: Mapping[str, Tensor]
    given: str

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with a function of each tensor."""
        return Batch(tensors={name: function(tensor) for name, tensor in self.tensors.items()}, given=self.given)

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(next(iter(self.tensors.values())))

    def of_samples(self, count: int) -> "Batch":
        """A batch of ``count`` samples that are all like the first."""
        return self.mapped(lambda tensor: tensor[:1].expand(count, *tensor.shape[1:]))

    def original(self) -> Any:
        """The batch as the user gives it."""
        if self.given == "tensor":
            return next(iter(self.tensors.values()))
        return tuple(self.tensors.values()) if self.given == "tuple" else dict(self.tensors)


def joined(batches: Sequence[Batch]) -> Batch:
    """The samples of all batches, one after the other."""
    if len(batches) == 1:
        return batches[0]
    rows = {name: [batch.tensors[name] for batch in batches] for name in batches[0].tensors}
    return Batch(tensors={name: torch.cat(tensors) for name, tensors in rows.items()}, given=batches[0].given)


def batch_of(given: object) -> Batch:
    """Read a user's batch. Raises ClusterError for anything but tensors of one number of samples."""
    if isinstance(given, Tensor):
        named, form = {"0": given}, "tensor"
    elif isinstance(given, Mapping):
        named, form = dict(given), "mapping"
    elif isinstance(given, Sequence) and not isinstance(given, str):
        named, form = {str(place): value for place, value in enumerate(given)}, "tuple"
    else:
        named, form = {}, ""
    if not named or not all(isinstance(value, Tensor) and value.dim() for value in named.values()):
        kinds = ", ".join(sorted({type(value).__name__ for value in named.values()})) or type(given).__name__
        raise ClusterError(
            f"a batch of {kinds} was given. Expected was a tensor, or a tuple or mapping of tensors, with samples as their first"
            " dimension. Give tensors; capture other arguments in the model"
        )
    counts = {name: len(value) for name, value in named.items()}
    if len(set(counts.values())) > 1:
        raise ClusterError(
            f"a batch was given whose tensors have {counts} samples. Expected was one number. Give the samples first in each tensor"
        )
    return Batch(tensors=named, given=form)


def call(model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch: of a tuple as many tensors as its forward has arguments, of a mapping those that it names.
    A forward with ``**kwargs`` gets all of a mapping.

    Raises ClusterError where forward names none of a mapping's tensors.
    """
    params = inspect.signature(model.forward).parameters
    if batch.given != "mapping":
        some = any(param.kind is param.VAR_POSITIONAL for param in params.values())
        return model(*list(batch.tensors.values())[: None if some else len(params)])
    takes_all = any(param.kind is param.VAR_KEYWORD for param in params.values())
    named = {name: tensor for name, tensor in batch.tensors.items() if takes_all or name in params}
    if not named:
        raise ClusterError(
            f"a batch with {', '.join(batch.tensors)} was given, and {type(model).__name__}.forward reads {', '.join(params)}."
            " Expected was a batch with some of its arguments. Rename them in load"
        )
    return model(**named)
