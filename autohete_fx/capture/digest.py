"""A hash of what a group of nodes computes, which names do not enter.

In: nodes in graph order. Out: hexadecimal digests, equal for groups with the same operators, arguments, shapes,
strides, dtypes and wiring; the same in every process. Symbolic sizes count by their hints: a plan depends on numbers.
"""

import hashlib
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from autohete_fx.capture.dataflow import size_hint
from autohete_fx.internals.operators import HigherOrderOperator, OpOverload
from autohete_fx.internals.versions import size_of_group

DIGEST_LENGTH = 16
"""Hexadecimal digits: 64 bits, enough for the handful of blocks of one graph."""

_LOOKUP_SEED = "prims::inductor_lookup_seed"
"""Its arguments number the random operators of the whole graph, which would tell equal layers apart."""

_GROUP_ARGUMENT = "group_name"
"""Process groups of collectives are named by how many were made before, which other groups of a process change. They count by
their sizes."""


def combine(parts: Iterable[str]) -> str:
    """One digest of several strings."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:DIGEST_LENGTH]


def group_digest(nodes: Sequence[fx.Node], parameters: Collection[fx.Node], returned: Collection[fx.Node]) -> str:
    """Digest of one group.

    Args:
        nodes: the group's nodes, in graph order.
        parameters: placeholders that stand for parameters.
        returned: nodes that the graph returns.
    """
    local = {node: index for index, node in enumerate(nodes)}
    outside: dict[fx.Node, str] = {}

    def refer(node: fx.Node) -> str:
        if node in local:
            return f"%{local[node]}"
        if node not in outside:
            role = "parameter" if node in parameters else "input"
            outside[node] = f"<{len(outside)} {role} {_describe(node.meta.get('val'))}>"
        return outside[node]

    return combine(_line(node, node in returned, refer) for node in nodes)


def _line(node: fx.Node, returned: bool, refer: Callable[[fx.Node], str]) -> str:
    name = _operator(node)
    args, kwargs = _by_size_of_group(node)
    args = () if name == _LOOKUP_SEED else args
    call = f"{name} {_argument(args, refer)} {_argument(kwargs, refer)}"
    return f"{call} -> {_describe(node.meta.get('val'))}{' returned' if returned else ''}"


def _by_size_of_group(node: fx.Node) -> tuple[Sequence[object], Mapping[str, object]]:
    """The arguments of a node, with sizes for the names of process groups."""
    if not isinstance(node.target, OpOverload):
        return node.args, node.kwargs
    declared = [argument.name for argument in node.target._schema.arguments]
    args = [_sized(name, value) for name, value in zip(declared, node.args, strict=False)]
    return args, {name: _sized(name, value) for name, value in node.kwargs.items()}


def _sized(name: str, value: object) -> object:
    return size_of_group(value) if name == _GROUP_ARGUMENT and isinstance(value, str) else value


def _operator(node: fx.Node) -> str:
    target = node.target
    if node.op == "get_attr":
        return f"get_attr {_attribute(node)}"
    if isinstance(target, OpOverload):
        return target.name()
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    return target if isinstance(target, str) else f"{target.__module__}.{target.__qualname__}"


def _attribute(node: fx.Node) -> str:
    """A lifted constant by its form, a subgraph by its digest."""
    owner = node.graph.owning_module
    assert owner is not None and isinstance(node.target, str)
    value = operator.attrgetter(node.target)(owner)
    if isinstance(value, fx.GraphModule):
        nodes = [inner for inner in value.graph.nodes if inner.op != "placeholder"]
        return f"graph {group_digest(nodes, (), ())}"
    return _describe(value)


def _argument(value: object, refer: Callable[[fx.Node], str]) -> str:
    if isinstance(value, fx.Node):
        return refer(value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_argument(item, refer) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_argument(item, refer)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step), refer)}"
    return _describe(value)


def _describe(value: object) -> str:
    """A value's form. Objects of types that are not listed count by their type alone: a repr may hold an address."""
    if isinstance(value, torch.Tensor):
        shape = [size_hint(size) for size in value.shape]
        stride = [size_hint(step) for step in value.stride()] if value.layout is torch.strided else value.layout
        return f"{value.dtype}{shape}{stride}@{value.device.type}"
    if isinstance(value, torch.SymInt):
        return f"sym {size_hint(value)}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_describe(item) for item in value)}]"
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (torch.layout, torch.memory_format)):
        return str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"
