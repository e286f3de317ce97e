"""A stage of any model on its device, with its weights.

Enter how to build the model and its `LayerMap`; leaves a `StageModule`, of a chain of layers (`chain`) or of what lies
between marks (`split`). Parameters go by their names in the whole model.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from autohete_fx.cluster.model.building import BuildModel, build_part
from autohete_fx.cluster.model.layers import LayerMap, in_training
from autohete_fx.cluster.model.pieces import Piece
from autohete_fx.cluster.model.split import AtMarks
from autohete_fx.cluster.model.tensor_parallel import divide
from autohete_fx.cluster.model.unit import Unit
from autohete_fx.cluster.stages.chain import ChainStage
from autohete_fx.cluster.stages.module import Loss, StageModule
from autohete_fx.cluster.stages.split import SplitStage, divided
from autohete_fx.errors import ClusterError
from autohete_fx.runtime.shard.layout import Layout
from autohete_fx.runtime.shard.surface import check_references

log = logging.getLogger(__name__)

Weights = str | Path | Callable[[str], Tensor] | None
"""A safetensors file or folder, a function of a parameter's name, or None: as ``build_model`` initialises them. A function gives
the whole parameter, or this rank's part of it."""


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
    built = build_part(build_model, layer_map.order, set(layer_map.held(layers)), seed, is_loaded=weights is not None)
    model, way = in_training(built), layer_map.way
    if isinstance(way, AtMarks):
        stage = SplitStage(model, layer_map, layers, divided(build_model, way, device), loss, share, recomputed)
    else:
        stage = ChainStage(model, layer_map, layers, way, loss, share, device, recomputed)
    for module in stage.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    unit = unit or Unit()
    if unit.sharded is not None:
        check_references(stage)
    _take_parts(stage, layer_map, unit, device)
    if weights is not None:
        _load(stage, weights, layer_map, unit)
    _share_layers(stage, layer_map, unit)
    return stage


def _take_parts(stage: StageModule, layer_map: LayerMap, unit: Unit, device: torch.device) -> None:
    """Leave this rank's part of each parameter in the stage's modules, on the device. A tied parameter stays one."""
    held = {id(param): name for name, param in stage.named().items()}
    for module in stage.modules():
        for key, param in module._parameters.items():
            if param is not None and id(param) in held:
                name = held[id(param)]
                if name not in stage.parts:
                    part = unit.part(param.detach(), name, layer_map.shapes[name], device)
                    stage.parts[name] = nn.Parameter(part, param.requires_grad)
                module._parameters[key] = stage.parts[name]
    stage.parts = {name: stage.parts[name] for name in stage.held}


def _share_layers(stage: StageModule, layer_map: LayerMap, unit: Unit) -> None:
    """Let the modules compute with the parts that the unit's GPUs have: by tensor parallelism, by gathering shards, or both."""
    layouts: dict[str, Layout] = {}
    if unit.tensor_parallel is not None:
        assert isinstance(stage, ChainStage), "plans of other models have one GPU a stage"
        names = {id(param): name for name, param in stage.parts.items()}
        layouts = divide(
            stage.model,
            names,
            stage.parts,
            layer_map.shapes,
            unit.layout,
            unit.tensor_parallel,
            has_shards=unit.sharded is not None,
        )
    if unit.sharded is not None:
        unit.hold(stage, stage.parts, layer_map.shapes, layouts)


def _load(stage: StageModule, weights: Weights, layer_map: LayerMap, unit: Unit) -> None:
    read = weights if callable(weights) else _of_safetensors(Path(str(weights)), layer_map)
    for name, param in stage.parts.items():
        found, whole = read(name), layer_map.shapes[name].sizes
        piece = unit.piece(name, layer_map.shapes[name])
        own = piece.of(param.detach(), piece)
        if tuple(found.shape) == whole:
            found = piece.of(found, Piece(name))
        elif found.shape != own.shape:
            raise ClusterError(
                f"the weights have {name!r} with shape {tuple(found.shape)}, and the model has {whole}. Expected were"
                " equal shapes. Give the weights of this model"
            )
        own.copy_(found)


def _of_safetensors(path: Path, layer_map: LayerMap) -> Callable[[str], Tensor]:
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
    others = sorted(places.keys() - layer_map.shapes.keys())
    if others:
        log.warning(
            "%r has %s and %d others, which are no parameters of the model, nor the first names of tied ones. They are not read:"
            " buffers have the values that build_model gives them",
            str(path),
            others[0],
            len(others) - 1,
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
