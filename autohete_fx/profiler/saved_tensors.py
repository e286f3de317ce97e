"""The memory that lives from forward to backward, and the part of it that recomputation makes again: told from the graphs.

Enters a `Partition`; leave its `SavedTensor`s, and the names and bytes of what plans that recompute blocks run and keep.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autohete_fx.graph.collectives import gather
from autohete_fx.graph.recompute import is_kept
from autohete_fx.graph.saved import offloadable
from autohete_fx.ir import Activations
from autohete_fx.profiler.memory.node_kinds import Kind, extent_bytes, holds_tensor, kind_of, packet_name
from autohete_fx.profiler.partition import Partition

_NOT_REDRAWN = ("prims.inductor_seeds", "aten.randint", "aten.rand", "aten.randn", "aten.bernoulli", "aten.randperm")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One piece of memory that lives from forward to backward.

    Attributes:
        name: forward node that owns the memory.
        block: index of the block that produces it.
        num_bytes: device bytes.
        by_default: the partition saves it; else it is saved only where the block that reads it is recomputed.
        reader: index of the first other block that reads it in forward, None where there is none.
        pinned: it cannot be made again: random state, or the caller holds it.
        offloadable: it can leave for host memory after forward (`saved.offloadable`).
    """

    name: str
    block: int
    num_bytes: int
    by_default: bool
    reader: int | None
    pinned: bool
    offloadable: bool

    def stays(self, block: int) -> bool:
        """It lives from forward to backward because ``block`` is recomputed, or although it is.

        That is what the block makes for others, what cannot be made again, and what the block reads from others.
        """
        if self.by_default:
            return self.block == block and (self.reader is not None or self.pinned)
        return self.reader == block

    def owner_in(self, names: Container[str]) -> bool:
        """Whether the node that makes it is one of ``names``; ``name`` says which of several results it is."""
        return self.name.partition("[")[0] in names


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while kind_of(node) is Kind.VIEW and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if isinstance(source.meta.get("val"), (tuple, list)) and kind_of(source) is not Kind.VIEW:
            return node
        node = source
    return node


def saved_tensors(partition: Partition) -> tuple[SavedTensor, ...]:
    """Everything that lives from forward to backward, each piece of memory once, in graph order.

    Parameters, gathered or not, inputs and views of them are not in it. A value that crosses into a later block is in it even
    where the default partition does not save it (``by_default`` False). To recompute the reader would save it.
    """
    nodes = {node.name: node for node in partition.forward.graph.nodes}
    placed = partition.placements(partition.forward)
    graph = partition.forward_kernels
    held = {graph.storages[i].name for i in graph.outputs[: partition.num_outputs] if i is not None}
    by_default: dict[str, int] = {}
    for index in graph.outputs:
        if index is not None and not graph.storages[index].is_input and graph.storages[index].num_bytes:
            by_default[graph.storages[index].name] = graph.storages[index].num_bytes
    owner_of = {
        name: graph.storages[indexes[0]].name for name, indexes in graph.storage_of.items() if len(indexes) == 1
    }
    can_leave = {owner_of.get(root.name) for root in offloadable(partition.forward, partition.num_outputs)}
    crossing = _crossing_values(partition, nodes, placed, owner_of)
    found: list[SavedTensor] = []
    for name in dict.fromkeys([*by_default, *crossing]):
        node = nodes[name.partition("[")[0]]
        reader, read_bytes = crossing.get(name, (None, 0))
        num_bytes = by_default.get(name, read_bytes)
        if not num_bytes:
            continue
        found.append(
            SavedTensor(
                name=name,
                block=placed[node.name],
                num_bytes=num_bytes,
                by_default=name in by_default,
                reader=reader,
                pinned=name in held or packet_name(node) in _NOT_REDRAWN,
                offloadable=name in can_leave,
            )
        )
    position = {name: place for place, name in enumerate(nodes)}
    return tuple(sorted(found, key=lambda tensor: position[tensor.name.partition("[")[0]]))


def _crossing_values(
    partition: Partition, nodes: Mapping[str, fx.Node], placed: Mapping[str, int], owner_of: Mapping[str, str]
) -> dict[str, tuple[int, int]]:
    """Memory that one block fills and another reads in forward: its owner, the first reader and the bytes."""
    crossing: dict[str, tuple[int, int]] = {}
    for node in nodes.values():
        for source in node.all_input_nodes if node.name in placed else ():
            if not holds_tensor(source):
                continue
            root = _root(source)
            if root.name not in placed or placed[root.name] == placed[node.name] or kind_of(root) is Kind.INPUT:
                continue
            if root.target is gather:
                continue
            if isinstance(root.meta["val"], torch.Tensor):
                name = owner_of.get(root.name, root.name)
                crossing.setdefault(name, (placed[node.name], extent_bytes(root.meta["val"], partition.device_type)))
    return crossing


def computed_again(
    partition: Partition, saved: tuple[SavedTensor, ...], placed: Mapping[str, int], activations: Activations
) -> set[str]:
    """Forward nodes that a treatment which recomputes runs again in their block: what its own saved tensors are made from."""
    nodes = {node.name: node for node in partition.forward.graph.nodes}
    kept = {t.name.partition("[")[0] for t in saved if t.reader is not None or t.pinned}
    kept |= {node.name for node in nodes.values() if is_kept(node, activations)}
    pending = [t.name.partition("[")[0] for t in saved if t.by_default]
    again: set[str] = set()
    while pending:
        name = pending.pop()
        if name in again or name in kept or name not in placed:
            continue
        again.add(name)
        pending.extend(arg.name for arg in nodes[name].all_input_nodes if placed.get(arg.name) == placed[name])
    return again


def partly_saved_bytes(
    partition: Partition, saved: tuple[SavedTensor, ...], activations: Activations
) -> dict[int, int]:
    """Bytes by block that live from forward to backward where a part of the block is computed again."""
    placed = partition.placements(partition.forward)
    again = computed_again(partition, saved, placed, activations)
    graph = partition.forward_kernels
    stays = {tensor.name for tensor in saved}
    total = dict.fromkeys(range(len(partition.blocks.blocks)), 0)
    for tensor in saved:
        for block in total:
            if tensor.stays(block) or (tensor.block == block and tensor.by_default and not tensor.owner_in(again)):
                total[block] += tensor.num_bytes
    for node in partition.forward.graph.nodes:
        for source in node.all_input_nodes if node.name in again else ():
            if placed.get(source.name) != placed[node.name] or source.name in again or not holds_tensor(source):
                continue
            for index in graph.storage_of.get(source.name, ()):
                storage = graph.storages[index]
                if storage.name not in stays and not storage.is_input:
                    stays.add(storage.name)
                    total[placed[source.name]] += storage.num_bytes
    return total
