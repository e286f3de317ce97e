"""One reduce for a parameter that is read several times, such as tied embeddings: gradients are added before they are averaged.

In::

    reduce_1 = autohete.reduce(grad_1, 2, group)
    reduce_2 = autohete.reduce(grad_2, 2, group)
    add = aten.add(reduce_1, reduce_2)

Out::

    add = aten.add(grad_1, grad_2)
    reduce = autohete.reduce(add, 2, group)

That is one collective less, and the sum that one process takes: first over its own reads, then over batches.
"""

import torch
from torch import fx

from autohete_fx.graph import collectives
from autohete_fx.passes.base import PassContext, values_like


def merge_reduces(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """No-op for graphs in which nothing is read twice."""
    for node in list(gm.graph.nodes):
        if (
            node.op != "call_function"
            or node.target is not torch.ops.aten.add.Tensor
            or node.kwargs
            or len(node.args) != 2
        ):
            continue
        parts = node.all_input_nodes
        if len(parts) == 2 and all(p.target is collectives.reduce and len(p.users) == 1 for p in parts):
            first, second = parts
            if first.args[1:] == second.args[1:]:
                _merge(gm, node, first, second)
    return gm


def _merge(gm: fx.GraphModule, total: fx.Node, first: fx.Node, second: fx.Node) -> None:
    """Give the sum what the two reduces read, and put one reduce after it."""
    result, whole = total.meta["val"], first.all_input_nodes[0].meta["val"]
    total.args = (first.args[0], second.args[0])
    with values_like(result):
        total.meta["val"] = torch.empty_like(whole)
    with gm.graph.inserting_after(total):
        reduce = gm.graph.call_function(collectives.reduce, (total, *first.args[1:]))
    reduce.meta = {**total.meta, "val": result}
    total.replace_all_uses_with(reduce, delete_user_cb=lambda user: user is not reduce)
    for old in (first, second):
        gm.graph.erase_node(old)
