"""One GPU's part of a model under tensor parallelism, as a module with smaller layers.

Enter a blueprint and a degree t; leaves the blueprint of the part that one of t GPUs computes. The transformers tensor-parallel
plan of the model says how linear layers are cut. ``colwise`` ones keep 1/t of their outputs, ``rowwise`` ones 1/t of their
inputs. The table here stands in for GPT-2, which has no plan. Embedding and head keep 1/t of the vocabulary, rounded up. Norms,
residuals, position embeddings and biases of row-wise layers stay whole.

The layers keep their class, so a trace of the part has the kernels of one GPU with their very shapes, whatever the model. Tracing
DTensors would leave the same local kernels, and collectives as nodes that neither grouping nor lowering knows. Here collectives are
counted instead: one sum of hidden states for each row-wise layer in forward, and one in backward.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autohete_fx.internals.modes import FakeTensorMode
from autohete_fx.whatif.blueprint import Blueprint, Sketch

_COLUMNS, _ROWS, _WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"
_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "transformer.h.*.attn.c_attn": _COLUMNS,
        "transformer.h.*.attn.c_proj": _ROWS,
        "transformer.h.*.mlp.c_fc": _COLUMNS,
        "transformer.h.*.mlp.c_proj": _ROWS,
    },
}
"""By type of model, the plans of those that transformers has none for."""
_HEADS = ("num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How layers of a model are divided among GPUs.

    Attributes:
        degree: GPUs.
        columns: names of the layers of which each has a part of the outputs.
        rows: names of the layers of which each has a part of the inputs; their results are summed.
        uneven: names of parameters of embedding and head of which one has fewer rows than another.
    """

    degree: int
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    uneven: frozenset[str] = frozenset()

    def sums_in(self, module: str) -> int:
        """How many sums of hidden states the forward of a module has; its backward has as many."""
        return sum(name.startswith(f"{module}.") for name in self.rows)


def division_of(module: nn.Module, degree: int) -> Division | None:
    """The division of a model among so many GPUs.

    None where the degree does not divide heads, key-value heads or a layer's width. None, too, where the plan of the model has
    layers of another style than those that this module names.
    """
    if degree == 1:
        return Division(degree=1)
    config: Any = getattr(module, "config", None)
    plan = _PLANS.get(getattr(config, "model_type", ""), getattr(module, "tp_plan", None))
    if not plan or any(_size(config, name) % degree for name in _HEADS):
        return None
    ends = (_embedding(module), _head(module))
    columns, rows = [], []
    uneven: set[str] = set()
    for name, part in module.named_modules():
        layer: Any = part
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), _WHOLE)
        if any(part is end for end in ends):
            if layer.weight.shape[0] % degree:
                uneven.update(own for own, _ in part.named_parameters(name))
            continue
        if style == _WHOLE:
            continue
        if style not in (_COLUMNS, _ROWS) or not hasattr(layer, "weight"):
            return None
        if layer.weight.shape[_cut_dim(layer, style == _COLUMNS)] % degree:
            return None
        (columns if style == _COLUMNS else rows).append(name)
    if not rows:
        return None
    return Division(degree=degree, columns=tuple(columns), rows=tuple(rows), uneven=frozenset(uneven))


def part_of_model(blueprint: Blueprint, degree: int) -> Blueprint:
    """The blueprint of the part that one of so many GPUs has. They must divide the model."""
    if degree == 1:
        return blueprint

    def build(mode: FakeTensorMode, num_layers: int | None) -> Sketch:
        sketch = blueprint.build(mode, num_layers)
        division = division_of(sketch.module, degree)
        assert division is not None, "the degree divides the model"
        with mode:
            _narrow(sketch.module, division)
        return sketch

    return dataclasses.replace(blueprint, build=build)


def is_tied(module: nn.Module) -> bool:
    """The head has the embedding's weights."""
    ends = (_embedding(module), _head(module))
    return all(end is not None for end in ends) and getattr(ends[0], "weight", 0) is getattr(ends[1], "weight", 1)


def tied_bytes(module: nn.Module) -> int:
    """Bytes of the weights that the head has of the embedding; 0 where they are not tied."""
    embedding = _embedding(module)
    return embedding.get_parameter("weight").nbytes if embedding is not None and is_tied(module) else 0


def _size(config: Any, name: str) -> int:
    """0, which everything divides, where the configuration has none."""
    return getattr(config, name, None) or 0


def _embedding(module: nn.Module) -> nn.Module | None:
    found = getattr(module, "get_input_embeddings", None)
    return found() if found else None


def _head(module: nn.Module) -> nn.Module | None:
    found = getattr(module, "get_output_embeddings", None)
    return found() if found else None


def _cut_dim(layer: nn.Module, columns: bool) -> int:
    """The dimension of its weight. Only ``nn.Linear`` has outputs first."""
    return int(isinstance(layer, nn.Linear) != columns)


def _narrow(module: nn.Module, division: Division) -> None:
    degree = division.degree
    for name in division.columns:
        layer: Any = module.get_submodule(name)
        _cut(layer, _cut_dim(layer, True), degree)
        if getattr(layer, "bias", None) is not None:
            layer.bias = _smaller(layer.bias, 0, degree)
    for name in division.rows:
        layer = module.get_submodule(name)
        _cut(layer, _cut_dim(layer, False), degree)
    for part in module.modules():
        layer = part
        if isinstance(getattr(layer, "split_size", None), int):  # GPT-2's, of its fused query, key and value
            layer.split_size //= degree
    _narrow_vocabulary(module, degree)


def _narrow_vocabulary(module: nn.Module, degree: int) -> None:
    embedding: Any = _embedding(module)
    head: Any = _head(module)
    assert embedding is not None, "a model with a plan has an embedding"
    tied = is_tied(module)
    vocabulary = embedding.weight.shape[0]
    _cut(embedding, 0, degree)
    embedding.padding_idx = None  # which may be another GPU's
    if head is not None:
        if tied:
            head.weight, head.out_features = embedding.weight, embedding.weight.shape[0]
        else:
            _cut(head, 0, degree)
        if getattr(head, "bias", None) is not None:
            head.bias = _smaller(head.bias, 0, degree)
    remembering: list[Any] = [module.config, *module.modules()]
    for part in remembering:
        if getattr(part, "vocab_size", None) == vocabulary:
            part.vocab_size = embedding.weight.shape[0]


def _cut(layer: Any, dim: int, degree: int) -> None:
    """A part of its weight, and of the sizes that it remembers."""
    layer.weight = _smaller(layer.weight, dim, degree)
    outputs = layer.weight.shape[_cut_dim(layer, True)]
    for name in ("out_features", "nf"):
        if hasattr(layer, name):
            setattr(layer, name, outputs)


def _smaller(param: nn.Parameter, dim: int, degree: int) -> nn.Parameter:
    """A parameter with 1/degree of a dimension, rounded up."""
    shape = list(param.shape)
    shape[dim] = -(-shape[dim] // degree)
    return nn.Parameter(torch.empty(shape, dtype=param.dtype), requires_grad=param.requires_grad)
