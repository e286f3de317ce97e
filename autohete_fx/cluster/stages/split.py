"""One stage of a model that is divided at marks: its own sections, one after another.

A stage reads and makes any number of tensors. Those that earlier stages made and later ones read pass it by outside of its
compiled code.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autohete_fx.cluster.model.batches import Batch
from autohete_fx.cluster.model.building import BuildModel, build_noting_order
from autohete_fx.cluster.model.layers import LayerMap, in_training
from autohete_fx.cluster.model.split import PREFIX, AtMarks, Split, fake_state, split_model
from autohete_fx.cluster.stages.module import Loss, StageModule
from autohete_fx.internals.modes import CopiedFakeTensorMode


def divided(build_model: BuildModel, way: AtMarks, device: torch.device) -> Split:
    """The model in sections, traced for a device."""
    model = in_training(build_noting_order(build_model)[0])
    with CopiedFakeTensorMode(allow_non_fake_inputs=True):
        fake_state(model, device)
        tensors = {name: shape.empty(device) for name, shape in way.inputs.items()}
    return split_model(model, Batch(tensors=tensors, given=way.given))


class SplitStage(StageModule):
    """Consecutive sections of a model.

    Args:
        model: with the values of this stage's parameters.
        layer_map: of the model.
        layers: numbers of the sections.
        split: of the model.
        loss: of the model's output.
        share: of a micro-batch's mean in the mean of the global batch.
        recomputed: how many of the layers, from the first, make their activations again in backward.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_map: LayerMap,
        layers: range,
        split: Split,
        loss: Loss,
        share: float,
        recomputed: int = 0,
    ) -> None:
        super().__init__(layer_map, layers, loss, share)
        own = split.sections[layers.start : layers.stop]
        self._sections, self._recomputed, self._inputs, self._output = own, recomputed, split.inputs, split.output
        self.operators = nn.ModuleList(split.modules[layers.start : layers.stop])
        _take_state(self.operators, model)
        self._tied = layer_map.tied
        self._unread = [name for name in self.held if not layer_map.readers[name]]
        self.unread = nn.ParameterList(model.get_parameter(name) for name in self._unread)
        received = split.carried[layers.start]
        self._sent = () if self._last else split.carried[layers.stop]
        read = {name for section in own for name in section.reads} | set(split.output.names if self._last else ())
        made = {name for section in own for name in section.makes}
        self._received, self._needed = received, tuple(name for name in received if name in read)
        self._made = tuple(name for name in self._sent if name in made)
        shapes = dict(zip(received, layer_map.crossing[layers.start], strict=True))
        self.reads_shapes = tuple(shapes[name] for name in self._needed)

    def named(self) -> dict[str, nn.Parameter]:
        """This stage's parameters."""
        found = dict(zip(self._unread, self.unread, strict=True))
        for operators in self.operators:
            for name, param in operators.named_parameters(remove_duplicate=False):
                own = name.removeprefix(PREFIX)
                found[self._tied.get(own, own)] = param
        return found

    def passing_on(self, compiled: nn.Module) -> nn.Module:
        """The compiled stage, with the tensors that only pass through it."""
        return _PassingOn(compiled, self._received, self._needed, () if self._last else self._made, self._sent)

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The tensors that later stages read and this one makes, or the loss's share of the global batch's mean.

        Args:
            args: the tensors of other stages that it reads.
            named: tensors of the batch, ``batch_`` before their names.
        """
        batch = self._batch_of(named)
        values = dict(zip(self._inputs, batch.tensors.values(), strict=True)) | dict(
            zip(self._needed, args, strict=True)
        )
        for place, (section, operators) in enumerate(zip(self._sections, self.operators, strict=True)):
            section.run(
                partial(checkpoint, operators, use_reentrant=False) if place < self._recomputed else operators, values
            )
        if self._last:
            return self._loss_of(self._output.filled(values), batch)
        return tuple(values[name] for name in self._made)


class _PassingOn(nn.Module):
    """A compiled stage between its neighbours: it gets all that crosses the cut before, and gives all that crosses the one after.

    Args:
        compiled: the stage.
        received: names of what it gets.
        needed: those that the stage reads.
        made: names of what the stage returns; none of the last one, which returns the loss.
        sent: names of what it gives.
    """

    def __init__(
        self,
        compiled: nn.Module,
        received: tuple[str, ...],
        needed: tuple[str, ...],
        made: tuple[str, ...],
        sent: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.compiled = compiled
        self._received, self._needed, self._made, self._sent = received, needed, made, sent

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The tensors that cross the cut after the stage, or the loss."""
        values = dict(zip(self._received, _Received.apply(*args) if args else (), strict=True))
        made = self.compiled(*(values[name] for name in self._needed), **named)
        if not self._sent:
            return made
        values.update(zip(self._made, made, strict=True))
        return tuple(values[name].contiguous() for name in self._sent)


class _Received(torch.autograd.Function):
    """Tensors as they are. Those without a gradient in backward get zeros, because the stage before waits for each."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of them."""
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.requires_grad))
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Their gradients."""
        return grads


def _take_state(sections: nn.ModuleList, model: nn.Module) -> None:
    """Put the model's own parameters and buffers in place of fake ones. Constants of the trace stay."""
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for section in sections:
        for prefix, module in section.named_modules():
            owner = f"{prefix}." if prefix else ""
            for key in module._parameters:
                module._parameters[key] = params[f"{owner}{key}".removeprefix(PREFIX)]
            for key, constant in module._buffers.items():
                module._buffers[key] = buffers.get(f"{owner}{key}".removeprefix(PREFIX), constant)
