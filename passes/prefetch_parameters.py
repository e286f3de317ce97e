"""Forward, backward and inference: fetch parameters that live in host memory, ahead of each block that reads them.

Emitted IR for a weight that block b reads::

    prefetch_w = autohete.prefetch(w, session, ...)         # issued prefetch_distance blocks ahead
    ...
    wait_w = autohete.wait(prefetch_w, w, session)          # before block b
    permute_w = aten.permute(wait_w, [1, 0])                # views of the weight are taken of the copy
    mm = aten.mm(x, permute_w)                              # the copy is freed after its last use in block b

A weight read by several blocks is fetched for each. Outputs keep reading the parameter itself, because a saved copy lives on
the device until backward. That is what ``keeps_fetched`` is for. Forward then saves the copy in the parameter's place.
Backward, whose placeholder ``w`` now arrives on the device, has nothing to insert::

    return [..., wait_w, ...]                               # forward of a block that keeps what it fetched
    grad_x = aten.mm(grad, w)                               # backward; the copy is freed after its last use
"""

from torch import fx

from autohete_fx.graph import ops
from autohete_fx.graph.readers import readers_of
from autohete_fx.ir import Params
from autohete_fx.passes.base import PassContext, Stage, insert_copy
from autohete_fx.passes.readers import erase_unread_views, read_copy, region_of, uses_by_region


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

    Left out: what backward does not read, and what another block than the parameter's owner is the last to read there. The
    owner keeps its copy until its own backward. ``context`` is that of backward.
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
    distance = context.decision(owner).prefetch_distance
    by_region = uses_by_region(gm, param, owner, context)
    for region, uses in by_region.items():
        read = [use for use in uses if use[1].op != "output" or (use[0][-1] if use[0] else param).name in context.kept]
        if not read:
            continue
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
        read_copy(gm, param, copy, read, block, num_outputs=context.num_outputs)
    for uses in by_region.values():
        erase_unread_views(gm, uses)
