"""One stage of a model that is a chain of layers: its own layers with their weights, and stand-ins for the rest that have none.

The model's own forward runs on every stage. A layer of another stage is a `StandIn`, which returns zeros without memory. The
one just before this stage's first layer returns the hidden state that was received. The stage returns the hidden state after
its last layer, and the last stage returns the loss. Operators outside of layers, such as masks and rotary angles, run on every
stage, each from its own copy of the batch. All that does not lead to the result is dead code, which compilers take out.

Names of modules and parameters are those of the whole model.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autohete_fx.cluster.model.batches import call
from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.model.watch import AtLayers, Returned
from autohete_fx.cluster.stages.module import Loss, StageModule
from autohete_fx.internals.operators import tree_leaves


class StandIn(nn.Module):
    """A module of another stage: no weights, and zeros for what it returns. Other attributes are the original's."""

    def __init__(self, original: nn.Module, returned: Returned, device: torch.device) -> None:
        super().__init__()
        own = {"forward", *vars(nn.Module())}
        for name, value in vars(original).items():
            if name not in own and not name.startswith("_"):
                setattr(self, name, value)
        self.__dict__["_original"] = original  # no part of this one
        self._returned, self._device = returned, device
        self.received: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a parameter without memory, a part
            return getattr(vars(self)["_original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros of the shapes that the original returns."""
        return self._returned.filled(self._device, self.received)


class ChainStage(StageModule):
    """Consecutive layers of a chain.

    Attributes:
        model: the whole model's module tree; ``model.parameters()`` has some of other stages, without memory and frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_map: LayerMap,
        layers: range,
        way: AtLayers,
        loss: Loss,
        share: float,
        device: torch.device,
        recomputed: int = 0,
    ) -> None:
        super().__init__(layer_map, layers, loss, share)
        self.model = model
        self._first = layers.start == 0
        self._found: list[Tensor] = []
        self._inlet: StandIn | None = None
        self._received: list[Tensor] = []
        self._entrance = way.entrance
        _cut(model, layer_map, way, layers, set(self.held), device)
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
            hidden = way.returned[last].hidden
            assert hidden is not None, "a layer returns its hidden state"
            model.get_submodule(last).register_forward_hook(
                lambda _, __, out: self._found.append(tree_leaves(out)[hidden])
            )

    def named(self) -> dict[str, nn.Parameter]:
        """This stage's parameters."""
        params = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: params[name] for name in self.held}

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor:
        """The hidden state after the last layer, or the loss's share of the global batch's mean.

        Args:
            args: the hidden state of the stage before; none for the first stage.
            named: tensors of the batch, ``batch_`` before their names.
        """
        batch = self._batch_of(named)
        if not self._first:
            if self._inlet is not None:
                self._inlet.received = args[0]
            else:
                self._received.append(args[0])
        out = call(self.model, batch)
        if self._inlet is not None:
            self._inlet.received = None
        if self._last:
            return self._loss_of(out, batch)
        return self._found.pop().contiguous()  # messages have no strides

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


def _cut(
    model: nn.Module, layer_map: LayerMap, way: AtLayers, layers: range, held: set[str], device: torch.device
) -> None:
    """Put stand-ins where another stage's modules are, and zeros without memory where modules of this stage have others'
    weights."""
    for index, name in enumerate(layer_map.layers, 1):
        if index not in layers:
            _replace(model, name, way.returned[name], device)
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
        if foreign and name in way.returned and name not in around:
            _replace(model, name, way.returned[name], device)
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
