"""The hidden state that a chain of layers hands on, and which layers read each parameter: watched operator by operator.

Enter a model of fake tensors and the names of its layers; leaves a `Watch` with all that one forward pass shows. A cut between two
layers is sound where one tensor alone crosses it: the one that a layer hands to the next. Every operator is watched for the
origin of its inputs. Parameters, and tensors that are made from parameters and inputs alone, may be read in several layers. The
stages of all of them hold those parameters, and their gradients are summed. Any other tensor that skips a layer is an error.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autohete_fx.cluster.model.batches import Shape, shape_of
from autohete_fx.cluster.model.chain import note_call
from autohete_fx.errors import ClusterError
from autohete_fx.internals.modes import TorchDispatchMode
from autohete_fx.internals.operators import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """Values of a module's forward, without their tensors.

    Attributes:
        spec: how they nest.
        leaves: shapes of tensors, and other values as they are.
        hidden: place of the tensor that the next layer reads, among the leaves; None where there is none.
    """

    spec: TreeSpec
    leaves: tuple[object, ...]
    hidden: int | None = None

    def filled(self, device: torch.device, hidden: Tensor | None = None) -> Any:
        """Values of that nesting: zeros without memory, and ``hidden`` in its place."""
        leaves = [
            torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.sizes) if isinstance(leaf, Shape) else leaf
            for leaf in self.leaves
        ]
        if hidden is not None:
            assert self.hidden is not None, "a layer hands a tensor to the next one"
            leaves[self.hidden] = hidden
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtLayers:
    """How stages are cut between layers that are modules.

    Attributes:
        returned: by name of a module, what it returns; of layers, and of modules with parameters outside of them.
        entrance: argument of layer 1 that is its hidden state: a place, or a keyword.
    """

    returned: Mapping[str, Returned]
    entrance: int | str


@dataclass(frozen=True, slots=True)
class _Origin:
    """A tensor's history since the hidden states that it was made from.

    Attributes:
        params: that it was made from.
        layers: whose hidden states it was made from.
        made_in: layer; -1 for inputs, buffers and parameters.
        modules: with parameters, outside of layers, that made it or its sources.
    """

    params: frozenset[str] = frozenset()
    layers: frozenset[int] = frozenset()
    made_in: int = -1
    modules: frozenset[str] = frozenset()


_GIVEN = _Origin()


class Watch(TorchDispatchMode):
    """Follows tensors from operator to operator through a forward pass."""

    def __init__(self, model: nn.Module, chain: tuple[str, ...], tied: Mapping[str, str]) -> None:
        super().__init__()
        self._model, self._chain = model, chain
        self._layer = 0
        self._inside: list[str] = []
        self._origins: dict[int, _Origin] = {}
        self._alive: list[Tensor] = []
        self._tied = tied
        for name, param in model.named_parameters():
            self._origins[_memory(param)] = _Origin(params=frozenset([name]))
        self._params = frozenset(self._origins)
        self._readers: dict[str, set[int]] = {name: set() for name, _ in model.named_parameters()}
        self._returned: dict[str, Returned] = {}
        self._varying: set[str] = set()
        self._entrance: int | str | None = None
        self._hidden: Shape | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        origins = [self._origins.get(_memory(tensor), _GIVEN) for tensor in read]
        for tensor, origin in zip(read, origins, strict=True):
            self._check(func, tensor, origin)
        made = _Origin(
            params=frozenset[str]().union(*(origin.params for origin in origins)),
            layers=frozenset[int]().union(*(origin.layers for origin in origins)),
            made_in=self._layer,
            modules=frozenset(self._inside[:1]).union(*(origin.modules for origin in origins)),
        )
        for name in made.params:
            self._readers[name].add(self._layer)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (func._schema.is_mutable or _memory(leaf) not in self._origins):
                self._note(leaf, made)
        return result

    def _note(self, tensor: Tensor, origin: _Origin) -> None:
        """The origin of a tensor's memory, which its views share. It stays alive, because its address is its name."""
        if _memory(tensor) not in self._params:
            self._origins[_memory(tensor)] = origin
            self._alive.append(tensor)

    def _check(self, func: Any, tensor: Tensor, origin: _Origin) -> None:
        """Refuse a tensor that a stage without some earlier layer would not have."""
        if origin.made_in in (-1, self._layer):
            return
        if origin.made_in == 0 and not origin.layers:
            for module in origin.modules:  # a later stage makes it again
                for name, _ in self._model.get_submodule(module).named_parameters(module):
                    self._readers[self._tied.get(name, name)].add(self._layer)
        elif origin.layers != {self._layer - 1} or origin.made_in != self._layer - 1:
            self._refuse(func, tensor, origin.made_in)

    def _refuse(self, func: Any, tensor: Tensor, layer: int) -> None:
        to = f"layer {self._layer}" if self._layer <= len(self._chain) else "the end of the model"
        raise ClusterError(
            f"{type(self._model).__name__} hands a tensor of shape {tuple(tensor.shape)} from layer {layer} to {to} past the layers"
            f" between ({func}). Expected was that a layer reads the hidden state of the one before it alone. Say where to cut"
            " with split_spec= of cluster.join, or train with autohete_fx.shard"
        )

    # -- hooks ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Tell layers apart while the model runs."""
        handles = []
        for index, name in enumerate(self._chain, 1):
            module = self._model.get_submodule(name)
            if index == 1:
                handles.append(module.register_forward_pre_hook(self._enter_first, with_kwargs=True))
            handles.append(
                module.register_forward_hook(lambda _, __, out, index=index, name=name: self._leave(index, name, out))
            )
        for name in self._outside():
            module = self._model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(partial(note_call, self._inside, name)))
            handles.append(module.register_forward_hook(lambda _, __, out, name=name: self._record(name, out)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _outside(self) -> list[str]:
        """Modules with parameters that neither are part of a layer nor contain layers."""
        inner = tuple(f"{name}." for name in self._chain)
        return [
            name
            for name, module in self._model.named_modules()
            if name and name not in self._chain and not name.startswith(inner)
            if not any(layer.startswith(f"{name}.") for layer in self._chain)
            if any(True for _ in module.parameters())
        ]

    def _enter_first(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = next(((at, value) for at, value in (*enumerate(args), *kwargs.items()) if _is_hidden(value)), None)
        if found is None:
            raise ClusterError(
                f"the first layer {self._chain[0]!r} of {type(self._model).__name__} reads no tensor of floating point."
                f" Expected was"
                " a hidden state among its arguments. Give it as an argument of its own"
            )
        self._entrance, hidden = found
        self._hand_over(hidden, 0)

    def _leave(self, index: int, name: str, out: Any) -> None:
        leaves, spec = tree_flatten(out)
        place = next((at for at, leaf in enumerate(leaves) if _is_hidden(leaf)), None)
        if place is None:
            raise ClusterError(
                f"the layer {name!r} of {type(self._model).__name__} returns no tensor of floating point. Expected was the hidden"
                " state that the next layer reads. Return it first"
            )
        hidden = leaves[place]
        if self._hidden is not None and shape_of(hidden) != self._hidden:
            raise ClusterError(
                f"the layer {name!r} of {type(self._model).__name__} returns a hidden state of {shape_of(hidden)}, and the"
                f" layer before it of {self._hidden}. Expected were equal shapes. Say where to cut with split_spec= of"
                " cluster.join, or train with autohete_fx.shard"
            )
        self._returned[name] = Returned(spec=spec, leaves=tuple(map(_without_values, leaves)), hidden=place)
        self._hand_over(hidden, index)

    def _hand_over(self, hidden: Tensor, layer: int) -> None:
        self._hidden = shape_of(hidden)
        self._note(hidden, _Origin(layers=frozenset([layer]), made_in=layer))
        self._layer = layer + 1

    def _record(self, name: str, out: Any) -> None:
        self._inside.pop()
        leaves, spec = tree_flatten(out)
        found = Returned(spec=spec, leaves=tuple(map(_without_values, leaves)))
        if self._returned.setdefault(name, found) != found:
            self._varying.add(name)

    @property
    def readers(self) -> dict[str, frozenset[int]]:
        """By name of a parameter, the layers that read it, maybe none; tied parameters go by their first name."""
        return {name: frozenset(readers) for name, readers in self._readers.items()}

    @property
    def hidden(self) -> Shape:
        """The tensor that a layer hands to the next one."""
        assert self._hidden is not None, "the model called its layers"
        return replace(self._hidden, requires_grad=True)

    @property
    def way(self) -> AtLayers:
        """How to cut."""
        assert self._entrance is not None, "the model called its layers"
        returned = {name: found for name, found in self._returned.items() if name not in self._varying}
        return AtLayers(returned=returned, entrance=self._entrance)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_hidden(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def _without_values(leaf: object) -> object:
    return shape_of(leaf) if isinstance(leaf, Tensor) else leaf
