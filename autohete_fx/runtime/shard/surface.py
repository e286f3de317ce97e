"""``shard(model, mesh)``: each rank keeps some rows of every large parameter, and traced code gathers the whole where it is read.

In: a model that each rank holds whole. Out: the same model. A parameter of 64 KiB or more becomes this rank's rows of it,
padded to equally many on all ranks. It stays the object that it was, so ties, frozen parameters and an optimizer made before
stay right. The modules that hold parameters get classes of their own, whose properties give traced code the gathered whole::

    whole = torch.ops.autohete.gather(self._parameters["weight"], 2, "2-9f1c03d2")

The class keeps the name and module of its base: layers stay one family to whoever groups them. On one rank nothing is gathered.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter

from autohete_fx.errors import ShardError
from autohete_fx.graph.ops import SMALLEST_COPY_BYTES
from autohete_fx.internals import versions
from autohete_fx.runtime.placement import placement_of
from autohete_fx.runtime.shard import state, step
from autohete_fx.runtime.shard.parts import Part, note_part, part_of, shard_of
from autohete_fx.runtime.shard.ranks import Ranks, ranks_of
from autohete_fx.runtime.shard.unreadable import unreadable

ModuleT = TypeVar("ModuleT", bound=nn.Module)

WHOLE = "_autohete_whole"
"""The attribute of a module that says whether its parameters are whole now; False in its class."""


def shard(model: ModuleT, mesh: DeviceMesh) -> ModuleT:
    """Let the ranks of a mesh hold a model together. All of them call it, with models that are built alike.

    Each parameter of at least 64 KiB becomes a shard: this rank's rows, an ordinary ``nn.Parameter``. Smaller ones stay whole on
    each rank, and their gradients are averaged before ``optimizer.step()``. All start with the values, buffers included, of the
    first rank. Compiled code computes with whole parameters and leaves the mean of the ranks' gradients; eager code reads whole
    parameters within `gathered`. ``state_dict()`` has DTensors.

    Args:
        model: changed in place, not yet compiled or placed.
        mesh: of one dimension, over which parameters are sharded, or of two. The first of two has replicas: ranks that hold the
            same shards, whose gradients ``optimizer.step()`` averages.

    Returns:
        The model.

    Raises:
        ShardError: the mesh has three or more dimensions, ranks have other parameters, or a parameter cannot be sharded.
    """
    ranks = ranks_of(mesh)
    named = dict(model.named_parameters())
    _check(model, named, ranks)
    for tensor in (*named.values(), *model.buffers()):
        with torch.no_grad():
            ranks.broadcast(tensor.data)
    for param in named.values():
        large = param.dim() > 0 and param.nbytes >= SMALLEST_COPY_BYTES
        part = Part(size=tuple(param.shape), group=ranks.digest, is_shard=large and ranks.count > 1)
        if part.is_shard:
            with torch.no_grad():
                param.data = part.padded(part.own(param.data))
        note_part(param, part)
    for module in model.modules():
        if module._parameters:
            module.__class__ = _held_class(type(module), _fields(module))
            state.hook(module)
    step.watch()
    return model


def _check(model: nn.Module, named: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    for name, param in named.items():
        _check_parameter(name, param)
    described = [
        (name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in (*named.items(), *model.named_buffers())
    ]
    everywhere = ranks.exchange(described)
    other = next((rank for rank, theirs in enumerate(everywhere) if theirs != described), None)
    if other is not None:
        difference = next((a, b) for a, b in _pairs(described, everywhere[other]) if a != b)
        raise ShardError(
            f"the models of ranks {ranks.number} and {other} differ: {difference[0]} and {difference[1]}. Expected were the same"
            " parameters and buffers in the same order. Build the model alike on all ranks"
        )
    if ranks.count > 1:
        for path, module in model.named_modules():
            _check_references(path, module)


def _pairs(mine: list[Any], theirs: list[Any]) -> Iterator[tuple[Any, Any]]:
    for at in range(max(len(mine), len(theirs))):
        yield mine[at] if at < len(mine) else "nothing", theirs[at] if at < len(theirs) else "nothing"


def _check_parameter(name: str, param: nn.Parameter) -> None:
    what = None
    if versions.is_dtensor(param):
        what = "is a DTensor, which ranks hold together already"
    elif part_of(param) is not None:
        what = "was sharded before"
    elif isinstance(param, UninitializedParameter) or param.is_meta:
        what = "has no values yet"
    elif placement_of(param) is not None:
        what = "was placed before"
    elif param.grad is not None:
        what = "has a gradient"
    elif not param.is_contiguous():
        what = f"has strides {param.stride()}"
    if what is not None:
        raise ShardError(
            f"the parameter {name} {what}. Expected was an ordinary parameter with values, whole on this rank. Call"
            " autohete_fx.shard once, on the materialised model, before autohete_fx.place and before training"
        )


def _check_references(path: str, module: nn.Module) -> None:
    """A module that keeps its parameters elsewhere too, as ``nn.LSTM`` does, would read local shards there."""
    own = {id(p) for p in module._parameters.values() if p is not None and p.nbytes >= SMALLEST_COPY_BYTES}
    for name, value in vars(module).items():
        kept = value if isinstance(value, list | tuple) else [value]
        if name not in ("_parameters", "_buffers", "_modules") and any(id(each) in own for each in kept):
            raise ShardError(
                f"the module {path or 'itself'} ({type(module).__name__}) keeps parameters in its attribute {name}, where reads"
                " cannot gather them. Expected were parameters that are read by their names. Write the layer with plain"
                " parameters, or leave it out of the model that is sharded"
            )


_Field = tuple[str, tuple[int, ...], tuple[int, ...], int, str]
"""Name, size of the whole, of the shard, number of ranks and their digest: plain values, which traced code reads from a closure."""


def _fields(module: nn.Module) -> tuple[_Field, ...]:
    held = [
        (name, part) for name, p in module._parameters.items() if p is not None and (part := shard_of(p)) is not None
    ]
    return tuple((name, part.size, part.shape, part.ranks.count, part.group) for name, part in held)


@functools.cache
def _held_class(base: type, fields: tuple[_Field, ...]) -> type:
    """A class like ``base`` whose instances hold shards."""

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        inherited = getattr(super(made, self), "__deepcopy__", None)
        if inherited is not None:
            copied = inherited(memo)
        else:
            copied = memo[id(self)] = made.__new__(made)
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        for mine, theirs in zip(self._parameters.values(), copied._parameters.values(), strict=True):
            if mine is not None and part_of(theirs) is None:
                part = part_of(mine)
                if part is not None:
                    note_part(theirs, part)
        return copied

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        raise ShardError(
            f"a sharded {base.__name__} was to be pickled or copied shallowly. Expected was its state. Save model.state_dict() with"
            " torch.distributed.checkpoint, or copy the module with copy.deepcopy"
        )

    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    members |= {"__deepcopy__": __deepcopy__, "__reduce_ex__": __reduce_ex__, WHOLE: False}
    members |= {field[0]: _reader(*field) for field in fields}
    metaclass: Any = type(base)
    made = metaclass(base.__name__, (base,), members)
    return made


def _reader(name: str, size: tuple[int, ...], shape: tuple[int, ...], num_ranks: int, group: str) -> property:
    """The property of a sharded parameter."""
    num_rows, is_padded = size[0], num_ranks * shape[0] != size[0]

    def get(self: Any) -> Tensor:
        param = self._parameters[name]
        if self._autohete_whole:
            return param
        if tuple(param.shape) != shape:
            raise ShardError(
                f"the parameter {name} of {type(self).__name__} has size {tuple(param.shape)}; expected was the shard of size"
                f" {shape} that autohete_fx.shard has put there. Replace parameters within"
                " autohete_fx.gathered(model), or before shard"
            )
        if not torch.compiler.is_compiling():
            return unreadable(param, Part(size=size, group=group, is_shard=True))
        whole = torch.ops.autohete.gather(param, num_ranks, group)
        return whole[:num_rows] if is_padded else whole

    return property(get)
