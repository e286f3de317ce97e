"""The nodes that a graph's order hangs on: matrix products and collectives, which the compiler leaves as kernels of their own.

In: a graph whose nodes have blocks, and the region of each node. Out: the first and the last product of each region.
"""

from collections.abc import Mapping

import torch
from torch import fx

from autohete_fx.graph import annotations
from autohete_fx.graph.collectives import COLLECTIVES
from autohete_fx.internals.operators import OpOverload

_ANCHOR_WORDS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "attention", "linear", "grouped_mm")


def is_anchor(node: fx.Node) -> bool:
    """Whether the node is a matrix product, a collective or another kernel that Inductor never fuses away.

    One without a block may be: on a GPU Inductor replaces an ``addmm`` by a product of its own making and a sum.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if node.target in COLLECTIVES:
        return annotations.block_of(node) is not None
    if annotations.block_of(node) is None and all(n.op == "placeholder" for n in node.all_input_nodes):
        return False  # nothing tells its region
    name = node.target._schema.name.split("::")[1].strip("_")
    return any(
        name == word or name.endswith("_" + word) or (word in ("attention", "linear") and word in name)
        for word in _ANCHOR_WORDS
    )


def anchors_by_region(graph: fx.Graph, regions: Mapping[fx.Node, int]) -> list[tuple[int, fx.Node, fx.Node]]:
    """(region, first anchor, last anchor), in order, for regions that have one."""
    found: dict[int, tuple[fx.Node, fx.Node]] = {}
    for node in graph.nodes:
        if is_anchor(node):
            region = regions[node]
            first = found[region][0] if region in found else node
            found[region] = (first, node)
    return [(region, *found[region]) for region in sorted(found)]
