"""``shard(model, mesh)``: each rank keeps some rows of every large parameter, and traced code gathers the whole where it is read.

In: a model that each rank holds whole. Out: the same model. A parameter of 64 KiB or more becomes this rank's rows of it,
padded to equally many on all ranks. It stays the object that it was, so ties, frozen parameters and an optimizer made before
stay right. The modules that hold parameters get classes of their own, whose properties give traced code the gathered whole::

    whole = torch.ops.autohete.gather(self._parameters["weight"], 2, "2-9f1c03d2")

The class keeps the name and module of its base: layers stay one family to whoever groups them. On one rank nothing is gathered.

In a model under tensor parallelism, each rank's local tensor is what it holds with its peers, and is sharded likewise. An ordinary
parameter takes the place of the DTensor, and what is read is a DTensor again::

    local = torch.ops.autohete.gather(self._parameters["weight"], 2, "tp2x2-9f1c03d2")
    whole = DTensor.from_local(local, tensor_parallel_mesh, placements, ...)
"""

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from autohete_fx.errors import ShardError
from autohete_fx.graph.ops import SMALLEST_COPY_BYTES
from autohete_fx.internals.tensors import local_of
from autohete_fx.runtime.held import is_held
from autohete_fx.runtime.placement import placement_of
from autohete_fx.runtime.shard import state, step, wrappers
from autohete_fx.runtime.shard.layout import Layout
from autohete_fx.runtime.shard.parts import Part, dtensor_part_of, note_part, part_of
from autohete_fx.runtime.shard.ranks import Ranks, parallel_ranks_of, ranks_of
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

    A model may be under tensor parallelism, which ``parallelize_module`` makes with one dimension of a mesh; another dimension is
    given here. Ordinary parameters take the place of its DTensors: make the optimizer afterwards.

    Args:
        model: changed in place, not yet compiled or placed.
        mesh: of one dimension, over which parameters are sharded, or of two. The first of two has replicas: ranks that hold the
            same shards, whose gradients ``optimizer.step()`` averages.

    Returns:
        The model.

    Raises:
        ShardError: the mesh has three or more dimensions, ranks have other parameters, a parameter cannot be sharded, or
            DistributedDataParallel or ``fully_shard`` has the model.
    """
    if (words := wrappers.refusal(model)) is not None:
        raise ShardError(words)
    named = dict(model.named_parameters())
    ranks = _ranks_of(mesh, named)
    _check(model, named, ranks)
    for tensor in (*named.values(), *model.buffers()):
        is_of_all = not (isinstance(tensor, DTensor) and Layout.of(tensor).groups)
        with torch.no_grad():
            ranks.broadcast((local_of(tensor) if isinstance(tensor, DTensor) else tensor).data, is_of_all=is_of_all)
    _hold_locals(model)
    parts: list[tuple[nn.Parameter, Part]] = []
    for name, param in model.named_parameters():
        layout = Layout.of(given) if isinstance(given := named[name], DTensor) else None
        is_shard = ranks.count > 1 and param.dim() > 0 and _bytes_of_rank(given) >= SMALLEST_COPY_BYTES
        part = Part(
            size=tuple(param.shape), group=ranks.digest, is_shard=is_shard, layout=layout, number=next(ranks.numbers)
        )
        if part.is_shard:
            with torch.no_grad():
                param.data = part.padded(part.own(param.data))
        parts.append((param, part))
    read_wholes(model, parts)
    return model


def read_wholes(model: nn.Module, parts: Iterable[tuple[nn.Parameter, Part]]) -> None:
    """Let modules read wholes of parameters that are this rank's parts already.

    Args:
        model: whose modules have them; its other parameters stay as they are.
        parts: with what each is.
    """
    for param, part in parts:
        note_part(param, part)
    for module in model.modules():
        if module._parameters:
            module.__class__ = _held_class(type(module), _fields(module))
            state.hook(module)
    step.watch()


def _ranks_of(mesh: DeviceMesh, named: Mapping[str, nn.Parameter]) -> Ranks:
    layouts = {name: Layout.of(param) for name, param in named.items() if isinstance(param, DTensor)}
    for name, layout in layouts.items():
        if layout.mesh.ndim > 1 or layout.placements[0].is_partial():
            raise ShardError(
                f"the parameter {name} lies as {layout.placements} over {layout.mesh}; expected parts or copies of it over one"
                " dimension of a mesh. Call parallelize_module with mesh['tp'], and autohete_fx.shard with another dimension"
            )
    meshes = {layout.mesh for layout in layouts.values()}
    if len(meshes) > 1:
        raise ShardError(
            f"the model is under tensor parallelism over {len(meshes)} meshes; expected one. Give parallelize_module one mesh for"
            " all modules"
        )
    return parallel_ranks_of(mesh, meshes.pop()) if meshes else ranks_of(mesh)


def _bytes_of_rank(param: Tensor) -> int:
    """Bytes of what ranks hold together, the same on all that have other parts of a DTensor."""
    divided = isinstance(param, DTensor) and Layout.of(param).groups
    return param.nbytes // (param.device_mesh.size() if isinstance(param, DTensor) and divided else 1)


def _hold_locals(model: nn.Module) -> None:
    """Put a parameter in the place of each DTensor, over the memory of the local tensor."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if isinstance(param, DTensor):
                if id(param) not in made:
                    made[id(param)] = nn.Parameter(local_of(param).detach(), requires_grad=param.requires_grad)
                module._parameters[name] = made[id(param)]


def _check(model: nn.Module, named: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    refused = _refusal(model, named, is_divided=ranks.count > 1 or ranks.tensor_parallel is not None)
    tensors = (*named.items(), *model.named_buffers()) if refused is None else ()
    described = [(name, tuple(t.shape), str(t.dtype), t.device.type, t.requires_grad) for name, t in tensors]
    everywhere, refusals = zip(*ranks.exchange((described, refused)), strict=True)
    if refused is not None:
        raise ShardError(refused)
    numbers = dist.get_process_group_ranks(ranks.control)
    for rank, theirs in zip(numbers, refusals, strict=True):
        if theirs is not None:
            raise ShardError(f"rank {rank} cannot shard its model: {theirs}")
    other = next((at for at, theirs in enumerate(everywhere) if theirs != described), None)
    if other is not None:
        mine, theirs = next((a, b) for a, b in _pairs(described, everywhere[other]) if a != b)
        raise ShardError(
            f"the models of ranks {numbers[ranks.number]} and {numbers[other]} differ: {mine} and {theirs}. Expected were the same"
            " parameters and buffers in the same order, on devices of one kind. Build the model alike on all ranks"
        )
    for name, tensor in tensors:  # each rank raises what the others raise
        ranks.check_device(tensor.device.type, f"{name} of the model")


def _pairs(mine: list[Any], theirs: list[Any]) -> Iterator[tuple[Any, Any]]:
    for at in range(max(len(mine), len(theirs))):
        yield mine[at] if at < len(mine) else "nothing", theirs[at] if at < len(theirs) else "nothing"


def _refusal(model: nn.Module, named: Mapping[str, nn.Parameter], *, is_divided: bool) -> str | None:
    """Why this rank's model cannot be sharded, and what to do; None where it can. ``is_divided``: others have parts of it."""
    for name, param in named.items():
        if (words := _refused(name, param)) is not None:
            return words
    for name, buffer in model.named_buffers():
        if isinstance(buffer, UninitializedBuffer):
            return f"the buffer {name} has no values yet. Expected was a model that has run once. Run it, or give its sizes"
    return _kept_elsewhere(model) if is_divided else None


def _refused(name: str, param: nn.Parameter) -> str | None:
    """Why a parameter cannot be sharded, and what to do; None where it can."""
    what = None
    if is_held(param):
        what = "is a DTensor that an optimizer or compiled code knows"
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
    if what is None:
        return None
    return (
        f"the parameter {name} {what}. Expected was an ordinary parameter with values, whole on this rank, or a DTensor."
        " Call autohete_fx.shard once, on the materialised model, before autohete_fx.place and before training, and where it"
        " has DTensors before the optimizer is made"
    )


def check_references(model: nn.Module) -> None:
    """Raise ShardError for a module that keeps its parameters elsewhere too, as ``nn.LSTM`` does: it would read shards there."""
    if (words := _kept_elsewhere(model)) is not None:
        raise ShardError(words)


def _kept_elsewhere(model: nn.Module) -> str | None:
    for path, module in model.named_modules():
        own = {id(p) for p in module._parameters.values() if p is not None and p.nbytes >= SMALLEST_COPY_BYTES}
        for name, value in vars(module).items():
            kept = value if isinstance(value, list | tuple) else [value]
            if name not in ("_parameters", "_buffers", "_modules") and any(id(each) in own for each in kept):
                return (
                    f"the module {path or 'itself'} ({type(module).__name__}) keeps parameters in its attribute {name}, where reads"
                    " cannot gather them. Expected were parameters that are read by their names. Write the layer with plain"
                    " parameters, or leave it out of the model that is sharded"
                )
    return None


_Field = tuple[str, Part, int, tuple[int, ...], int | None]
"""Name and part of a parameter, how many ranks have shards of it, the shape that it has here, and the identity of the mesh that a
DTensor of it lies over, which the part keeps alive: meshes are equal that have other process groups."""


def _fields(module: nn.Module) -> tuple[_Field, ...]:
    held = [
        (name, part)
        for name, p in module._parameters.items()
        if p is not None and (part := dtensor_part_of(p)) is not None
    ]
    return tuple(
        (name, part, part.ranks.count, part.shape, None if part.layout is None else id(part.layout.mesh))
        for name, part in held
    )


def _held_class(base: type, fields: tuple[_Field, ...]) -> type:
    """A class like ``base`` whose instances hold shards: one for all modules that hold them alike."""
    found = _held_classes.get((base, fields))
    if found is None:
        found = _held_classes[base, fields] = _made_class(base, fields)
    return found


_held_classes: "weakref.WeakValueDictionary[tuple[type, tuple[_Field, ...]], type]" = weakref.WeakValueDictionary()


def _made_class(base: type, fields: tuple[_Field, ...]) -> type:
    """A class like ``base`` whose properties read wholes."""

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
    members |= {name: _reader(name, part, num_ranks, shape) for name, part, num_ranks, shape, _ in fields}
    metaclass: Any = type(base)
    made = metaclass(base.__name__, (base,), members)
    return made


def _reader(name: str, part: Part, num_ranks: int, shape: tuple[int, ...]) -> property:
    """The property of a parameter that other ranks have parts of. Traced code reads plain values from its closure."""
    num_rows, group, is_shard = part.size[0] if part.size else 0, part.group, part.is_shard
    is_padded, layout = is_shard and num_ranks * shape[0] != num_rows, part.layout
    if layout is not None:
        mesh, placements, size, stride = layout.mesh, layout.placements, torch.Size(layout.size), layout.stride

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
        whole = param
        if is_shard:
            if not torch.compiler.is_compiling():
                return unreadable(param, part)
            whole = torch.ops.autohete.gather(param, num_ranks, group)
            whole = whole[:num_rows] if is_padded else whole
        if layout is None:
            return whole
        return DTensor.from_local(whole, mesh, placements, run_check=False, shape=size, stride=stride)

    return property(get)
