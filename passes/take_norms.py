"""Backward: take the norm of each gradient that leaves the device, next to its copy, for a step that clips.

Emitted IR::

    offload_mm_7 = autohete.offload(mm_7, session, ...)
    take_norm_mm_7 = autohete.take_norm(offload_mm_7, mm_7, session)        # reads mm_7 once more, on the device
    wait_mm_7 = autohete.wait(take_norm_mm_7, mm_7, session)

PyTorch's own kernel takes it, not one that the compiler would make: the total is to be that of ``clip_grad_norm_``, bit by bit.
Nothing is inserted where the schedule takes no norms.
"""

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.passes.base import PassContext, num_bytes


def take_norms(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Behind the offload of every gradient, take its norm."""
    if not context.plan.schedule.takes_norms:
        return gm
    for offload in [node for node in gm.graph.nodes if node.target is ops.offload]:
        note = annotations.inserted(offload)
        if note is None or note.what != "gradient":
            continue
        (source, *_), (user,) = offload.all_input_nodes, offload.users
        arguments = (offload, source, context.session)
        take = gm.graph.create_node("call_function", ops.take_norm, arguments, name=f"take_norm_{source.name}")
        offload.append(take)
        user.replace_input_with(offload, take)
        take.meta["val"] = offload.meta["val"]
        annotations.set_inserted(
            take,
            annotations.Inserted(
                op="take_norm",
                what="gradient",
                block=note.block,
                slot=note.slot,
                before_slot=True,
                num_bytes=num_bytes(source),
            ),
        )
    return gm
