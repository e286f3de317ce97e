"""Backward: tell whoever waits for gradients of those of a block, before the next block's backward.

In, where the gradients of two weights of block b stay on the device::

    mm_7 = ...
    mm_9 = ...
    return [..., mm_7, ..., mm_9]

Out::

    announce_b = autohete.announce(mm_7, [mm_9], [3, 4])    # before block b-1; a view of mm_7
    return [..., announce_b, ..., mm_9]

The numbers are the parameters' edges in autograd's graph. Gradients that ranks average are told of when that is done. Those that
leave the device are not told of: a listener would bring them back. Nothing is inserted where nobody waits.

Autograd keeps a gradient without a copy where it knows of nobody else that has the tensor. The view therefore stands for its
gradient in all outputs. It is of one whose memory no other output views; a block without such a gradient is not told of.
"""

from collections import Counter

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.graph.saved import output_args, storage_root
from autohete_fx.passes.base import PassContext, num_bytes, output_node
from autohete_fx.passes.sort_regions import region_keys


def announce_gradients(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """No-op where the context has no edges of awaited gradients."""
    outputs = output_args(gm)
    keys = region_keys(gm.graph, context) if context.awaited_edges else {}
    together: dict[int, list[int]] = {}  # positions by slot
    for position, edge in enumerate(context.awaited_edges):
        node = outputs[position]
        if edge is None or node is None or node.op == "placeholder" or node.target is ops.wait:
            continue
        note = annotations.inserted(node)  # of a gradient that ranks have averaged
        slot = keys[node][0] + 1 if note is None else note.slot
        together.setdefault(slot, []).append(position)
    sharing = Counter(storage_root(node) for node in {*outputs} if node is not None)
    alone = {node for node in outputs if node is not None and sharing[storage_root(node)] == 1}
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    for slot, positions in together.items():
        positions.sort(key=lambda position: outputs[position] not in alone)
        grads = [node for position in positions if (node := outputs[position]) is not None]
        if grads[0] in alone:
            announce = _announce(gm, grads, slot, positions, order, context)
            outputs = [announce if node is grads[0] else node for node in outputs]
    output_node(gm).args = (tuple(outputs),)
    return gm


def _announce(
    gm: fx.GraphModule,
    grads: list[fx.Node],
    slot: int,
    positions: list[int],
    order: dict[fx.Node, int],
    context: PassContext,
) -> fx.Node:
    first, *others = grads
    last = max(grads, key=order.__getitem__)
    block = annotations.block_of(last)
    block = context.region(min(slot, context.num_blocks) - 1) if block is None else block
    edges = [context.awaited_edges[position] for position in positions]
    name = f"announce_{context.plan.labels[block]}"
    announce = gm.graph.create_node("call_function", ops.announce, (first, others, edges), name=name)
    last.append(announce)
    announce.meta["val"] = first.meta["val"]
    annotations.set_inserted(
        announce,
        annotations.Inserted(
            op="announce",
            what="gradient",
            block=block,
            slot=slot,
            before_slot=True,
            num_bytes=sum(map(num_bytes, grads)),
        ),
    )
    return announce
