"""Last before code generation: make the compiler keep inserted nodes where they stand.

Inductor moves nodes: it would sink a prefetch to just before its use and hoist recomputation. Every inserted node is therefore
tied to the matrix products around its slot. The products of consecutive regions are tied to each other, so that regions stay in
order. Only products are anchors: an anchor's inputs and output become real buffers, which they are for products anyhow. An
inserted node names its anchor in the argument ``after``. A product gets control dependencies, which wrap it into a graph of its
own and are therefore few. In backward, recomputation and sums over several regions have a place too (`keep_apart`).

Nodes between two products that issue a copy, or wait for what the next region reads, name the last copy issued there before
them. If there is none, they name the product. Else the compiler could put a wait ahead of a copy. A GPU does not begin a copy
before the waits ahead of it are over. To be named keeps no more alive than the copy's handle, of eight bytes. Waits that let go
of memory stay tied to the product alone: they come as soon as they may.

Emitted IR::

    offload_gelu = autohete.offload(gelu, session, lane, priority, mm_1)
    prefetch_w3 = autohete.prefetch(w3, session, lane, priority, offload_gelu)
    wait_w2 = autohete.wait(prefetch_w2, w2, session, prefetch_w3)
    mm_2 = control_deps((mm_1, offload_gelu, prefetch_w3), <mm>, x, wait_w2)   # after mm_1 and after the copies were issued
"""

import itertools
import logging
from collections.abc import Mapping

import torch
from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.graph.collectives import WAITS
from autohete_fx.internals.inductor import preserve_node_ordering
from autohete_fx.internals.operators import OrderedSet
from autohete_fx.passes.anchors import anchors_by_region
from autohete_fx.passes.base import PassContext, Stage
from autohete_fx.passes.keep_apart import is_kernel, waits_for_regions
from autohete_fx.passes.sort_regions import is_ordered, order_to_keep, region_keys, regions_of, reorder

log = logging.getLogger(__name__)


def pin_positions(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Add control dependencies for inserted nodes and between regions; no-op for graphs without copies and recomputation."""
    graph = gm.graph
    if not _is_pinned(graph, context):
        return gm
    keys = region_keys(graph, context)
    regions = regions_of(graph, keys)
    anchors = anchors_by_region(graph, regions)
    wanted = _dependencies(graph, keys, anchors)
    if context.stage is Stage.BACKWARD:
        for node, earlier in waits_for_regions(graph, regions, anchors).items():
            start = _stored(graph, node)
            keys[start] = keys[node]
            wanted.setdefault(start, []).extend(earlier)
    kept = order_to_keep(graph)
    if not reorder(graph, keys, {n: [*wanted.get(n, ()), *kept.get(n, ())] for n in {**wanted, **kept}}):
        # A later pass moved work across blocks. The result stays exact; only the overlap is the compiler's choice.
        log.warning(
            "positions of copies could not be pinned, because a pass moved work between blocks: results are exact, but copies may"
            " not overlap with compute; take out passes at 'final', or of torch._inductor.config, that reorder nodes"
        )
        return gm
    _name_what_is_before(graph, wanted)
    order = {node: i for i, node in enumerate(graph.nodes)}
    pinned = {node: OrderedSet(wanted[node]) for node in sorted(wanted, key=order.__getitem__) if wanted[node]}
    preserve_node_ordering(graph, pinned)
    return gm


def pinned_after(gm: fx.GraphModule, context: PassContext) -> dict[str, tuple[str, ...]]:
    """For nodes of a backward graph that is not compiled yet, the nodes that pinning will have run before, by name. Inserted
    nodes are left out."""
    if context.stage is not Stage.BACKWARD or not _is_pinned(gm.graph, context):
        return {}
    return regions_apart(gm, context)


def regions_apart(gm: fx.GraphModule, context: PassContext) -> dict[str, tuple[str, ...]]:
    """Likewise as if the graph had copies."""
    regions = regions_of(gm.graph, region_keys(gm.graph, context))
    found = waits_for_regions(gm.graph, regions, anchors_by_region(gm.graph, regions))
    return {node.name: tuple(other.name for other in earlier) for node, earlier in found.items()}


def _is_pinned(graph: fx.Graph, context: PassContext) -> bool:
    return is_ordered(graph, context)


def _stored(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The node, if the compiler makes a kernel of it. Else a node that has its value stored, because only a kernel can wait."""
    strides = () if is_kernel(node) else node.meta["val"].stride()
    if is_kernel(node) or not all(isinstance(stride, int) for stride in strides):
        return node
    with graph.inserting_after(node):
        target = torch.ops.prims.inductor_force_stride_order.default
        stored = graph.create_node("call_function", target, (node, list(strides)), name=f"stored_{node.name}")
    stored.meta = dict(node.meta)
    node.replace_all_uses_with(stored, delete_user_cb=lambda user: user is not stored)
    return stored


def _dependencies(
    graph: fx.Graph, keys: Mapping[fx.Node, tuple[int, int]], anchors: list[tuple[int, fx.Node, fx.Node]]
) -> dict[fx.Node, list[fx.Node]]:
    """What must stand before the first anchor of each region, and before inserted nodes."""
    wanted: dict[fx.Node, list[fx.Node]] = {}
    for (_, _, last), (_, first, _) in itertools.pairwise(anchors):
        wanted.setdefault(first, []).append(last)
    for node in graph.nodes:
        note = annotations.inserted(node)
        if note is None:
            continue
        before = [last for region, _, last in anchors if region < note.slot]
        after = [first for region, first, _ in anchors if region >= note.slot]
        if before:
            wanted.setdefault(node, []).append(before[-1])
        if after and note.before_slot:
            wanted.setdefault(after[0], []).append(node)
    return wanted


def _name_what_is_before(graph: fx.Graph, wanted: dict[fx.Node, list[fx.Node]]) -> None:
    """Give inserted nodes their argument ``after``, and take them out of ``wanted``: the anchor, or where a copy has been issued
    since that anchor, the handle of the last one.

    The graph stands in an order that keeps all dependencies, and the handle before the node that names it: there is no cycle.
    """
    handles: dict[fx.Node | None, fx.Node] = {}  # the last so far, by anchor
    for node in graph.nodes:
        if (note := annotations.inserted(node)) is None:
            continue
        (anchor,) = wanted.pop(node, [None])
        gives_handle = node.target not in (ops.wait, ops.wait_update, ops.announce, *WAITS)
        lets_go = note.before_slot and not gives_handle
        before = anchor if lets_go else handles.get(anchor, anchor)
        if before is not None:
            node.args = (*node.args, before)
        if gives_handle:
            handles[anchor] = node
