"""The tensors that a graph's placeholders stand for: from AOTAutograd's graphs back to the user's parameters.

Dynamo's graph says for each placeholder where its value comes from, such as
``L['self']._modules['layers']._modules['0']._parameters['weight']``. AOTAutograd's placeholders say, in
``meta["desc"]``, which of Dynamo's inputs they are. Names are the stable key: indices differ between graphs.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autohete_fx.graph.sizes import hint, is_known
from autohete_fx.internals import versions
from autohete_fx.internals.tensors import dims_marked_dynamic, parts_of

_ROOT = re.compile(r"^(?:L\['args'\]\[0\]|[LG]\['[^']*'\])(?:\.__closure__\[\d+\]\.cell_contents)*")
_STEP = re.compile(r"\['([^']*)'\]|\.([A-Za-z_]\w*)|\[(\d+)\]")
_CONTAINERS = frozenset({"_modules", "_parameters", "_buffers", "_orig_mod", "__dict__"})


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of Dynamo's graph.

    Attributes:
        index: position among the graph's inputs.
        name: fully qualified parameter or buffer name where it has one, else the source expression.
        tensor: the real value where it is a tensor (parameters always are), else None.
        is_parameter: whether it is an ``nn.Parameter``.
        edge: position among the inputs that are tensors, which alone have an edge in autograd's graph: sizes have none.
        is_sharded: whether it is a parameter that several ranks hold together, and FSDP gathers for the call.
    """

    index: int
    name: str
    tensor: torch.Tensor | None
    is_parameter: bool
    edge: int | None
    is_sharded: bool = False


def clean_name(source: str) -> str:
    """``L['self']._modules['a']._parameters['w']`` becomes ``a.w``; other roots than ``self`` are dropped too.

    The variable that a function closes over is one, and so is ``args[0]``, the module of a forward that is decorated.
    """
    match = _ROOT.match(source)
    rest = source[match.end() :] if match else source
    steps = [next(group for group in step if group) for step in _STEP.findall(rest) if any(step)]
    return ".".join(step for step in steps if step not in _CONTAINERS) or source


def sizes_that_may_change(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> list[torch.SymInt]:
    """The sizes of inputs of Dynamo's graph that may be others in the next call, but for those that the program has marked so.

    PyTorch marks the lengths of the shortest and of the longest row of a jagged tensor.
    """
    found = []
    for node, item in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        traced, given = list(parts_of(node.meta.get("example_value"))), list(parts_of(item.tensor))
        for at, tensor in enumerate(traced):
            marked = dims_marked_dynamic(given[at] if len(given) == len(traced) else item.tensor)
            sizes = enumerate(tensor.shape)
            found += [s for dim, s in sizes if isinstance(s, torch.SymInt) and is_known(s) and dim not in marked]
    return found


def limit_sizes(sizes: Iterable[torch.SymInt]) -> None:
    """Let Dynamo compile afresh for larger sizes than a graph is compiled with: its plan knows nothing of what those take."""
    for size in sizes:
        bool(size <= hint(size))  # becomes a guard


def graph_inputs(
    gm: fx.GraphModule, example_inputs: Sequence[object], called: Sequence[torch.nn.Module] = ()
) -> tuple[GraphInput, ...]:
    """The inputs of Dynamo's graph, in order; two inputs with one cleaned name keep their source expressions.

    Args:
        gm: the graph.
        example_inputs: what it is called with; parameters as they are.
        called: modules whose call Dynamo compiles, outermost first. Behind a graph break in a module below, names start at that
            module; they are restored to those that the outer one has.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [_source_of(node) for node in placeholders]
    full_names = _full_names(called)
    names = [
        _restored(clean_name(source), full_names.get(id(value), ()))
        for source, value in zip(sources, example_inputs, strict=True)
    ]
    edges = itertools.count()
    within_fsdp = versions.has_fsdp(called)
    return tuple(
        GraphInput(
            index=index,
            name=name if names.count(name) == 1 else source,
            tensor=value if isinstance(value, torch.Tensor) else None,
            is_parameter=isinstance(value, torch.nn.Parameter),
            edge=next(edges) if isinstance(value, torch.Tensor) else None,
            is_sharded=isinstance(value, torch.nn.Parameter)
            and (versions.is_of_fsdp(node) or (within_fsdp and versions.is_dtensor(value))),
        )
        for index, (name, source, value, node) in enumerate(
            zip(names, sources, example_inputs, placeholders, strict=True)
        )
    )


def _full_names(modules: Sequence[torch.nn.Module]) -> dict[int, list[str]]:
    """Names of each parameter, by its identity."""
    names: dict[int, list[str]] = {}
    for module in modules:
        for name, param in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
    return names


def _restored(name: str, full_names: Sequence[str]) -> str:
    """The first of a parameter's full names that ends with a name, or else the first; the name itself where it has none. A method
    that is handed over, for example, has its module elsewhere than the module that is called."""
    matching = (full for full in full_names if f".{full}".endswith(f".{name}"))
    return next(matching, next(iter(full_names), name))


def _source_of(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return node.name
    name = source.name
    return str(name() if callable(name) else name)


def placeholder_inputs(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> dict[str, GraphInput]:
    """Dynamo's input for each placeholder of an AOTAutograd graph that stands for one, by placeholder name."""
    found = {}
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        index = versions.input_index(node.meta.get("desc"))
        if index is not None and index < len(inputs):
            found[node.name] = inputs[index]
    return found


def parameter_fqns(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> dict[str, str]:
    """Parameter name by placeholder name."""
    return {name: item.name for name, item in placeholder_inputs(gm, inputs).items() if item.is_parameter}


def parameters_of(inputs: Sequence[GraphInput]) -> dict[str, torch.nn.Parameter]:
    """The parameters among the inputs, by name."""
    return {i.name: i.tensor for i in inputs if i.is_parameter and isinstance(i.tensor, torch.nn.Parameter)}


def device_of(inputs: Sequence[GraphInput]) -> torch.device:
    """Where the graph computes: the accelerator if any input is on one."""
    devices = [item.tensor.device for item in inputs if item.tensor is not None]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
