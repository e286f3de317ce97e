"""Forward and inference: wait for parameters on the device whose updates run on the host, or stream their states.

``optimizer.step()`` may return before they are done. Emitted IR for a weight that block b is the first to read::

    wait_update_w = autohete.wait_update(w, session)        # before block b; a view of the weight, not a copy
    permute_w = aten.permute(wait_update_w, [1, 0])
    mm = aten.mm(x, permute_w)

Parameters that live in host memory need no such node: what prefetches them waits. Nothing is inserted where the plan has
updates done when ``step()`` returns.
"""

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.graph.readers import readers_of
from autohete_fx.ir import Lane, Optimizer, Overlap, Params
from autohete_fx.passes.base import PassContext, num_bytes, values_like
from autohete_fx.passes.readers import region_of


def await_updates(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Uses of updated parameters read a view that is taken when the update is done; outputs stay as they are."""
    if context.plan.schedule.overlap is Overlap.NONE:
        return gm
    for node in [n for n in gm.graph.nodes if n.op == "placeholder"]:
        owner = context.owners.get(node.name)
        if owner is None or node.name in context.staying:
            continue
        decision = context.decision(owner)
        if decision.optimizer is not Optimizer.DEVICE and decision.params is Params.DEVICE:
            _await_update(gm, node, owner, context)
    return gm


def _await_update(gm: fx.GraphModule, param: fx.Node, owner: int, context: PassContext) -> None:
    regions = [region_of(user, owner, context) for _, user in readers_of(param) if user.op != "output"]
    readers = [user for user in param.users if user.op != "output"]
    if not regions:
        return
    wait = gm.graph.create_node(
        "call_function", ops.wait_update, (param, context.session), name=f"wait_update_{param.name}"
    )
    param.append(wait)
    with values_like(param.meta["val"]):
        wait.meta["val"] = ops.wait_update(param.meta["val"], context.session)
    for user in readers:
        user.replace_input_with(param, wait)
    note = annotations.Inserted(
        op="wait_update",
        what="parameter",
        block=owner,
        slot=min(regions),
        before_slot=False,
        num_bytes=num_bytes(param),
        lane=Lane.UPDATE,
        priority=owner,
    )
    annotations.set_inserted(wait, note)
