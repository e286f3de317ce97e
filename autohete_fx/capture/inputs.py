"""What stands behind a graph's placeholders: from AOTAutograd's graphs back to the user's parameters.

Dynamo's graph says for each placeholder where its value comes from, such as
``L['self']._modules['layers']._modules['0']._parameters['weight']``. AOTAutograd's placeholders say, in
``meta["desc"]``, which of Dynamo's inputs they are. Names are the stable key: indices differ between graphs.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

_ROOT = re.compile(r"^(?:[LG]\['(?P<root>[^']*)'\])")
_STEP = re.compile(r"\['([^']*)'\]|\.([A-Za-z_]\w*)|\[(\d+)\]")
_CONTAINERS = frozenset({"_modules", "_parameters", "_buffers", "_orig_mod"})


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of Dynamo's graph.

    Attributes:
        index: position among the graph's inputs.
        name: fully qualified parameter or buffer name where it has one, else the source expression.
        tensor: the real value where it is a tensor (parameters always are), else None.
        is_parameter: whether it is an ``nn.Parameter``.
        edge: position among the inputs that are tensors, which alone have an edge in autograd's graph: sizes have none.
    """

    index: int
    name: str
    tensor: torch.Tensor | None
    is_parameter: bool
    edge: int | None


def clean_name(source: str) -> str:
    """``L['self']._modules['a']._parameters['w']`` becomes ``a.w``; other roots than ``self`` and ``fn`` are dropped too."""
    match = _ROOT.match(source)
    rest = source[match.end() :] if match else source
    steps = [next(group for group in step if group) for step in _STEP.findall(rest) if any(step)]
    return ".".join(step for step in steps if step not in _CONTAINERS) or source


def graph_inputs(gm: fx.GraphModule, example_inputs: Sequence[object]) -> tuple[GraphInput, ...]:
    """The inputs of Dynamo's graph, in order; two inputs with one cleaned name keep their source expressions."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [_source_of(node) for node in placeholders]
    names = [clean_name(source) for source in sources]
    edges = itertools.count()
    return tuple(
        GraphInput(
            index=index,
            name=name if names.count(name) == 1 else source,
            tensor=value if isinstance(value, torch.Tensor) else None,
            is_parameter=isinstance(value, torch.nn.Parameter),
            edge=next(edges) if isinstance(value, torch.Tensor) else None,
        )
        for index, (name, source, value) in enumerate(zip(names, sources, example_inputs, strict=True))
    )


def _source_of(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    name = source.name
    return str(name() if callable(name) else name)


def placeholder_inputs(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> dict[str, GraphInput]:
    """Dynamo's input behind each placeholder of an AOTAutograd graph that stands for one, by placeholder name."""
    found = {}
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        index = getattr(node.meta.get("desc"), "idx", None)
        if type(node.meta.get("desc")).__name__ == "PlainAOTInput" and isinstance(index, int) and index < len(inputs):
            found[node.name] = inputs[index]
    return found


def parameter_fqns(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> dict[str, str]:
    """Parameter name by placeholder name."""
    return {name: item.name for name, item in placeholder_inputs(gm, inputs).items() if item.is_parameter}
