"""The layers of any model, and which of them read each parameter: found by one forward pass of fake tensors.

Enter a function that builds the model and an example of a batch; leaves a `LayerMap`, by which `stage` cuts the model. Layers
are numbered as plans number them. 0 is all that runs before the first layer, 1 to L are the layers, L + 1 is all that runs
after the last.

A cut between two layers is sound where one tensor alone crosses it: the one that a layer hands to the next. Every operator is
watched for the origin of its inputs. Parameters, and tensors that are made from parameters and inputs alone, may be read in
several layers. The stages of all of them hold those parameters, and their gradients are summed. Any other tensor that skips a
layer is an error.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autohete_fx.cluster.batches import Batch, call
from autohete_fx.cluster.building import BuildModel, build_noting_order
from autohete_fx.cluster.chain import find_chain, note_call
from autohete_fx.errors import ClusterError
from autohete_fx.internals.modes import FakeTensorMode, TorchDispatchMode
from autohete_fx.internals.operators import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tensor's shape and dtype; the first dimension is that of the traced micro-batch where it is as long."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


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
class LayerMap:
    """Where a model can be cut.

    Attributes:
        layers: names of the modules of layers 1 to L.
        readers: by name of a parameter, the layers that read it, maybe none; tied parameters go by their first name.
        shapes: of parameters by name.
        tied: other names of parameters, to the first.
        returned: by name of a module, what it returns; of layers, and of modules with parameters outside of them.
        hidden: what a layer hands to the next one.
        entrance: argument of layer 1 that is its hidden state: a place, or a keyword.
        order: parameters in the order in which ``build_model`` registers them.
        frozen: parameters that are not trained.
    """

    layers: tuple[str, ...]
    readers: Mapping[str, frozenset[int]]
    shapes: Mapping[str, Shape]
    tied: Mapping[str, str]
    returned: Mapping[str, Returned]
    hidden: Shape
    entrance: int | str
    order: tuple[str, ...]
    frozen: frozenset[str] = frozenset()

    @property
    def num_layers(self) -> int:
        """Layers as plans count them, with what is before and after."""
        return len(self.layers) + 2

    def held(self, layers: range) -> list[str]:
        """Parameters that a stage of these layers has. Parameters that nobody reads stand with layer 0."""
        return [name for name, readers in self.readers.items() if any(layer in (readers or {0}) for layer in layers)]


def map_layers(build_model: BuildModel, batch: Batch) -> LayerMap:
    """Find the layers.

    Args:
        build_model: makes the module.
        batch: one micro-batch; tensors of any device, whose values are not read.

    Raises:
        ClusterError: the model has no chain of layers, or a tensor other than the hidden state skips a layer. Also where the
            forward pass depends on values of tensors, or a layer normalises over samples.
    """
    built, order = build_noting_order(build_model)
    model = without_cache(built.train())
    _refuse_batch_norms(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _fake_weights(model)
        fake = batch.mapped(mode.from_tensor)
        try:
            chain = find_chain(model, fake)
            watch = _Watch(model, chain)
            with watch.hooks(), watch:
                call(model, fake)
        except ClusterError:
            raise
        except Exception as error:
            raise ClusterError(
                f"a forward pass of {type(model).__name__} without values failed: {_first_line(error)}. Expected was a model whose"
                " operators do not depend on values of tensors. Take such branches out of forward, or correct the example batch"
            ) from error
        return watch.layer_map(order)


def without_cache(model: nn.Module) -> nn.Module:
    """The model, with caches of keys and values off where its configuration has them: nothing generates while a model trains."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return model


def _refuse_batch_norms(model: nn.Module) -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for name, module in model.named_modules():
        if module.training and (isinstance(module, kinds) or isinstance(getattr(module, "running_mean", None), Tensor)):
            raise ClusterError(
                f"{name!r} of {type(model).__name__} is a {type(module).__name__}, whose statistics depend on which samples share"
                " a micro-batch, and so on the plan. Expected were layers that treat each sample alone. Use LayerNorm or GroupNorm"
            )


def _fake_weights(model: nn.Module) -> None:
    """Fake parameters in place of those on the meta device. Called in a fake mode."""
    fake: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                empty = torch.empty_like(param, device="cpu")
                module._parameters[name] = fake.setdefault(id(param), nn.Parameter(empty, param.requires_grad))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# -- what every operator reads ---------------------------------------------------------------------------------------


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


class _Watch(TorchDispatchMode):
    """Follows tensors from operator to operator through a forward pass."""

    def __init__(self, model: nn.Module, chain: tuple[str, ...]) -> None:
        super().__init__()
        self._model, self._chain = model, chain
        self._layer = 0
        self._inside: list[str] = []
        self._origins: dict[int, _Origin] = {}
        self._alive: list[Tensor] = []
        self._tied: dict[str, str] = {}
        names: dict[int, str] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            first = names.setdefault(id(param), name)
            if first != name:
                self._tied[name] = first
            self._origins[_memory(param)] = _Origin(params=frozenset([first]))
        self._params = frozenset(self._origins)
        self._readers: dict[str, set[int]] = {name: set() for name in names.values()}
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
            f" between ({func}). Expected was that a layer reads the hidden state of the one before it alone. Pipelines cannot cut"
            " this model; train it with autohete_fx.shard instead"
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
        if self._hidden is not None and _shape(hidden) != self._hidden:
            raise ClusterError(
                f"the layer {name!r} of {type(self._model).__name__} returns a hidden state of {_shape(hidden)}, and the"
                f" layer before it of {self._hidden}. Expected were equal shapes. A pipeline cannot cut these layers; train with"
                " autohete_fx.shard instead"
            )
        self._returned[name] = Returned(spec=spec, leaves=tuple(map(_without_values, leaves)), hidden=place)
        self._hand_over(hidden, index)

    def _hand_over(self, hidden: Tensor, layer: int) -> None:
        self._hidden = _shape(hidden)
        self._note(hidden, _Origin(layers=frozenset([layer]), made_in=layer))
        self._layer = layer + 1

    def _record(self, name: str, out: Any) -> None:
        self._inside.pop()
        leaves, spec = tree_flatten(out)
        found = Returned(spec=spec, leaves=tuple(map(_without_values, leaves)))
        if self._returned.setdefault(name, found) != found:
            self._varying.add(name)

    def layer_map(self, order: list[str]) -> LayerMap:
        """All that was found."""
        assert self._entrance is not None and self._hidden is not None, "the model called its layers"
        params = dict(self._model.named_parameters())
        return LayerMap(
            layers=self._chain,
            readers={name: frozenset(readers) for name, readers in self._readers.items()},
            shapes={name: _shape(params[name]) for name in self._readers},
            tied=self._tied,
            returned={name: found for name, found in self._returned.items() if name not in self._varying},
            hidden=self._hidden,
            entrance=self._entrance,
            order=tuple(order),
            frozen=frozenset(name for name in self._readers if not params[name].requires_grad),
        )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_hidden(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


def _shape(tensor: Tensor) -> Shape:
    return Shape(sizes=tuple(tensor.shape), dtype=tensor.dtype)


def _without_values(leaf: object) -> object:
    return _shape(leaf) if isinstance(leaf, Tensor) else leaf
