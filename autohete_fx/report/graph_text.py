"""Graphs as text: the code that FX prints, with what each inserted node is for, and the list of transfers.

In: a rewritten graph. Out: text, and `ir.Transfer` values in schedule order.
"""

from torch import fx

from autohete_fx.graph import annotations, ops
from autohete_fx.graph.collectives import ISSUING_COLLECTIVES, exchanged_bytes, starts_functional, wait_functional
from autohete_fx.ir import Lane, Transfer
from autohete_fx.ir.sizes import format_bytes


def graph_text(gm: fx.GraphModule) -> str:
    """One line a node; a comment says the block, and for inserted nodes what, lane, priority and bytes."""
    lines = []
    for node in gm.graph.nodes:
        line = _assignment(node)
        if note := _comment(node):
            line = f"{line:<100}  # {note}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _assignment(node: fx.Node) -> str:
    kind = _type(node)
    if node.op == "placeholder":
        return f"{node.name}: {kind} = input"
    if node.op == "output":
        return f"return {node.args[0]}"
    target = str(node.target) if not callable(node.target) else getattr(node.target, "__qualname__", str(node.target))
    name = str(node.target) if hasattr(node.target, "_schema") else target
    arguments = [repr(a) if isinstance(a, str) else str(a) for a in node.args]
    arguments += [f"{key}={value}" for key, value in node.kwargs.items()]
    return f"{node.name}: {kind} = {name}({', '.join(arguments)})"


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if value is None or not hasattr(value, "dtype"):
        return type(value).__name__ if value is not None else "Any"
    shape = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"


def _comment(node: fx.Node) -> str:
    note, block = annotations.inserted(node), annotations.block_of(node)
    if note is None:
        found = "" if block is None else f"block {block}"
        if not starts_functional(node.target):
            return found
        return ", ".join(
            filter(None, [found, f"collective, lane {Lane.NET.value}, {format_bytes(exchanged_bytes(node))}"])
        )
    parts = [f"block {note.block}", note.what]
    if note.lane is not None:
        parts += [f"lane {note.lane.value}", f"priority {note.priority}"]
    return ", ".join([*parts, format_bytes(note.num_bytes)])


def _functional(node: fx.Node, graph: str, number: int, previous: str) -> Transfer:
    """A collective of the program's own, which stands where the program has it."""
    waits = [user for user in node.users if user.target is wait_functional]
    needed = [reader.name for wait in waits for reader in wait.users]
    return Transfer(
        graph=graph,
        node=node.name,
        op=str(node.target).split(".")[1],
        block=annotations.block_of(node) or 0,
        lane=Lane.NET,
        priority=number,
        num_bytes=exchanged_bytes(node),
        waits_on=previous,
        needed_by=needed[0] if needed else next((wait.name for wait in waits), "output"),
    )


def list_transfers(gm: fx.GraphModule, graph: str) -> tuple[Transfer, ...]:
    """The copies and collectives of one graph, in the order in which they are issued."""
    found, previous, num_functional = [], "", 0
    for node in gm.graph.nodes:
        note = annotations.inserted(node)
        if starts_functional(node.target):
            found.append(_functional(node, graph, num_functional, previous))
            num_functional += 1
        if note is None or node.target not in (*ops.ISSUING_OPS, *ISSUING_COLLECTIVES):
            previous = node.name if node.op == "call_function" and note is None else previous
            continue
        assert note.lane is not None and note.priority is not None
        waits = list(node.users) if node.target in ISSUING_COLLECTIVES else [ops.wait_of(node)]
        needed = [user for user in gm.graph.nodes if any(user in wait.users for wait in waits)]
        found.append(
            Transfer(
                graph=graph,
                node=node.name,
                op=note.op,
                block=note.block,
                lane=note.lane,
                priority=note.priority,
                num_bytes=note.num_bytes,
                waits_on=previous,
                needed_by=needed[0].name if needed else waits[0].name,
            )
        )
    return tuple(found)
