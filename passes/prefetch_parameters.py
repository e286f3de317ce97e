"""Forward, backward and inference: fetch parameters that live in host memory, ahead of each block that reads them.

Emitted IR for a weight that block b reads::

    prefetch_w = autohete.prefetch(w, session, ...)         # issued prefetch_distance blocks ahead
    ...
    wait_w = autohete.wait(prefetch_w, w, session)          # before block b
    permute_w = aten.permute(wait_w, [1, 0])                # views of the weight are taken of the copy
    mm = aten.mm(x, permute_w)                              # the copy is freed after its last use in block b

A weight read by several blocks is fetched for each. Outputs keep reading the parameter itself: a saved copy would
live on the device until backward.
"""

from torch import fx

from autohete_fx import annotations, ops
from autohete_fx.ir import Params
from autohete_fx.passes.base import PassContext, insert_copy, is_view


def prefetch_parameters(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Uses of host parameters read a fetched copy."""
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"]:
        owner = context.owners.get(node.name)
        if owner is not None and context.decision(owner).params is Params.HOST:
            _fetch_per_region(gm, node, owner, context)
    return gm


def _fetch_per_region(gm: fx.GraphModule, param: fx.Node, owner: int, context: PassContext) -> None:
    chains = _uses(param)
    by_region: dict[int, list[tuple[tuple[fx.Node, ...], fx.Node]]] = {}
    for views, user in chains:
        if user.op == "output":
            continue
        block = annotations.block_of(user)
        by_region.setdefault(context.region(owner if block is None else block), []).append((views, user))
    distance = context.decision(owner).prefetch_distance
    for region, uses in sorted(by_region.items()):
        copy = insert_copy(
            gm,
            ops.prefetch,
            param,
            context,
            what="parameter",
            block=owner,
            issue_slot=max(0, region - distance),
            wait_slot=region,
        )
        block = context.region(region)  # its own inverse
        clones: dict[fx.Node, fx.Node] = {param: copy}
        for views, user in uses:
            for view in views:
                if view not in clones:
                    clones[view] = _clone(gm, view, clones, user)
                    annotations.set_block(clones[view], block)
            source = views[-1] if views else param
            user.replace_input_with(source, clones[source])
    for views, _ in chains:
        for view in reversed(views):
            if not view.users and not view._erased:
                gm.graph.erase_node(view)


def _clone(gm: fx.GraphModule, view: fx.Node, clones: dict[fx.Node, fx.Node], user: fx.Node) -> fx.Node:
    with gm.graph.inserting_before(user):
        return gm.graph.node_copy(view, lambda node: clones.get(node, node))


def _uses(node: fx.Node, views: tuple[fx.Node, ...] = ()) -> list[tuple[tuple[fx.Node, ...], fx.Node]]:
    """Each reader of a value with the chain of views that leads to it. Copies that we inserted do not count."""
    found: list[tuple[tuple[fx.Node, ...], fx.Node]] = []
    for user in list(node.users):
        if is_view(user) and annotations.inserted(user) is None:
            found.extend(_uses(user, (*views, user)))
        elif annotations.inserted(user) is None:
            found.append((views, user))
    return found
