"""Forward, backward and inference: fetch parameters that live in host memory, ahead of each block that reads them.

Emitted IR for a weight that block b reads::

    prefetch_w = autohete.prefetch(w, session, ...)         # issued prefetch_distance blocks ahead
    ...
    wait_w = autohete.wait(prefetch_w, w, session)          # before block b
    permute_w = aten.permute(wait_w, [1, 0])                # views of the weight are taken of the copy
    mm = aten.mm(x, permute_w)                              # the copy is freed after its last use in block b

A weight read by several blocks is fetched for each. Outputs keep reading the parameter itself, because a saved copy lives on
the device until backward. That is what ``keeps_fetched`` is for: forward then saves the copy in the parameter's place, and
backward, whose placeholder ``w`` now arrives on the device, has nothing to insert::

    return [..., wait_w, ...]                               # forward of a block that keeps what it fetched
    grad_x = aten.mm(grad, w)                               # backward; the copy is freed after its last use
"""

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.graph.saved import is_view
from autohete_fx.ir import Params
from autohete_fx.passes.base import PassContext, Stage, insert_copy


def prefetch_parameters(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Uses of host parameters read a fetched copy."""
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"]:
        owner = context.owners.get(node.name)
        arrives_fetched = context.stage is Stage.BACKWARD and node.name in context.kept
        if owner is not None and context.decision(owner).params is Params.HOST and not arrives_fetched:
            _fetch_per_region(gm, node, owner, context)
    return gm


def select_kept(backward: fx.GraphModule, context: PassContext) -> frozenset[str]:
    """Names of the placeholders of backward, parameters and views of parameters, whose copies stay from forward.

    Left out: what backward does not read, and what another block than the parameter's owner is the last to read there,
    because the owner keeps its copy until its own backward. ``context`` is that of backward.
    """
    kept = set()
    for node in backward.graph.nodes:
        owner = context.owners.get(node.name) if node.op == "placeholder" else None
        if owner is None or not context.decision(owner).keeps_fetched:
            continue
        regions = [region_of(user, owner, context) for _, user in readers_of(node) if user.op != "output"]
        if regions and max(regions) == context.region(owner):
            kept.add(node.name)
    return frozenset(kept)


def _fetch_per_region(gm: fx.GraphModule, param: fx.Node, owner: int, context: PassContext) -> None:
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    chains = sorted(readers_of(param), key=lambda chain: order[chain[1]])  # views stand before who reads them first
    by_region: dict[int, list[tuple[tuple[fx.Node, ...], fx.Node]]] = {}
    for views, user in chains:
        if user.op != "output" or (views[-1] if views else param).name in context.kept:
            by_region.setdefault(region_of(user, owner, context), []).append((views, user))
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
            _replace_use(user, source, clones[source], context)
    for views, _ in chains:
        for view in reversed(views):
            if not view.users and not view._erased:
                gm.graph.erase_node(view)


def region_of(user: fx.Node, owner: int, context: PassContext) -> int:
    """Where a reader of a parameter stands; one without a block, such as the output, counts as its owner's."""
    block = annotations.block_of(user)
    return context.region(owner if block is None else block)


def _replace_use(user: fx.Node, source: fx.Node, copy: fx.Node, context: PassContext) -> None:
    """Read the copy instead; of outputs, only those that are saved."""
    if user.op != "output":
        user.replace_input_with(source, copy)
        return
    outputs = list(user.args[0])  # type: ignore[arg-type]  # AOTAutograd's graphs return one flat tuple
    saved = [copy if node is source else node for node in outputs[context.num_outputs :]]
    user.args = ((*outputs[: context.num_outputs], *saved),)


def _clone(gm: fx.GraphModule, view: fx.Node, clones: dict[fx.Node, fx.Node], user: fx.Node) -> fx.Node:
    with gm.graph.inserting_before(user):
        return gm.graph.node_copy(view, lambda node: clones.get(node, node))


def readers_of(node: fx.Node, views: tuple[fx.Node, ...] = ()) -> list[tuple[tuple[fx.Node, ...], fx.Node]]:
    """Each reader of a value with the chain of views that leads to it. Copies that we inserted do not count."""
    found: list[tuple[tuple[fx.Node, ...], fx.Node]] = []
    for user in list(node.users):
        if is_view(user) and annotations.inserted(user) is None:
            found.extend(readers_of(user, (*views, user)))
        elif annotations.inserted(user) is None:
            found.append((views, user))
    return found
