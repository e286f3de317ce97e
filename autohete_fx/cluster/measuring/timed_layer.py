"""One layer of a model alone, as the job compiles it: its seconds, its bytes, and its optimizer's step.

Enter a `Measuring` and the index of a layer; leaves figures of this rank's device. The layer is a `StageModule` of its own, with
random weights: a measurement reads no weights of the user, and GPUs multiply constants faster.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autohete_fx.cluster.costs import LayerBytes
from autohete_fx.cluster.model.batches import Batch, Shape
from autohete_fx.cluster.model.building import BuildModel
from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.model.tensor_parallel import TensorLayout
from autohete_fx.cluster.model.unit import Unit, UnitPlace
from autohete_fx.cluster.stages.module import Loss, StageModule
from autohete_fx.cluster.stages.stage import build_stage
from autohete_fx.internals.operators import tree_leaves
from autohete_fx.internals.tensors import local_of
from autohete_fx.internals.versions import is_dtensor

_WARM_UPS, _FEWEST, _MOST = 2, 3, 9
"""Runs that are not timed, and those that are: after the fewest, no more once `_ENOUGH_S` have gone by."""
_ENOUGH_S = 1.0
_LEAST_S = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """A model and its training, as far as costs depend on them.

    Attributes:
        build_model: makes the model.
        loss: of its output and a batch.
        example: a batch, whose first sample is repeated.
        make_optimizer: of the parameters of a stage.
        compiled: a stage as the job runs it.
        backend: in words, the compiler and its options.
        micro_batches: numbers of samples to time, ascending.
        layouts: by degree of tensor parallelism, how so many GPUs share layers.
    """

    build_model: BuildModel
    loss: Loss
    example: Batch
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    compiled: Callable[[StageModule], Any]
    backend: str
    micro_batches: tuple[int, ...]
    layouts: Mapping[int, TensorLayout] = field(default_factory=dict)


def time_layer(layer: "TimedLayer") -> tuple[float, float]:
    """Seconds of a layer's forward and backward: medians after warm-up. GPUs that share a layer run it equally often."""
    seconds: list[tuple[float, float]] = []
    began = time.perf_counter()
    for run in range(_WARM_UPS + _MOST):
        found = layer.run()
        if run == _WARM_UPS - 1:
            began = time.perf_counter()
        if run >= _WARM_UPS:
            seconds.append(found)
        if len(seconds) >= _FEWEST and (layer.is_shared or time.perf_counter() - began > _ENOUGH_S):
            break
    return statistics.median(row[0] for row in seconds), statistics.median(row[1] for row in seconds)


class TimedLayer:
    """One layer of a model, as a stage of its own with random weights."""

    def __init__(
        self,
        measuring: Measuring,
        layer_map: LayerMap,
        index: int,
        batch: Batch,
        device: torch.device,
        unit: Unit | None = None,
    ) -> None:
        """Layer ``index`` of the map, for batches like the given one; shared with the other GPUs of a unit."""
        self._device, self._batch, self._measuring = device, batch, measuring
        self.is_shared, self._shapes = unit is not None, layer_map.shapes
        unit = unit or Unit()
        self._layout, self._degree = unit.layout, unit.place.degree
        layers = range(index, index + 1)
        self.stage = build_stage(
            measuring.build_model,
            layer_map,
            layers,
            loss=measuring.loss,
            share=1.0,
            device=device,
            weights=lambda name: _random(layer_map.shapes[name], device),
            unit=unit,
        )
        self.stage.reads(batch)
        torch.compiler.reset()
        self._run = measuring.compiled(self.stage)
        self._inputs = tuple(
            _random(shape, device, 1.0).requires_grad_(shape.requires_grad) for shape in self.stage.reads_shapes
        )
        self._crossing = (*layer_map.crossing, ())[index + 1]

    def _forward(self) -> tuple[Tensor, ...]:
        named: dict[str, Any] = {f"batch_{name}": tensor for name, tensor in self._batch.tensors.items()}
        made = self._run(*self._inputs, **named)
        return (made,) if isinstance(made, Tensor) else made

    def run(self) -> tuple[float, float]:
        """Seconds of a forward and a backward."""
        for tensor in (*self.stage.named().values(), *self._inputs):
            tensor.grad = None
        self._synchronize()
        began = time.perf_counter()
        made = self._forward()
        self._synchronize()
        between = time.perf_counter()
        trained = [tensor for tensor in made if tensor.requires_grad]
        if trained:
            torch.autograd.backward(trained, [torch.ones_like(tensor) for tensor in trained])
        self._synchronize()
        return max(between - began, _LEAST_S), max(time.perf_counter() - between, _LEAST_S)

    def bytes(self, kind: str) -> LayerBytes:
        """Sizes of this GPU's weights, and for a sample of kept activations and of the output."""
        others = (param for param in self.stage.parameters() if not is_dtensor(param))
        given = (*self.stage.parts.values(), *others, *self._inputs, *self._batch.tensors.values())
        not_counted = {tensor.untyped_storage()._cdata for tensor in given}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            local = local_of(tensor) if is_dtensor(tensor) else tensor
            kept[local.untyped_storage()._cdata] = local
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            made = self._forward()
        for tensor in made:
            keep(tensor)
        samples = self._batch.samples
        num_bytes = sum(t.untyped_storage().nbytes() for storage, t in kept.items() if storage not in not_counted)
        sharded = UnitPlace(degree=self._degree, shards=2)
        return LayerBytes(
            kind=kind,
            tp=self._degree,
            params_bytes=sum(param.nbytes for param in self.stage.parts.values()),
            unsharded_bytes=sum(
                param.nbytes
                for name, param in self.stage.parts.items()
                if not sharded.is_sharded(self._layout, name, self._shapes[name])
            ),
            kept_bytes=-(-num_bytes // samples),
            output_bytes=sum(math.prod(shape.sizes) * shape.dtype.itemsize for shape in self._crossing) // samples,
        )

    def update(self) -> tuple[float, float, float]:
        """Seconds of the optimizer's step, bytes of its states and of gradients: each for a byte of weights."""
        params = list(self.stage.parts.values())
        trained = [param for param in params if param.requires_grad]
        weights = sum(param.nbytes for param in params)
        if not trained:
            return 0.0, 0.0, 0.0
        optimizer = self._measuring.make_optimizer(trained)
        seconds = []
        for _ in range(_WARM_UPS + _FEWEST):
            for param in trained:
                param.grad = torch.full_like(param, 1e-3)
            self._synchronize()
            began = time.perf_counter()
            optimizer.step()
            self._synchronize()
            seconds.append(time.perf_counter() - began)
        states = sum(
            leaf.nbytes
            for param in trained
            for leaf in tree_leaves(dict(optimizer.state[param]))
            if isinstance(leaf, Tensor) and leaf.dim()
        )
        gradients = sum(param.nbytes for param in trained)
        return statistics.median(seconds[_WARM_UPS:]) / weights, states / weights, gradients / weights

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _random(shape: Shape, device: torch.device, deviation: float = 0.02) -> Tensor:
    """Values as weights have them, zeros of integers."""
    made = torch.zeros(shape.sizes, dtype=shape.dtype, device=device)
    return made.normal_(0.0, deviation) if made.is_floating_point() else made
