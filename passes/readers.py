"""The readers of a value by region, for passes that give each region a copy of its own.

In: a node whose value several blocks may read, through views. Out: its readers, by region, and the graph with a region's readers on
a copy, views taken of the copy.
"""

from torch import fx

from autohete_fx.graph import annotations
from autohete_fx.graph.collectives import ISSUING_COLLECTIVES, WAITS
from autohete_fx.graph.readers import Use, readers_of
from autohete_fx.passes.base import PassContext


def region_of(user: fx.Node, owner: int, context: PassContext) -> int:
    """Where a reader of a parameter stands; one without a block, such as the output, counts as its owner's. All that reads for a
    collective stands where that is issued."""
    if user.target in WAITS:
        user = user.all_input_nodes[0]
    if user.target in ISSUING_COLLECTIVES:
        note = annotations.inserted(user)
        assert note is not None
        return note.slot
    block = annotations.block_of(user)
    return context.region(owner if block is None else block)


def uses_by_region(gm: fx.GraphModule, node: fx.Node, owner: int, context: PassContext) -> dict[int, list[Use]]:
    """Readers by region, in ascending order; of a region in the order of the graph."""
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    by_region: dict[int, list[Use]] = {}
    for views, user in sorted(
        readers_of(node), key=lambda use: order[use[1]]
    ):  # views stand before who reads them first
        by_region.setdefault(region_of(user, owner, context), []).append((views, user))
    return dict(sorted(by_region.items()))


def read_copy(
    gm: fx.GraphModule, node: fx.Node, copy: fx.Node, uses: list[Use], block: int, *, num_outputs: int | None = None
) -> None:
    """Let readers read a copy of a node.

    Args:
        block: that the new views belong to.
        num_outputs: the leading outputs of the graph that go on reading the node itself; None: all do, of the copy none.
    """
    clones: dict[fx.Node, fx.Node] = {node: copy}
    for views, user in uses:
        for view in views:
            if view not in clones:
                clones[view] = _clone(gm, view, clones, user)
                annotations.set_block(clones[view], block)
        source = views[-1] if views else node
        if user.op != "output":
            user.replace_input_with(source, clones[source])
        elif num_outputs is not None:
            outputs = list(user.args[0])  # type: ignore[arg-type]  # AOTAutograd's graphs return one flat tuple
            saved = [clones[source] if output is source else output for output in outputs[num_outputs:]]
            user.args = ((*outputs[:num_outputs], *saved),)


def erase_unread_views(gm: fx.GraphModule, uses: list[Use]) -> None:
    """Take out the views that lead to nobody any more."""
    for views, _ in uses:
        for view in reversed(views):
            if not view.users and not view._erased:
                gm.graph.erase_node(view)


def _clone(gm: fx.GraphModule, view: fx.Node, clones: dict[fx.Node, fx.Node], user: fx.Node) -> fx.Node:
    with gm.graph.inserting_before(user):
        return gm.graph.node_copy(view, lambda node: clones.get(node, node))
