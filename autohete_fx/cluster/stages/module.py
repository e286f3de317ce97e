"""A rank's part of a model: what all kinds of stages have in common."""

import abc
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from autohete_fx.cluster.model.batches import Batch, Shape
from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.model.tensor_parallel import take_gradient
from autohete_fx.errors import ClusterError

Loss = Callable[[Any, Any], Tensor]
"""A function of the output of the model and the batch: the mean over its samples."""


class StageModule(nn.Module, abc.ABC):
    """Consecutive layers of a model.

    Attributes:
        held: names of this stage's parameters, tied ones once.
        parts: by name of a parameter, what this rank has of it. It is the parameter itself, but where a unit's GPUs share layers.
        reads_shapes: of the tensors of other stages that forward reads.
    """

    def __init__(self, layer_map: LayerMap, layers: range, loss: Loss, share: float) -> None:
        super().__init__()
        self.held = layer_map.held(layers)
        self.parts: dict[str, nn.Parameter] = {}
        self.reads_shapes: tuple[Shape, ...] = layer_map.crossing[layers.start]
        self._last = layers.stop == layer_map.num_layers
        self._loss, self._share = loss, share
        self._batch_form: tuple[str, tuple[str, ...]] = ("tensor", ("0",))

    @abc.abstractmethod
    def named(self) -> dict[str, nn.Parameter]:
        """This stage's parameters."""

    def passing_on(self, compiled: nn.Module) -> nn.Module:
        """The module that a pipeline calls: the compiled stage, with tensors that only pass through it."""
        return compiled

    def take_gradients(self) -> None:
        """Move the gradients of parameters to this rank's parts of them, those that are not there yet."""
        for name, param in self.named().items():
            take_gradient(param, self.parts[name])

    def reads(self, batch: Batch) -> None:
        """Batches will have the form of this one."""
        self._batch_form = batch.given, tuple(batch.tensors)

    def _batch_of(self, named: dict[str, Tensor]) -> Batch:
        """The batch whose tensors a stage is called with, ``batch_`` before their names."""
        form, names = self._batch_form
        return Batch(tensors={name: named[f"batch_{name}"] for name in names}, given=form)

    def _loss_of(self, out: Any, batch: Batch) -> Tensor:
        """The loss's share of the global batch's mean."""
        loss = self._loss(out, batch.original())
        if not isinstance(loss, Tensor) or loss.dim():
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ClusterError(
                f"loss gave {given}. Expected was a tensor without dimensions, the mean over the batch's samples. Correct loss"
            )
        return self._share * loss
