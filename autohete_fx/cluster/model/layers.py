"""The layers of any model, and which of them read each parameter: found by one forward pass of fake tensors.

Enter a function that builds the model and an example of a batch; leaves a `LayerMap`, by which `stage` cuts the model. Layers
are numbered as plans number them. 0 is all that runs before the first layer, 1 to L are the layers, L + 1 is all that runs
after the last.

Layers are modules that call one another in a chain (`chain`, `watch`), unless the forward pass has marks of
`torch.distributed.pipelining.pipe_split`. Then they are what runs from one mark to the next (`split`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autohete_fx.cluster.model.batches import Batch, Shape, call, shape_of
from autohete_fx.cluster.model.building import BuildModel, build_noting_order
from autohete_fx.cluster.model.chain import find_chain
from autohete_fx.cluster.model.split import AtMarks, fake_state, has_marks, split_model
from autohete_fx.cluster.model.watch import AtLayers, Watch
from autohete_fx.errors import ClusterError
from autohete_fx.internals.modes import CopiedFakeTensorMode


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMap:
    """Where a model can be cut.

    Attributes:
        layers: names of layers 1 to L: of modules, or of what lies between marks.
        readers: by name of a parameter, the layers that read it, maybe none; tied parameters go by their first name.
        shapes: of parameters by name.
        tied: other names of parameters, to the first.
        crossing: by layer, the tensors that it and later ones get from those before.
        way: how stages are cut.
        order: parameters in the order in which ``build_model`` registers them.
        frozen: parameters that are not trained.
    """

    layers: tuple[str, ...]
    readers: Mapping[str, frozenset[int]]
    shapes: Mapping[str, Shape]
    tied: Mapping[str, str]
    crossing: tuple[tuple[Shape, ...], ...]
    way: AtLayers | AtMarks
    order: tuple[str, ...]
    frozen: frozenset[str] = frozenset()

    @property
    def num_layers(self) -> int:
        """Layers as plans count them, with what is before and after."""
        return len(self.layers) + 2

    @property
    def sample_tokens(self) -> int:
        """The tokens of a sample: the hidden state's, or elements of the batch's first tensor of integers, or 1."""
        if isinstance(self.way, AtLayers):
            return math.prod(self.crossing[1][0].sizes[1:-1])
        integers = [shape for shape in self.way.inputs.values() if not shape.dtype.is_floating_point]
        return math.prod(integers[0].sizes[1:]) if integers else 1

    def held(self, layers: range) -> list[str]:
        """Parameters that a stage of these layers has. Parameters that nobody reads stand with layer 0."""
        return [name for name, readers in self.readers.items() if any(layer in (readers or {0}) for layer in layers)]


def map_layers(build_model: BuildModel, batch: Batch) -> LayerMap:
    """Find the layers.

    Args:
        build_model: makes the module.
        batch: one micro-batch; tensors of any device, whose values are not read.

    Raises:
        ClusterError: the model has neither marks nor a chain of layers, or a tensor other than the hidden state skips a layer.
            Also where the forward pass depends on values of tensors, or a layer normalises over samples.
    """
    built, order = build_noting_order(build_model)
    model = in_training(built)
    _refuse_batch_norms(model)
    _refuse_sparse_gradients(model)
    params, tied = dict(model.named_parameters()), _ties(model)
    shapes = {name: shape_of(param) for name, param in params.items()}
    frozen = frozenset(name for name, param in params.items() if not param.requires_grad)
    with CopiedFakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_state(model, "cpu")
        fake = batch.mapped(lambda tensor: shape_of(tensor).empty("cpu"))
        try:
            marked = has_marks(model, fake)
            if not marked:
                chain = find_chain(model, fake)
                watch = Watch(model, chain, tied)
                with watch.hooks(), watch:
                    call(model, fake)
        except ClusterError:
            raise
        except Exception as error:
            raise ClusterError(
                f"a forward pass of {type(model).__name__} without values failed: {_first_line(error)}. Expected was a model whose"
                " operators do not depend on values of tensors. Take such branches out of forward, or correct the example batch"
            ) from error
    if marked:
        split = split_model(model, fake)
        readers, crossing, way = split.survey(model, mode, fake, tied)
        layers = tuple(f"from mark {index}" for index in range(1, len(crossing) - 1))
    else:
        readers, way, layers = watch.readers, watch.way, chain
        crossing = ((), *[(watch.hidden,)] * (len(chain) + 1))
    return LayerMap(
        layers=layers,
        readers=readers,
        shapes=shapes,
        tied=tied,
        crossing=crossing,
        way=way,
        order=tuple(order),
        frozen=frozen,
    )


def in_training(model: nn.Module) -> nn.Module:
    """The model, with caches of keys and values off where its configuration has them: nothing generates while a model trains. One
    that comes in evaluation mode, as pretrained ones do, trains; parts that ``build_model`` has put in it stay in it."""
    if not model.training:
        model.train()
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return model


def _ties(model: nn.Module) -> dict[str, str]:
    """Other names of parameters, to the first."""
    names: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    firsts = {name: names.setdefault(id(param), name) for name, param in every}
    return {name: first for name, first in firsts.items() if name != first}


def _refuse_batch_norms(model: nn.Module) -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for name, module in model.named_modules():
        if module.training and (isinstance(module, kinds) or isinstance(getattr(module, "running_mean", None), Tensor)):
            raise ClusterError(
                f"{name!r} of {type(model).__name__} is a {type(module).__name__}, whose statistics depend on which samples share"
                " a micro-batch, and so on the plan. Expected were layers that treat each sample alone. Use LayerNorm or GroupNorm"
            )


def _refuse_sparse_gradients(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise ClusterError(
                f"{name!r} of {type(model).__name__} has sparse=True. Expected were dense gradients, which ranks can sum. Leave"
                " sparse=True out"
            )


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
