"""Backward: send gradients to their home in host memory, where the optimizer of the block runs.

Emitted IR, where the graph returned ``mm_7`` as the gradient of a weight::

    mm_7 = ...                                              # block b
    offload_mm_7 = autohete.offload(mm_7, session, ...)     # issued before block b-1
    ...                                                     # prefetch_distance blocks
    wait_mm_7 = autohete.wait(offload_mm_7, mm_7, session)  # its device memory is free; the home becomes `.grad`
    return [..., wait_mm_7, ...]

Autograd keeps the home as ``.grad`` without a copy if its strides are the parameter's, so a gradient with other
strides is made contiguous first.
"""

import torch
from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.graph.saved import output_args
from autohete_fx.passes.base import PassContext, insert_copy, output_node, values_like


def offload_gradients(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Replace the gradients of blocks whose optimizer runs on the host by their copies there."""
    outputs = output_args(gm)
    for position, owner in enumerate(context.gradients):
        node = outputs[position]
        if owner is None or node is None or not context.decision(owner).updates_on_host:
            continue
        node = _with_strides(gm, node, context.gradient_strides[position])
        block = annotations.block_of(node)
        note = annotations.inserted(node)  # of a gradient that ranks have averaged
        produced = context.region(owner if block is None else block) if note is None else note.slot - 1
        outputs[position] = insert_copy(
            gm,
            ops.offload,
            node,
            context,
            what="gradient",
            block=owner,
            issue_slot=produced + 1,
            wait_slot=produced + 1 + context.decision(owner).prefetch_distance,
        )
    output_node(gm).args = (tuple(outputs),)
    return gm


def _with_strides(gm: fx.GraphModule, node: fx.Node, strides: tuple[int, ...] | None) -> fx.Node:
    value = node.meta["val"]
    if strides is None or tuple(value.stride()) == strides:
        return node
    if strides != ops.contiguous_stride(value.shape):
        return node  # not contiguous: autograd will copy it once more, which is exact
    with gm.graph.inserting_after(node):
        clone = gm.graph.call_function(
            torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
        )
    with values_like(value):
        clone.meta["val"] = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    block = annotations.block_of(node)
    if block is not None:
        annotations.set_block(clone, block)
    return clone
