"""Backward: average the gradients of a block over ranks by one collective, which runs beside the block after it.

In, where the gradients of two weights of block b are whole::

    reduce_1 = autohete.reduce(mm_7, 4, group)
    reduce_2 = autohete.reduce(mm_9, 4, group)
    return [..., reduce_1, ..., reduce_2]

Out::

    reduce_b = autohete.reduce.issue([mm_7, mm_9], 4, group, session)       # before block b-1
    ...
    mine_mm_7 = autohete.reduce.wait(reduce_b, mm_7, 0, 4, session)         # before block b-2; the whole gradient is free
    mine_mm_9 = autohete.reduce.wait(reduce_b, mm_9, 1, 4, session)
    return [..., mine_mm_7, ..., mine_mm_9]

Gradients of one dtype make one collective. Runs before `offload_gradients`, which sends home what a rank is left with.
"""

import torch
from torch import fx
from torch.fx.node import Argument

from autohete_fx.graph import annotations, collectives
from autohete_fx.ir import Lane
from autohete_fx.ir.decision import GATHER_DISTANCE
from autohete_fx.passes.base import PassContext, num_bytes, values_like


def reduce_gradients(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """No-op for graphs without reduces."""
    together: dict[tuple[Argument, ...], list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.target is collectives.reduce:
            block = annotations.block_of(node)
            region = context.num_blocks - 1 if block is None else context.region(block)
            together.setdefault((region, node.meta["val"].dtype, *node.args[1:]), []).append(node)
    for (region, _, *ranks), nodes in together.items():
        assert isinstance(region, int)
        _reduce_together(gm, nodes, (*ranks, context.session), region, context)
    return gm


def _reduce_together(
    gm: fx.GraphModule, nodes: list[fx.Node], ranks: tuple[Argument, ...], region: int, context: PassContext
) -> None:
    """One collective in the place of these."""
    block, grads = context.region(region), [node.all_input_nodes[0] for node in nodes]  # `region` is its own inverse
    issue = gm.graph.create_node(
        "call_function", collectives.issue_reduce, (grads, *ranks), name=f"reduce_{context.plan.labels[block]}"
    )
    nodes[-1].append(issue)  # in the order of the graph
    with values_like(nodes[0].meta["val"]):
        issue.meta["val"] = torch.empty((1,), dtype=torch.int64, device="cpu")
    note = annotations.Inserted(
        op="reduce",
        what="gradient",
        block=block,
        slot=region + 1,
        before_slot=True,
        num_bytes=sum(num_bytes(grad) for grad in grads),
        lane=Lane.NET,
        priority=0,
    )
    annotations.set_inserted(issue, note)
    previous = issue
    for at, (node, grad) in enumerate(zip(nodes, grads, strict=True)):
        arguments = (issue, grad, at, ranks[0], ranks[2])
        mine = gm.graph.create_node("call_function", collectives.wait_reduce, arguments, name=f"mine_{grad.name}")
        previous.append(mine)
        previous = mine
        mine.meta["val"] = node.meta["val"]
        annotations.set_inserted(
            mine,
            annotations.Inserted(
                op="wait",
                what="gradient",
                block=block,
                slot=region + 1 + GATHER_DISTANCE,
                before_slot=True,
                num_bytes=num_bytes(mine),
            ),
        )
        node.replace_all_uses_with(mine)
        gm.graph.erase_node(node)
