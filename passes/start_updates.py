"""Backward: start the update of a parameter on the host once its gradient has landed and nothing reads the parameter any more.

Emitted IR, for a weight that is the captured graph's tensor 3, counted from 0::

    mm_7 = ...                                                                      # block b: the gradient of w
    mm_8 = aten.mm(grad, w)                                                         # block b: the last to read w
    offload_mm_7 = autohete.offload(mm_7, session, ...)                             # before block b-1
    start_update_mm_7 = autohete.start_update(offload_mm_7, [w], session, 3, b)     # likewise; writes w
    wait_mm_7 = autohete.wait(start_update_mm_7, mm_7, session)

The list holds the placeholders over the parameter's memory: none where backward does not read it, two where it reads a saved
view too. A smaller priority is updated first: the next forward needs block 0 first. Nothing is inserted where the plan has
updates start at ``step()``, as where they wait for norms. Nor is it for a parameter that something reads after the wait for its
gradient. The wait would have to come later, and hold the gradient on the device.
"""

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.graph.saved import output_args
from autohete_fx.ir import Lane, Overlap
from autohete_fx.passes.base import PassContext, num_bytes
from autohete_fx.passes.sort_regions import readers_of_memory, region_keys


def start_updates(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """Between the offload of a gradient and its wait, start the update that takes it."""
    if context.plan.schedule.overlap is not Overlap.BACKWARD or context.plan.schedule.takes_norms:
        return gm
    keys = region_keys(gm.graph, context)
    for wait, edge in zip(output_args(gm), context.gradient_edges, strict=False):
        note = None if wait is None else annotations.inserted(wait)
        if wait is None or edge is None or note is None or wait.target is not ops.wait:
            continue
        params = [  # what arrives fetched is a copy
            node
            for node in gm.graph.nodes
            if node.op == "placeholder" and context.edges.get(node.name) == edge and node.name not in context.kept
        ]
        _start_update(gm, wait, edge, params, note, keys, context)
    return gm


def _start_update(
    gm: fx.GraphModule,
    wait: fx.Node,
    edge: int,
    params: list[fx.Node],
    note: annotations.Inserted,
    keys: dict[fx.Node, tuple[int, int]],
    context: PassContext,
) -> None:
    handle, source = wait.all_input_nodes[:2]
    issued = annotations.inserted(handle)
    assert issued is not None
    readers = [reader for param in params for reader in readers_of_memory(param)]
    if any(reader.op == "output" for reader in readers):
        return
    slot = max(issued.slot, *(keys[reader][0] + 1 for reader in readers), 0)
    if slot > note.slot:
        return
    priority = note.block if context.plan.schedule.priority else 0
    arguments = (handle, params, context.session, edge, priority)
    start = gm.graph.create_node("call_function", ops.start_update, arguments, name=f"start_update_{source.name}")
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    max([handle, *readers], key=order.__getitem__).append(start)
    if order[start.prev] > order[wait]:
        start.append(wait)
    wait.replace_input_with(handle, start)
    start.meta["val"] = handle.meta["val"]
    annotations.set_inserted(
        start,
        annotations.Inserted(
            op="start_update",
            what="parameter",
            block=note.block,
            slot=slot,
            before_slot=True,
            num_bytes=num_bytes(source),
            lane=Lane.UPDATE,
            priority=priority,
        ),
    )
