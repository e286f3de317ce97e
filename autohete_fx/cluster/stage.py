"""One stage of any model: its own layers with their weights, and stand-ins for the rest that have none.

The model's own forward runs on every stage. A layer of another stage is a `StandIn`, which returns zeros without memory. The
one just before this stage's first layer returns the hidden state that was received. The stage returns the hidden state after
its last layer, and the last stage returns the loss. Operators outside of layers, such as masks and rotary angles, run on every
stage, each from its own copy of the batch. All that does not lead to the result is dead code, which compilers take out.

Names of modules and parameters are those of the whole model.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autohete_fx.cluster.batches import Batch, call
from autohete_fx.cluster.building import BuildModel, build_part
from autohete_fx.cluster.layers import LayerMap, Returned, without_cache
from autohete_fx.cluster.pieces import Cut
from autohete_fx.cluster.tensor_parallel import Unit, divide, take_gradient
from autohete_fx.errors import ClusterError
from autohete_fx.internals.operators import tree_leaves

Loss = Callable[[Any, Any], Tensor]
"""A function of the output of the model and the batch: the mean over its samples."""
Weights = str | Path | Callable[[str], Tensor] | None
"""A safetensors file or folder, a function of a parameter's name, or None: as ``build_model`` initialises them. A function gives
the whole parameter, or this rank's part of it."""


class StandIn(nn.Module):
    """A module of another stage: no weights, and zeros for what it returns. Other attributes are the original's."""

    def __init__(self, original: nn.Module, returned: Returned, device: torch.device) -> None:
        super().__init__()
        own = {"forward", *vars(nn.Module())}
        for name, value in vars(original).items():
            if name not in own and not name.startswith("_"):
                setattr(self, name, value)
        self._returned, self._device = returned, device
        self.received: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros of the shapes that the original returns."""
        return self._returned.filled(self._device, self.received)


class StageModule(nn.Module):
    """Consecutive layers of a model.

    Attributes:
        model: the whole model's module tree; ``model.parameters()`` has some of other stages, without memory and frozen.
        held: names of this stage's parameters, tied ones once.
        parts: by name of a parameter, what this rank has of it. It is the parameter itself, but where a unit's GPUs share layers.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_map: LayerMap,
        layers: range,
        loss: Loss,
        share: float,
        device: torch.device,
        recomputed: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.held = model, layer_map.held(layers)
        self.parts: dict[str, nn.Parameter] = {}
        self._loss, self._share = loss, share
        self._first, self._last = layers.start == 0, layers.stop == layer_map.num_layers
        self._found: list[Tensor] = []
        self._inlet: StandIn | None = None
        self._received: list[Tensor] = []
        self._entrance = layer_map.entrance
        self._batch_form: tuple[str, tuple[str, ...]] = ("tensor", ("0",))
        _cut(model, layer_map, layers, set(self.held), device)
        _recompute(model, layer_map, layers[:recomputed])
        if layers.start > 1:
            inlet = model.get_submodule(layer_map.layers[layers.start - 2])
            assert isinstance(inlet, StandIn), "the layer before the first is another stage's"
            self._inlet = inlet
        elif layers.start == 1:
            model.get_submodule(layer_map.layers[0]).register_forward_pre_hook(self._enter, with_kwargs=True)
        if layers.stop == 1:
            model.get_submodule(layer_map.layers[0]).register_forward_pre_hook(self._leave_first, with_kwargs=True)
        elif not self._last:
            last = layer_map.layers[layers.stop - 2]
            hidden = layer_map.returned[last].hidden
            assert hidden is not None, "a layer returns its hidden state"
            model.get_submodule(last).register_forward_hook(
                lambda _, __, out: self._found.append(tree_leaves(out)[hidden])
            )

    def named(self) -> dict[str, nn.Parameter]:
        """This stage's parameters."""
        params = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: params[name] for name in self.held}

    def take_gradients(self) -> None:
        """Move the gradients of parameters to this rank's parts of them, those that are not there yet."""
        for name, param in self.named().items():
            take_gradient(param, self.parts[name])

    def reads(self, batch: Batch) -> None:
        """Batches will have the form of this one."""
        self._batch_form = batch.given, tuple(batch.tensors)

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        """The hidden state after the last layer, or the loss's share of the global batch's mean.

        Args:
            args: the hidden state of the stage before; none for the first stage.
            named: tensors of the batch, ``batch_`` before their names.
        """
        form, names = self._batch_form
        batch = Batch(tensors={name: named[f"batch_{name}"] for name in names}, given=form)
        if not self._first:
            if self._inlet is not None:
                self._inlet.received = args[0]
            else:
                self._received.append(args[0])
        out = call(self.model, batch)
        if self._inlet is not None:
            self._inlet.received = None
        if self._last:
            return self._share * self._loss(out, batch.original())
        return self._found.pop()

    def _enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = self._received.pop()
        if isinstance(self._entrance, int):
            return (*args[: self._entrance], hidden, *args[self._entrance + 1 :]), kwargs
        return args, {**kwargs, self._entrance: hidden}

    def _leave_first(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._found.append(args[self._entrance] if isinstance(self._entrance, int) else kwargs[self._entrance])


def _recompute(model: nn.Module, layer_map: LayerMap, layers: range) -> None:
    """Let layers keep their inputs alone, and make their activations again in backward. The ends of the model keep theirs."""
    for index in layers:
        if 0 < index <= len(layer_map.layers):
            layer = model.get_submodule(layer_map.layers[index - 1])
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _cut(model: nn.Module, layer_map: LayerMap, layers: range, held: set[str], device: torch.device) -> None:
    """Put stand-ins where another stage's modules are, and zeros without memory where modules of this stage have others'
    weights."""
    for index, name in enumerate(layer_map.layers, 1):
        if index not in layers:
            _replace(model, name, layer_map.returned[name], device)
    names = {
        id(param): layer_map.tied.get(name, name) for name, param in model.named_parameters(remove_duplicate=False)
    }
    around = {name.rpartition(".")[0] for name in layer_map.layers}
    around |= {parent for name in around for parent in _parents(name)}

    def visit(name: str, module: nn.Module) -> None:
        if name in layer_map.layers:
            return
        params = list(module.parameters())
        foreign = params and not any(names[id(param)] in held for param in params)
        if foreign and name in layer_map.returned and name not in around:
            _replace(model, name, layer_map.returned[name], device)
            return
        for own, param in list(module.named_parameters(recurse=False)):
            if names[id(param)] not in held:
                zeros = torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
                setattr(module, own, nn.Parameter(zeros, requires_grad=False))
        for child, inner in module.named_children():
            visit(f"{name}.{child}" if name else child, inner)

    visit("", model)


def _parents(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(len(parts)))


def _replace(model: nn.Module, name: str, returned: Returned, device: torch.device) -> None:
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    owner._modules[child] = StandIn(model.get_submodule(name), returned, device)


# -- weights ---------------------------------------------------------------------------------------------------------


def build_stage(
    build_model: BuildModel,
    layer_map: LayerMap,
    layers: range,
    *,
    loss: Loss,
    share: float,
    device: torch.device,
    weights: Weights = None,
    seed: int = 0,
    recomputed: int = 0,
    unit: Unit | None = None,
) -> StageModule:
    """A stage with its weights on its device.

    Args:
        build_model: makes the whole model.
        layer_map: of that model.
        layers: that the stage has.
        loss: of the model's output.
        share: of a micro-batch's mean in the mean of the global batch.
        device: where it will run.
        weights: where values come from; None: those that ``torch.manual_seed(seed); build_model()`` gives.
        seed: of these.
        recomputed: how many of the layers, from the first, make their activations again in backward.
        unit: of GPUs that share the layers; None: this one alone has them.

    Raises:
        ClusterError: a parameter has no value in ``weights``, or one of another shape; or the model is not the mapped one.
    """
    wanted = set(layer_map.held(layers)) if weights is None else set()
    model = without_cache(build_part(build_model, layer_map.order, wanted, seed).train())
    stage = StageModule(model, layer_map, layers, loss, share, device, recomputed)
    for module in stage.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    held = {id(param): name for name, param in stage.named().items()}
    for module in stage.modules():
        for key, param in module._parameters.items():
            if param is not None and id(param) in held:
                name = held[id(param)]
                if name not in stage.parts:
                    cut = _cut_of(name, layer_map, unit)
                    stage.parts[name] = nn.Parameter(_part(param.detach(), cut, device), param.requires_grad)
                module._parameters[key] = stage.parts[name]
    stage.parts = {name: stage.parts[name] for name in stage.held}
    if weights is not None:
        _load(stage, weights, layer_map, unit)
    if unit is not None:
        divide(stage.model, {id(param): name for name, param in stage.parts.items()}, stage.parts, unit)
    return stage


def _cut_of(name: str, layer_map: LayerMap, unit: Unit | None) -> Cut | None:
    return unit.layout.cut(name, layer_map.shapes[name].sizes, unit.degree, unit.part) if unit else None


def _part(whole: Tensor, cut: Cut | None, device: torch.device) -> Tensor:
    """A copy of the range on a device; without values where there are none."""
    part = whole if cut is None else cut.of(whole)
    return torch.empty(part.shape, dtype=part.dtype, device=device) if part.is_meta else part.to(device).contiguous()


def _load(stage: StageModule, weights: Weights, layer_map: LayerMap, unit: Unit | None) -> None:
    read = weights if callable(weights) else _of_safetensors(Path(str(weights)))
    for name, param in stage.parts.items():
        found, whole = read(name), layer_map.shapes[name].sizes
        if tuple(found.shape) == whole:
            cut = _cut_of(name, layer_map, unit)
            found = found if cut is None else cut.of(found)
        elif tuple(found.shape) != tuple(param.shape):
            raise ClusterError(
                f"the weights have {name!r} with shape {tuple(found.shape)}, and the model has {whole}. Expected were"
                " equal shapes. Give the weights of this model"
            )
        with torch.no_grad():
            param.copy_(found)


def _of_safetensors(path: Path) -> Callable[[str], Tensor]:
    """Reads single tensors of a file, or of a folder's files."""
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ClusterError(
            f"the weights {str(path)!r} were given, and safetensors is not installed. Expected was that package. pip install"
            " safetensors"
        ) from error
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    places: dict[str, Path] = {}
    for file in files:
        if file.is_file():
            with safe_open(file, framework="pt") as opened:
                places.update(dict.fromkeys(opened.keys(), file))
    if not places:
        raise ClusterError(
            f"{str(path)!r} has no weights. Expected was a .safetensors file, or a folder of them. Correct the path of weights="
        )

    def read(name: str) -> Tensor:
        if name not in places:
            raise ClusterError(
                f"{str(path)!r} has no tensor {name!r}; it has {len(places)} others, such as {min(places)!r}. Expected were the"
                " parameters by their names in the model. Give the weights of this model"
            )
        with safe_open(places[name], framework="pt") as opened:
            return opened.get_tensor(name)

    return read
