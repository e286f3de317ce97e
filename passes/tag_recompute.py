"""Tag the forward nodes of recomputed blocks, so that the partitioner computes them again in backward.

The emitted IR is the same code with ``node.meta["recompute"]`` set. It is MUST_RECOMPUTE inside a block, and MUST_SAVE on what
other blocks read, because that is where recomputation starts. In a selectively recomputed block it also starts from what was
expensive, which is MUST_SAVE; the partitioner saves as much of that as backward needs. There MUST_RECOMPUTE stands only on what
backward needs, because the partitioner saves the arguments of everything with that tag. Where one result of several is kept,
such as a norm's, the node that makes them is kept with all its results. The partitioner heeds no tag on a single one. Random
seeds stay untagged: the partitioner saves them, so that dropout draws the same mask again. Reads of an input that forward
writes to are kept whatever the plan decides, because backward would find the new value there. Checkpointing of the user's has
tags too, whose regions are numbered otherwise than blocks: none is left in a block that the plan recomputes.
"""

import operator
from collections.abc import Collection, Mapping

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autohete_fx.graph import annotations
from autohete_fx.graph.draws import makes_seeds
from autohete_fx.graph.recompute import is_kept
from autohete_fx.graph.saved import is_copy, is_view, storage_root, written_inputs
from autohete_fx.ir import Activations
from autohete_fx.passes.base import PassContext


def tag_recompute(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Tags only blocks that the plan recomputes, and the inputs of those blocks."""
    from_backward = _depends_on_tangents(gm)
    forward = {
        node: block
        for node in gm.graph.nodes
        if node.op == "call_function" and node not in from_backward and not makes_seeds(node)
        if (block := annotations.block_of(node)) is not None
    }
    written = written_inputs(gm)
    kept: set[fx.Node] = set()
    for node, block in forward.items():
        decision = context.decision(block)
        if (
            _is_read_by_recomputed(node, block, context, forward)
            or (decision.recomputes and is_kept(node, decision.activations))
            or _reads_any(node, written)
        ):
            kept |= _results_made_with(node)
    needed = _needed_in_backward(from_backward, forward, kept)
    for node, block in forward.items():
        activations = context.decision(block).activations
        if node in kept:
            _tag(node, CheckpointPolicy.MUST_SAVE, block)
        elif activations is Activations.RECOMPUTE or (activations.recomputes and node in needed):
            _tag(node, CheckpointPolicy.MUST_RECOMPUTE, block)
        elif activations.recomputes:
            node.meta.pop("recompute", None)
    return gm


def _tag(node: fx.Node, policy: CheckpointPolicy, block: int) -> None:
    node.meta["recompute"] = policy
    # Ids rise with execution order: the partitioner keeps what a later region reads of an earlier one.
    node.meta["ac_graph_id"] = block


def _is_read_by_recomputed(node: fx.Node, block: int, context: PassContext, forward: Mapping[fx.Node, int]) -> bool:
    """Whether recomputation of another block, or of this block's readers, would start from this value."""
    if is_view(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    others = {forward[user] for user in _users_through_views(node) if user in forward} - {block}
    return any(context.decision(b).recomputes for b in (others | {block} if others else ()))


def _needed_in_backward(
    from_backward: set[fx.Node], forward: Mapping[fx.Node, int], kept: set[fx.Node]
) -> set[fx.Node]:
    """Forward nodes that have to run again, each in its own block, if only ``kept`` values are saved."""
    pending = [source for node in from_backward for source in node.all_input_nodes]
    needed: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in forward and node not in kept and node not in needed:
            needed.add(node)
            pending.extend(source for source in node.all_input_nodes if forward.get(source) == forward[node])
    return needed


def _results_made_with(node: fx.Node) -> set[fx.Node]:
    """The node; where it makes several results or takes one of them, the node that makes them, and all that it makes."""
    maker = node.all_input_nodes[0] if node.target is operator.getitem else node
    return {maker, *(user for user in maker.users if user.target is operator.getitem)}


def _reads_any(node: fx.Node, inputs: Collection[fx.Node]) -> bool:
    """Whether the node's own value is made from that of one of the inputs, be it through views."""
    is_made = not (is_view(node) or is_copy(node))
    return is_made and any(storage_root(source) in inputs for source in node.all_input_nodes)


def _users_through_views(node: fx.Node) -> list[fx.Node]:
    users: list[fx.Node] = []
    for user in node.users:
        users.extend(_users_through_views(user) if is_view(user) else [user])
    return users


def _depends_on_tangents(gm: fx.GraphModule) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if "tangents" in str(node.target):
                found.add(node)
        elif node.op != "output" and any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found
