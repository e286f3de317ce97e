"""Order a graph by regions, so that inserted nodes stand in their slots and recomputation stands where it is needed.

A region is one block's part of a graph. Within a region come first copies down and reduces of its slot and waits for them,
which let go of memory. Then come copies up and gathers, which take some, and waits for what it reads. Its own nodes follow in
the order that they had. Dependencies always win over this order: what an earlier region reads stands there, whichever block it
is of. Draws of random numbers keep their order, or each would draw another's.

::

    prefetch_w2 = autohete.prefetch(w2, ...)     # slot 0: for region 1
    mm_1 = ...                                   # region 0
    prefetch_w3 = autohete.prefetch(w3, ...)     # slot 1: for region 2
    wait_w2 = autohete.wait(prefetch_w2, ...)    # region 1 reads it
    mm_2 = aten.mm(mm_1, wait_w2)                # region 1
"""

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.graph.collectives import COLLECTIVES, ISSUING_GATHERS
from autohete_fx.graph.draws import draws
from autohete_fx.graph.saved import is_view
from autohete_fx.passes.base import PassContext

COMPUTED = 3
"""The rank within a region of what no pass has inserted."""
_RANKS = {ops.prefetch: 0, ops.reload: 0, **dict.fromkeys(ISSUING_GATHERS, 1)}
"""Ranks of what is issued before a region begins; all else lets go of memory, and comes first."""


def sort_regions(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Reorder nodes by region; a graph without inserted nodes, recomputation or collectives is left as it is."""
    if is_ordered(gm.graph, context):
        is_sorted = reorder(gm.graph, region_keys(gm.graph, context), order_to_keep(gm.graph))
        assert is_sorted, "an update starts before something that it depends on"
    return gm


def is_ordered(graph: fx.Graph, context: PassContext) -> bool:
    """Whether it matters where nodes stand: copies, recomputation, or collectives, which all ranks run in one order."""
    return context.recomputes or any(
        annotations.inserted(node) is not None or node.target in COLLECTIVES for node in graph.nodes
    )


def order_to_keep(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that must stand before a node though it reads nothing of them.

    Before the start of an update it is all that reads the parameter's memory; before what draws random numbers, what draws
    before it.
    """
    found = {later: [earlier] for earlier, later in _consecutive_draws(graph)}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ops.start_update:
            params: Any = node.args[1]
            found[node] = [reader for param in params for reader in readers_of_memory(param) if reader is not node]
    return found


def _consecutive_draws(graph: fx.Graph) -> Iterable[tuple[fx.Node, fx.Node]]:
    return itertools.pairwise(filter(draws, graph.nodes))


def readers_of_memory(node: fx.Node) -> list[fx.Node]:
    """Everything that reads what a node's result lies in, views of it and what reads those."""
    found = []
    for user in node.users:
        found.append(user)
        if is_view(user):
            found.extend(readers_of_memory(user))
    return found


def region_keys(graph: fx.Graph, context: PassContext) -> dict[fx.Node, tuple[int, int]]:
    """Per node (region, rank within it).

    Rank -1 has copies down, waits for them and what stands between, 0 copies up, 1 gathers, 2 waits for both, 3 everything
    else.

    A draw of random numbers is of no region before that of the draw before it. Seeds are of the prologue, but attention of the
    first block may draw before they are made.
    """
    keys: dict[fx.Node, tuple[int, int]] = {}
    for node in graph.nodes:
        note, block = annotations.inserted(node), annotations.block_of(node)
        if note is not None:
            keys[node] = (note.slot, _RANKS.get(node.target, -1) if note.before_slot else 2)
        elif block is not None:
            keys[node] = (context.region(block), COMPUTED)
        else:
            keys[node] = (max((keys[n][0] for n in node.all_input_nodes if n.op != "placeholder"), default=0), COMPUTED)
    for earlier, later in _consecutive_draws(graph):
        keys[later] = max(keys[later], keys[earlier])
    return keys


def regions_of(graph: fx.Graph, keys: Mapping[fx.Node, tuple[int, int]]) -> dict[fx.Node, int]:
    """The region that each node stands in: its own, or an earlier one that reads it."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    needed = {node: [n for n in node.all_input_nodes if n.op != "placeholder"] for node in nodes}
    return {node: region for node, (region, _) in _least_of_users(nodes, keys, needed).items()}


def reorder(
    graph: fx.Graph, keys: Mapping[fx.Node, tuple[int, int]], extra: Mapping[fx.Node, Iterable[fx.Node]]
) -> bool:
    """Stable topological sort by key under data and ``extra`` dependencies. False, and no change, on a cycle.

    The arguments of a node are sorted by that node's key where it is smaller. Else all that is ready in between would come
    before the node, as if the regions were one.
    """
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    position = {node: i for i, node in enumerate(nodes)}
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    needed = {node: {n for n in (*node.all_input_nodes, *extra.get(node, ())) if n in position} for node in nodes}
    for node in nodes:
        for other in needed[node]:
            users[other].append(node)
    missing = {node: len(needed[node]) for node in nodes}
    keys = _least_of_users(nodes, keys, needed)
    ready = [(*keys[n], position[n]) for n in nodes if not missing[n]]
    heapq.heapify(ready)
    order = []
    while ready:
        node = nodes[heapq.heappop(ready)[-1]]
        order.append(node)
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (*keys[user], position[user]))
    if len(order) != len(nodes):
        return False
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    for node in order:
        output.prepend(node)
    return True


def _least_of_users(
    nodes: Sequence[fx.Node], keys: Mapping[fx.Node, tuple[int, int]], needed: Mapping[fx.Node, Iterable[fx.Node]]
) -> dict[fx.Node, tuple[int, int]]:
    """Every node's key, or a smaller one of what depends on it."""
    found = {node: keys[node] for node in nodes}
    pending = list(nodes)
    while pending:
        node = pending.pop()
        for source in needed[node]:
            if found[node] < found[source]:
                found[source] = found[node]
                pending.append(source)
    return found
