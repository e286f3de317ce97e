"""The values that a forward graph saves for backward, by the memory that holds them, and which can leave for host memory.

In: a partitioned forward graph with fake ``meta["val"]``. Out: nodes of it. The profiler counts what can leave and the
passes move it: the rule stands here, below both, so that they mean the same tensors.
"""

import operator

import torch
from torch import fx

from autohete_fx.graph.collectives import WAITS, gather, wait_functional
from autohete_fx.graph.ops import SMALLEST_COPY_BYTES, is_dense
from autohete_fx.graph.sizes import num_bytes
from autohete_fx.internals.operators import OpOverload


def output_args(gm: fx.GraphModule) -> list[fx.Node | None]:
    """The flat outputs."""
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    return list(output.args[0])  # type: ignore[arg-type]  # AOTAutograd's graphs return one flat tuple


def is_view(node: fx.Node) -> bool:
    """Whether the node's result aliases its first argument without writing to it; of a split, so does each part."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    if node.target in (torch.ops.aten._unsafe_view.default, wait_functional):  # their schemas do not say so
        return True
    if not isinstance(node.target, OpOverload) or node.target in WAITS:
        return False
    returns = node.target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def storage_root(node: fx.Node) -> fx.Node:
    """The node whose storage this node's result lives in."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


_CONVERSIONS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


def gathered(graph: fx.Graph) -> set[fx.Node]:
    """The whole parameters that a graph gathers, and the same in another dtype or seen otherwise. No activation is among them, and
    backward can gather them again."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_again = node.op == "call_function" and (is_view(node) or node.target in _CONVERSIONS)
        if node.target is gather or (is_again and node.all_input_nodes[0] in found):
            found.add(node)
    return found


def written_inputs(joint: fx.GraphModule) -> list[fx.Node]:
    """Placeholders whose memory has another value after forward: written by a copy in the graph, or by AOTAutograd from an
    output. All that reads them in the graph means the value before that."""
    output = next(node for node in reversed(joint.graph.nodes) if node.op == "output")
    told = [each.mutated_input for each in output.meta.get("desc", ()) if hasattr(each, "mutated_input")]
    copied = {storage_root(node.all_input_nodes[0]) for node in joint.graph.nodes if is_copy(node)}
    placeholders = (node for node in joint.graph.nodes if node.op == "placeholder")
    return [node for node in placeholders if node in copied or node.meta.get("desc") in told]


def is_copy(node: fx.Node) -> bool:
    """Whether the node writes the final value of an input, which it is given first."""
    return node.target is torch.ops.aten.copy_.default


def saved_views(forward: fx.GraphModule, num_outputs: int) -> dict[fx.Node, list[fx.Node]]:
    """The saved outputs, those after the first ``num_outputs``, by the node whose storage they live in."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in output_args(forward)[num_outputs:]:
        if isinstance(node, fx.Node):
            found.setdefault(storage_root(node), []).append(node)
    return found


def offloadable(
    forward: fx.GraphModule, num_outputs: int, smallest_bytes: int = SMALLEST_COPY_BYTES
) -> tuple[fx.Node, ...]:
    """The saved storages that can leave for host memory, by the nodes that own them: largest first, ties in graph order.

    A storage leaves by a copy of each saved view of it; its device memory is free when all of them are on the host. Left on the
    device: what belongs to inputs, what the user gets too, what has gaps, views below ``smallest_bytes``, and whole parameters
    that were gathered. Storages whose views overlap stay, too, because their copies would be larger than what they free.
    """
    parameters = gathered(forward.graph)
    held = {storage_root(node) for node in output_args(forward)[:num_outputs] if isinstance(node, fx.Node)}
    found = [
        root
        for root, views in saved_views(forward, num_outputs).items()
        if root.op == "call_function" and root not in held | parameters and _can_leave(root, views, smallest_bytes)
    ]
    position = {node: place for place, node in enumerate(forward.graph.nodes)}
    return tuple(sorted(found, key=lambda root: (-num_bytes(root.meta["val"]), position[root])))


def _can_leave(root: fx.Node, views: list[fx.Node], smallest_bytes: int) -> bool:
    value = root.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(view.meta.get("val"), torch.Tensor) for view in views):
        return False
    if not is_dense(value.shape, value.stride()):
        return False
    copied = [num_bytes(view.meta["val"]) for view in views]
    return min(copied) >= smallest_bytes and sum(copied) <= num_bytes(value)
