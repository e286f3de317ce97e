"""All graphs: gather the shards that a block reads by one collective, which runs beside the block before it.

In, where block b reads two weights::

    gather_1 = autohete.gather(w1, 4, group)
    permute_1 = aten.permute(gather_1, [1, 0])
    mm_1 = aten.mm(x, permute_1)
    gather_2 = autohete.gather(w2, 4, group)

Out::

    gather_b = autohete.gather.issue([w1, w2], 4, group, session)           # before the block ahead of b
    ...
    whole_w1 = autohete.gather.wait(gather_b, w1, 0, 4, session)            # before block b
    permute_1 = aten.permute(whole_w1, [1, 0])
    mm_1 = aten.mm(x, permute_1)
    whole_w2 = autohete.gather.wait(gather_b, w2, 1, 4, session)

A shard that several blocks read is gathered for each, as tied embeddings are for the prologue and for the head. The whole does
not wait on the device for the second. Shards of one dtype make one collective. Runs before `prefetch_parameters`, so that
shards in host memory arrive ahead of their gather. A whole that a graph returns, or saves for a backward that keeps it, is the
copy of the owner's region. A block that replicates has the same nodes with ``_once`` in their names, in forward and in backward.
It gathers a shard that comes from host memory each time, by a collective of its own. Wholes are known by their shards' memory,
and a fetched copy is elsewhere each time, on each rank. Inference gathers by itself, and so do all graphs what they return: its
memory is the caller's.
"""

import torch
from torch import fx
from torch.fx.node import Argument

from autohete_fx.graph import annotations, collectives
from autohete_fx.graph.readers import Use
from autohete_fx.ir import Lane, Params
from autohete_fx.ir.decision import GATHER_DISTANCE
from autohete_fx.passes.base import PassContext, Stage, num_bytes, values_like
from autohete_fx.passes.readers import erase_unread_views, read_copy, uses_by_region

_Reads = dict[fx.Node, list[tuple[fx.Node, list[Use]]]]
"""By shard, the nodes that gather it, each with its readers."""


def gather_parameters(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """No-op for graphs without gathers."""
    wanted: dict[int, dict[tuple[Argument, ...], _Reads]] = {}  # by region, and by what can be one collective
    gathers = [node for node in gm.graph.nodes if node.target is collectives.gather]
    for node in gathers:
        shard, num_ranks, group = node.args
        block = annotations.block_of(node)
        for region, uses in uses_by_region(gm, node, 0 if block is None else block, context).items():
            kind = (shard.meta["val"].dtype, num_ranks, group, _may_stay(shard, context.region(region), context))
            wanted.setdefault(region, {}).setdefault(kind, {}).setdefault(shard, []).append((node, uses))
    for region, by_kind in reversed(wanted.items()):  # each goes before those of later regions
        for (_, num_ranks, group, may_stay), reads in reversed(by_kind.items()):
            _gather_together(gm, reads, (num_ranks, group, context.session), region, context, may_stay=bool(may_stay))
            for node, uses in (read for same in reads.values() for read in same):
                erase_unread_views(gm, uses)
                if not node.users:
                    gm.graph.erase_node(node)
    return gm


def _may_stay(shard: fx.Node, block: int, context: PassContext) -> bool:
    """Whether a whole that a block reads stays for later passes: it replicates, and the shard is a parameter on the device."""
    owner = context.owners.get(shard.name)
    is_at_home = shard.op == "placeholder" and (owner is None or context.decision(owner).params is not Params.HOST)
    return context.decision(block).replicates and context.stage is not Stage.INFERENCE and is_at_home


def _gather_together(
    gm: fx.GraphModule, reads: _Reads, ranks: tuple[Argument, ...], region: int, context: PassContext, *, may_stay: bool
) -> None:
    """One collective of all these shards, whose wholes the readers get."""
    block, shards = context.region(region), list(reads)  # `region` is its own inverse
    whole_bytes = sum(num_bytes(same[0][0]) for same in reads.values())
    note = annotations.Inserted(
        op="gather",
        what="parameter",
        block=block,
        slot=max(0, region - GATHER_DISTANCE),
        before_slot=True,
        num_bytes=whole_bytes,
        lane=Lane.NET,
        priority=0,
    )
    is_returned = any(user.op == "output" for same in reads.values() for _, uses in same for _, user in uses)
    issuing, waiting = (
        (collectives.issue_gather_once, collectives.wait_gather_once)
        if may_stay and not is_returned
        else (collectives.issue_gather, collectives.wait_gather)
    )
    issue = gm.graph.create_node(
        "call_function", issuing, (shards, *ranks), name=f"gather_{context.plan.labels[block]}"
    )
    last = next(node for node in reversed(gm.graph.nodes) if node.op == "placeholder" or node in shards)
    last.append(issue)
    with values_like(shards[0].meta["val"]):
        issue.meta["val"] = torch.empty((1,), dtype=torch.int64, device="cpu")
    annotations.set_inserted(issue, note)
    previous = issue
    for at, (shard, same) in enumerate(reads.items()):
        arguments = (issue, shard, at, ranks[0], ranks[2])
        whole = gm.graph.create_node("call_function", waiting, arguments, name=f"whole_{shard.name}")
        previous.append(whole)
        previous = whole
        whole.meta["val"] = same[0][0].meta["val"]
        annotations.set_inserted(
            whole,
            annotations.Inserted(
                op="wait",
                what="parameter",
                block=block,
                slot=region,
                before_slot=False,
                num_bytes=num_bytes(whole),
            ),
        )
        for node, uses in same:
            read_copy(gm, node, whole, uses, block, num_outputs=0)
