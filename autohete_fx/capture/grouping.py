"""Transformer blocks of a captured graph.

In: AOTAutograd's joint forward and backward graph as a custom partitioner of Inductor gets it, or an inference graph,
and the names of its parameters. Out: a `BlockGraph`: every node but placeholders and the output in exactly one block,
blocks in execution order. Why: planning decides per block, and layers that are alike (equal digests) are measured once.

Layers come from the module stacks (`layers`), or from repeated structure where these are missing or show nothing (`structure`).
All other nodes are placed by dataflow (`assign`). A graph that repeats nothing is one block.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from autohete_fx.capture.assign import (
    BackwardAssignment,
    Parameters,
    SlotMap,
    Slots,
    assign_forward,
    check_order,
    find_parameters,
)
from autohete_fx.capture.dataflow import JointNodes, is_scalar, split_joint, storage_bytes, storage_owner
from autohete_fx.capture.digest import combine, group_digest
from autohete_fx.capture.layers import Layer, module_layers
from autohete_fx.capture.paths import dotted, module_stack, scopes
from autohete_fx.capture.structure import repeated_structure
from autohete_fx.internals.operators import tree_leaves
from autohete_fx.ir import Block, BlockGraph, BlockKind, Edge

_WHOLE = "whole"
_NAME_OF_WHOLE = "graph"
"""The name of the one block of a graph that repeats nothing, where its parameters have no module of their own below the
outermost.
"""


def group_blocks(joint: fx.GraphModule, param_fqns: Mapping[str, str]) -> BlockGraph:
    """Group a graph's nodes into blocks.

    Args:
        joint: a joint graph, or an inference graph (no tangents). Not changed.
        param_fqns: placeholder name to parameter name, such as ``{"primals_1": "model.layers.0.q.weight"}``.

    Returns:
        Blocks in execution order, at least one unless the graph computes nothing.
    """
    nodes = split_joint(joint)
    parameters = find_parameters(nodes, param_fqns)
    layers = module_layers(nodes)
    if layers:
        slots = Slots(tuple(layer.stack for layer in layers))
        slot_of = _assign(nodes, slots, _known_slots(nodes, layers), parameters)
    elif structure := repeated_structure(nodes, parameters):
        slots = structure.slots()
        slot_of = _assign(nodes, slots, structure.known(), parameters)
    else:
        slots = Slots((_WHOLE,))
        slot_of = dict.fromkeys(nodes.order, Slots.of_layer(0))
    check_order(nodes, slot_of)
    names: tuple[str, ...] = ()
    if layers:
        names = _layer_names(layers, _parameter_names(nodes, parameters, slot_of, param_fqns))
    elif slots.stacks == (_WHOLE,):
        names = (_common_module(param_fqns.values()) or _NAME_OF_WHOLE,)
    return _block_graph(nodes, slots, names, slot_of, parameters, param_fqns)


def _parameter_names(
    joint: JointNodes, parameters: Parameters, slot_of: SlotMap, param_fqns: Mapping[str, str]
) -> dict[int, list[str]]:
    """Names of the parameters that each slot reads first."""
    by_slot = _parameters_by_group(joint, parameters, slot_of)
    return {slot: [param_fqns[node.name] for node in nodes] for slot, nodes in by_slot.items()}


def _layer_names(layers: Sequence[Layer], parameters: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """Paths of the layers, as users know them. Behind a graph break in a module below the one that was compiled, module paths start
    at that module, but parameters have their full names: what these have in front is restored."""
    prefixes: dict[str, str] = {}  # by the root of a path
    for index, layer in enumerate(layers):
        path = layer.scope[0]
        for fqn in parameters.get(Slots.of_layer(index), ()):
            head, found, _ = f".{fqn}".partition(f".{dotted(path)}.")
            if found:
                prefixes.setdefault(path[0], head)
    paths = (layer.scope[0] for layer in layers)
    return tuple(f"{prefixes.get(path[0], '')}.{dotted(path)}".strip(".") for path in paths)


def _common_module(fqns: Iterable[str]) -> str:
    """The path of the innermost module that holds all parameters; empty for the outermost one."""
    paths = [fqn.split(".")[:-1] for fqn in fqns]
    same = itertools.takewhile(lambda steps: len(set(steps)) == 1, zip(*paths, strict=False))
    return ".".join(steps[0] for steps in same)


def block_index(graph: BlockGraph) -> dict[str, int]:
    """Index of the block that holds each node, by node name."""
    return {name: block.index for block in graph.blocks for name in (*block.forward_nodes, *block.backward_nodes)}


def _known_slots(joint: JointNodes, layers: Sequence[Layer]) -> SlotMap:
    """Slots of the nodes, forward and backward, that were traced inside a layer; not of sizes, which layers share."""
    slot_of_scope = {layer.scope: Slots.of_layer(index) for index, layer in enumerate(layers)}
    slot_of_stack = {}
    known: SlotMap = {}
    for node in joint.order:
        if is_scalar(node):
            continue
        stack = module_stack(node)
        if stack not in slot_of_stack:
            slot_of_stack[stack] = next((slot_of_scope[s] for s in scopes(stack) if s in slot_of_scope), None)
        slot = slot_of_stack[stack]
        if slot is not None:
            known[node] = slot
    return known


def _assign(joint: JointNodes, slots: Slots, known: SlotMap, parameters: Parameters) -> SlotMap:
    forward = assign_forward(joint, slots, known, parameters)
    owners = _owner_slots(joint, parameters, forward)
    backward = BackwardAssignment(
        joint=joint,
        slots=slots,
        parameters=parameters,
        known=known,
        forward=forward,
        gradients=_gradients(joint, owners),
    ).run()
    return forward | backward


def _owner_slots(joint: JointNodes, parameters: Parameters, slot_of: SlotMap) -> dict[fx.Node, int]:
    """For each parameter with a reader among the nodes placed so far, the slot of the first one."""
    owners = {}
    for placeholder in parameters.placeholders:
        readers = [node for node in parameters.real_users(placeholder) if node in slot_of]
        if readers:
            owners[placeholder] = slot_of[min(readers, key=lambda node: joint.order[node])]
    return owners


def _gradients(joint: JointNodes, owners: Mapping[fx.Node, int]) -> SlotMap:
    """Nodes that the graph returns as gradients of parameters, with these parameters' slots."""
    slot_of_input = {node.meta["desc"]: slot for node, slot in owners.items() if "desc" in node.meta}
    results = tree_leaves(joint.output.args[0])
    descs = tree_leaves(joint.output.meta.get("desc", ()))
    gradients: SlotMap = {}
    for result, desc in zip(results, descs, strict=False):
        slot = slot_of_input.get(getattr(desc, "grad_of", None))
        if isinstance(result, fx.Node) and slot is not None:
            gradients[result] = slot
    return gradients


def _block_graph(
    joint: JointNodes,
    slots: Slots,
    names: Sequence[str],
    slot_of: SlotMap,
    parameters: Parameters,
    param_fqns: Mapping[str, str],
) -> BlockGraph:
    index_of_slot = {slot: index for index, slot in enumerate(sorted(set(slot_of.values())))}
    group_of = {node: index_of_slot[slot] for node, slot in slot_of.items()}
    forward = _by_group(joint.forward, group_of, len(index_of_slot))
    backward = _by_group(joint.backward, group_of, len(index_of_slot))
    params = _parameters_by_group(joint, parameters, group_of)
    returned = frozenset(joint.output.all_input_nodes)
    blocks = []
    for slot, index in index_of_slot.items():
        blocks.append(
            Block(
                index=index,
                kind=_kind(slot, slots.last),
                module_fqn=names[slot // 2] if names and Slots.is_layer(slot) else "",
                forward_nodes=tuple(node.name for node in forward[index]),
                backward_nodes=tuple(node.name for node in backward[index]),
                param_fqns=tuple(dict.fromkeys(param_fqns[node.name] for node in params.get(index, ()))),
                digest=group_digest([*forward[index], *backward[index]], parameters.placeholders, returned),
            )
        )
    edges = _edges(joint, group_of)
    parts = [f"{block.kind.value} {block.digest} {len(block.param_fqns)}" for block in blocks]
    parts += [f"{edge.producer} {edge.consumer} {edge.num_bytes}" for edge in edges]
    return BlockGraph(blocks=tuple(blocks), edges=edges, digest=combine(parts))


def _kind(slot: int, last: int) -> BlockKind:
    if Slots.is_layer(slot):
        return BlockKind.LAYER
    if slot == 0:
        return BlockKind.PROLOGUE
    return BlockKind.EPILOGUE if slot == last else BlockKind.BRIDGE


def _by_group(nodes: Sequence[fx.Node], group_of: Mapping[fx.Node, int], num_groups: int) -> list[list[fx.Node]]:
    groups: list[list[fx.Node]] = [[] for _ in range(num_groups)]
    for node in nodes:
        groups[group_of[node]].append(node)
    return groups


def _parameters_by_group(
    joint: JointNodes, parameters: Parameters, group_of: Mapping[fx.Node, int]
) -> dict[int, list[fx.Node]]:
    """Each parameter's placeholder under the group that reads it first; under the first group if none does."""
    forward = set(joint.forward)
    first_use: dict[fx.Node, tuple[int, int]] = {}
    for placeholder in parameters.placeholders:
        readers = parameters.real_users(placeholder)
        early = [node for node in readers if node in forward] or readers
        uses = [(joint.order[node], group_of[node]) for node in early]
        first_use[placeholder] = min(uses, default=(len(joint.order), 0))
    groups: dict[int, list[fx.Node]] = {}
    position = {node: index for index, node in enumerate(joint.placeholders)}
    for placeholder in sorted(first_use, key=lambda node: (first_use[node][0], position[node])):
        groups.setdefault(first_use[placeholder][1], []).append(placeholder)
    return groups


def _edges(joint: JointNodes, group_of: Mapping[fx.Node, int]) -> tuple[Edge, ...]:
    """Bytes of activations that each group reads from each earlier one: a value counts once per reader, views never."""
    forward = set(joint.forward)
    crossing: dict[tuple[int, int], set[fx.Node]] = {}
    for node in joint.forward:
        for source in node.all_input_nodes:
            owner = storage_owner(source)
            if owner in forward and group_of[owner] != group_of[node]:
                crossing.setdefault((group_of[owner], group_of[node]), set()).add(owner)
    edges = []
    for (producer, consumer), owners in sorted(crossing.items()):
        num_bytes = sum(storage_bytes(owner) for owner in owners)
        if num_bytes:
            edges.append(Edge(producer=producer, consumer=consumer, num_bytes=num_bytes))
    return tuple(edges)
