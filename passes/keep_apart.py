"""The nodes that must wait for the region before them in a backward graph, lest the compiler merges the work of many regions.

In: a backward graph in the order of its regions, and the matrix products of each. Out: for nodes, the nodes that must stand
before them. The last pass makes control dependencies of these; the trace of a graph's memory reckons with them.

Two kinds of work have no place of their own. Recomputation starts from inputs of the graph, and nothing keeps it from running
at the very beginning. The norms of all calls of one layer would become one kernel, because they read the same weight. Its first
kernels therefore wait for the region before. A sum over the calls of a layer is read at the end alone. Its addends, such as the
reductions that make the gradients of biases, would become one late kernel, for which the activations of all calls stay. A
region therefore begins after all that the region before adds to such a sum. Where no weight is shared, there are no such sums.

::

    sum_1 = aten.sum.dim_IntList(grad_1, [0])    # region 0
    mm_1 = aten.mm.default(grad_1, w)            # region 0, its last product
    var_mean = aten.var_mean.correction(x, [1])  # region 1, recomputed from the saved x: after mm_1 and sum_1
    mm_2 = aten.mm.default(grad_2, w)            # region 1, its first product: after mm_1 and sum_1
    sum_2 = aten.sum.dim_IntList(grad_2, [0])    # region 1
    total = aten.add.Tensor(sum_1, sum_2)        # region 1: region 2 begins after it
"""

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autohete_fx.graph import annotations
from autohete_fx.graph.draws import draws
from autohete_fx.graph.saved import is_view, storage_root
from autohete_fx.internals.operators import OpOverload
from autohete_fx.passes.anchors import is_anchor

_ADDING = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default})
_CONVERT = torch.ops.prims.convert_element_type.default


def waits_for_regions(
    graph: fx.Graph, regions: Mapping[fx.Node, int], anchors: Sequence[tuple[int, fx.Node, fx.Node]]
) -> dict[fx.Node, list[fx.Node]]:
    """By node, what must stand before it beside its arguments.

    Args:
        graph: of a backward pass.
        regions: of its nodes; none is later than that of a node that reads it.
        anchors: (region, first anchor, last anchor), in order.
    """
    sums = _sums(graph, regions, [region for region, _, _ in anchors])
    ends = {region: list(dict.fromkeys([last, *sums[region]])) for region, _, last in anchors}
    starts = [*(first for _, first, _ in anchors), *_starts_of_recomputation(graph, regions)]
    found: dict[fx.Node, list[fx.Node]] = {}
    for start in dict.fromkeys(starts):
        earlier = [region for region in ends if region < regions[start]]
        if earlier:
            found[start] = ends[max(earlier)]
    return found


def _sums(graph: fx.Graph, regions: Mapping[fx.Node, int], ending: Sequence[int]) -> dict[int, list[fx.Node]]:
    """For each region that has an end: what it makes for sums over several regions, and how far it takes them. Those of regions
    without are with the next one that has."""
    found: dict[int, dict[fx.Node, None]] = {region: {} for region in ending}
    for node in reversed(_only_returned(graph)):
        parts = [part for part in node.all_input_nodes if _is_addend(part, node) and storage_root(part) in regions]
        for part in parts:
            if regions[part] < regions[node]:
                for made in (storage_root(part), node):
                    if (region := next((r for r in ending if r >= regions[made]), None)) is not None:
                        found[region][made] = None
    return {region: list(sums) for region, sums in found.items()}


def _only_returned(graph: fx.Graph) -> list[fx.Node]:
    """What the graph returns and does nothing else with but add to it, such as parts of gradients, the last first."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if node.op == "call_function" and all(
            user.op == "output"
            or annotations.inserted(user) is not None
            or (user in found and (is_view(user) or user.target is _CONVERT or _is_addend(node, user)))
            for user in node.users
        ):
            found[node] = None
    return list(found)


def _is_addend(part: fx.Node, total: fx.Node) -> bool:
    """Whether a node is a sum with this addend; factors of an ``addmm`` are none."""
    if total.target not in _ADDING or (total.target is not torch.ops.aten.add.Tensor and part is not total.args[0]):
        return False
    one, both = part.meta.get("val"), total.meta.get("val")
    return isinstance(one, torch.Tensor) and isinstance(both, torch.Tensor) and one.shape == both.shape


def _starts_of_recomputation(graph: fx.Graph, regions: Mapping[fx.Node, int]) -> list[fx.Node]:
    """The first kernels of what reads inputs of the graph alone.

    A value that the compiler stores for a product is a kernel too. It is one here only where it reads an input that such kernels
    of other regions read as well: with others it is never merged.
    """
    starts: list[fx.Node] = []
    stored: list[fx.Node] = []
    reads: dict[fx.Node, frozenset[fx.Node]] = {}  # inputs behind what no kernel has made
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or annotations.inserted(node) is not None:
            reads[node] = frozenset((node,))
        elif node in regions and all(source in reads for source in node.all_input_nodes):
            if is_kernel(node):
                starts.append(node)
            elif not draws(node):
                reads[node] = frozenset().union(*(reads[source] for source in node.all_input_nodes))
                if _is_stored(node):
                    stored.append(node)
    readers: dict[fx.Node, set[int]] = {}
    for node in stored:
        for source in reads[node]:
            readers.setdefault(source, set()).add(regions[node])
    shared = {source for source, found in readers.items() if len(found) > 1}
    return [*starts, *(node for node in stored if reads[node] & shared)]


def is_kernel(node: fx.Node) -> bool:
    """Whether the compiler makes a kernel of the node whoever reads it."""
    is_reduction = isinstance(node.target, OpOverload) and torch.Tag.reduction in node.target.tags
    return is_reduction or is_anchor(node)


def _is_stored(node: fx.Node) -> bool:
    """Whether a node that computes something is read by an anchor, which reads memory."""
    pending = [] if is_view(node) else list(node.users)
    while pending:
        user = pending.pop()
        if is_anchor(user):
            return True
        if is_view(user):
            pending.extend(user.users)
    return False
