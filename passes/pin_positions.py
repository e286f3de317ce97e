"""Last before code generation: make the compiler keep inserted nodes where they stand.

Inductor moves nodes: it would sink a prefetch to just before its use and hoist recomputation. Every inserted node is
therefore tied to the matrix products around its slot, and the products of consecutive regions to each other, so that
regions stay in order. Only products are anchors: an anchor's inputs and output become real buffers, which they are for
products anyhow. An inserted node names its anchor in the argument ``after``; a product gets control dependencies,
which wrap it into a graph of its own and are therefore few.

Of the nodes between two products, those that issue a copy, or wait for what the next region reads, name the last copy issued
there before them, if there is one, instead of the product. Else the compiler could put a wait ahead of a copy, and a GPU does not
begin a copy before the waits ahead of it are over. To be named keeps no more alive than the copy's handle, of eight bytes. Waits
that let go of memory stay tied to the product alone: they come as soon as they may.

Emitted IR::

    offload_gelu = autohete.offload(gelu, session, lane, priority, mm_1)
    prefetch_w3 = autohete.prefetch(w3, session, lane, priority, offload_gelu)
    wait_w2 = autohete.wait(prefetch_w2, w2, session, prefetch_w3)
    mm_2 = control_deps((mm_1, offload_gelu, prefetch_w3), <mm>, x, wait_w2)   # after mm_1 and after the copies were issued
"""

import itertools
import logging

import torch
from torch import fx
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

from autohete_fx import annotations, ops
from autohete_fx.passes.base import PassContext
from autohete_fx.passes.sort_regions import order_to_keep, region_keys, reorder

log = logging.getLogger(__name__)

_ANCHOR_WORDS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "attention", "linear", "grouped_mm")


def pin_positions(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Add control dependencies for inserted nodes and recomputed regions; no-op for graphs that have neither."""
    graph = gm.graph
    inserted = [n for n in graph.nodes if annotations.inserted(n) is not None]
    if not inserted and not context.recomputes:
        return gm
    keys = region_keys(graph, context)
    anchors = _anchors_by_region(graph, keys)
    wanted = _dependencies(inserted, keys, anchors)
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


def is_anchor(node: fx.Node) -> bool:
    """Whether the node is a matrix product or another kernel that Inductor never fuses away.

    One without a block may be: on a GPU Inductor replaces an ``addmm`` by a product of its own making and a sum.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if annotations.block_of(node) is None and all(n.op == "placeholder" for n in node.all_input_nodes):
        return False  # nothing tells its region
    name = node.target._schema.name.split("::")[1].strip("_")
    return any(
        name == word or name.endswith("_" + word) or (word in ("attention", "linear") and word in name)
        for word in _ANCHOR_WORDS
    )


def _anchors_by_region(graph: fx.Graph, keys: dict[fx.Node, tuple[int, int]]) -> list[tuple[int, fx.Node, fx.Node]]:
    """(region, first anchor, last anchor), in order, for regions that have one."""
    found: dict[int, tuple[fx.Node, fx.Node]] = {}
    for node in graph.nodes:
        if is_anchor(node):
            region = keys[node][0]
            first = found[region][0] if region in found else node
            found[region] = (first, node)
    return [(region, *found[region]) for region in sorted(found)]


def _dependencies(
    inserted: list[fx.Node], keys: dict[fx.Node, tuple[int, int]], anchors: list[tuple[int, fx.Node, fx.Node]]
) -> dict[fx.Node, list[fx.Node]]:
    wanted: dict[fx.Node, list[fx.Node]] = {}
    for (_, _, last), (_, first, _) in itertools.pairwise(anchors):
        wanted.setdefault(first, []).append(last)
    for node in inserted:
        note = annotations.inserted(node)
        assert note is not None
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
        gives_handle = node.target not in (ops.wait, ops.wait_update)
        lets_go = note.before_slot and not gives_handle
        before = anchor if lets_go else handles.get(anchor, anchor)
        if before is not None:
            node.args = (*node.args, before)
        if gives_handle:
            handles[anchor] = node
