"""Facts about a joint graph's nodes that the grouping needs: which depend on tangents, sizes, aliases, work.

In: AOTAutograd's joint graph (placeholders for primals and tangents), or an inference graph (no tangents). Out: a
`JointNodes` with the nodes in order and the sets that every later step asks for. Sizes of symbolic shapes are hints,
read without adding a guard.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from autohete_fx.internals.configs import inductor_config
from autohete_fx.internals.operators import OpOverload


@dataclass(frozen=True, slots=True)
class JointNodes:
    """A joint graph's nodes by role.

    Attributes:
        placeholders, output: the graph's ends.
        order: position of every node of ``forward`` and ``backward`` in the graph.
        forward: nodes that do not depend on a tangent, in graph order; placeholders and output excluded.
        backward: nodes that do.
    """

    placeholders: tuple[fx.Node, ...]
    output: fx.Node
    order: dict[fx.Node, int]
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]

    @property
    def forward_end(self) -> int:
        """Position of the first backward node: forward nodes after it serve the backward pass only."""
        return self.order[self.backward[0]] if self.backward else len(self.order)


def split_joint(joint: fx.GraphModule) -> JointNodes:
    """Sort a joint graph's nodes by role."""
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    outputs = [node for node in joint.graph.nodes if node.op == "output"]
    assert len(outputs) == 1, "a joint graph has one output"
    tainted = {node for node in placeholders if is_tangent(node)}
    order: dict[fx.Node, int] = {}
    forward, backward = [], []
    for node in joint.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        order[node] = len(order)
        if any(source in tainted for source in node.all_input_nodes):
            tainted.add(node)
            backward.append(node)
        else:
            forward.append(node)
    return JointNodes(tuple(placeholders), outputs[0], order, tuple(forward), tuple(backward))


def is_tangent(placeholder: fx.Node) -> bool:
    """Whether a placeholder is an incoming gradient: by AOTAutograd's descriptor, by name where it has none."""
    desc = placeholder.meta.get("desc")
    if desc is not None:
        return "Tangent" in type(desc).__name__
    return str(placeholder.target).startswith("tangents")


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The (fake) tensors a node returns."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    yield from (item for item in values if isinstance(item, torch.Tensor))


def is_scalar(node: fx.Node) -> bool:
    """Whether a node computes a size or another number rather than tensors: free to stand anywhere."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def size_hint(size: int | torch.SymInt) -> int:
    """A dimension as a number: the example's value for a symbolic one, Inductor's guess for a data-dependent one."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return inductor_config.unbacked_symint_fallback if hint is None else int(hint)


def num_elements(tensor: torch.Tensor) -> int:
    """Elements of a tensor."""
    count = 1
    for size in tensor.shape:
        count *= size_hint(size)
    return count


def storage_bytes(node: fx.Node) -> int:
    """Bytes between the first and the last element of what a node returns, summed over its tensors."""
    total = 0
    for tensor in tensors_of(node):
        if num_elements(tensor) == 0:
            continue
        if tensor.layout is not torch.strided:
            total += num_elements(tensor) * tensor.element_size()
            continue
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size_hint(size) - 1) * size_hint(stride) for size, stride in pairs)
        total += (last + 1) * tensor.element_size()
    return total


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares its first argument's storage."""
    return isinstance(node.target, OpOverload) and node.target.is_view and bool(node.all_input_nodes)


def is_getitem(node: fx.Node) -> bool:
    """Whether a node picks one result of an operator that returns several."""
    return node.op == "call_function" and node.target is operator.getitem


def storage_owner(node: fx.Node) -> fx.Node:
    """The node that allocated a value, views (also those of one item of a list of views) undone."""
    while True:
        if is_view(node) or (is_getitem(node) and is_view(node.all_input_nodes[0])):
            node = node.all_input_nodes[0]
        else:
            return node


def is_heavy(node: fx.Node) -> bool:
    """Whether a node is a matrix product, a convolution or an attention: what makes a layer a layer."""
    target = node.target
    return isinstance(target, OpOverload) and target.overloadpacket in flop_registry


def work(node: fx.Node) -> int:
    """Multiply-adds of a heavy node, elements of any other: enough to compare parts of one graph."""
    result = next(tensors_of(node), None)
    if result is None:
        return 0
    elements = num_elements(result)
    if not is_heavy(node):
        return elements
    operands = (next(tensors_of(source), None) for source in node.all_input_nodes)
    matrices = (tensor for tensor in operands if tensor is not None and tensor.dim() >= 2)
    left = next(matrices, None)
    return elements if left is None else elements * size_hint(left.shape[-1])
