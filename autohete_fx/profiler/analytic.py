"""The costs of every block, told from the graphs alone: seconds by the roofline, bytes by liveness.

Enters a `Partition` and a `Machine`; leaves a `Profile`. Nothing runs on the device.
"""

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import fx

from autohete_fx.graph.collectives import COLLECTIVES, gather
from autohete_fx.graph.recompute import is_kept
from autohete_fx.graph.saved import offloadable
from autohete_fx.ir import ActivationCost, BlockCost, Machine, Profile
from autohete_fx.profiler.exchanged import Waits, exchanged
from autohete_fx.profiler.flops import seconds_of
from autohete_fx.profiler.memory.kernels import Kernel
from autohete_fx.profiler.memory.liveness import MemoryTrace, trace_step
from autohete_fx.profiler.memory.node_kinds import Kind, extent_bytes, holds_tensor, kind_of, packet_name
from autohete_fx.profiler.partition import ParamInfo, Partition

_NOT_REDRAWN = ("prims.inductor_seeds", "aten.randint", "aten.rand", "aten.randn", "aten.bernoulli", "aten.randperm")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Seconds of one block; ``selective_s``: what is cheap to compute, once more."""

    forward_s: float
    backward_s: float
    recompute_s: float
    selective_s: float


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


def _share(kernel: Kernel, placed: Mapping[str, int], among: set[str] | None = None) -> dict[int, float]:
    """How a kernel's time divides over blocks: by nodes. ``among`` leaves out the other nodes' part."""
    shares: dict[int, float] = {}
    for name in kernel.nodes:
        if name in placed and (among is None or name in among):
            shares[placed[name]] = shares.get(placed[name], 0.0) + 1.0 / len(kernel.nodes)
    return shares


def _recomputed(
    partition: Partition, saved: tuple[SavedTensor, ...], placed: Mapping[str, int], *, selective: bool = False
) -> set[str]:
    """Forward nodes that run again where their block is recomputed: what its own saved tensors are made from.

    ``selective``: as far as it is cheap to compute.
    """
    nodes = {node.name: node for node in partition.forward.graph.nodes}
    kept = {t.name.partition("[")[0] for t in saved if t.reader is not None or t.pinned}
    if selective:
        kept |= {node.name for node in nodes.values() if is_kept(node)}
    pending = [t.name.partition("[")[0] for t in saved if t.by_default]
    again: set[str] = set()
    while pending:
        name = pending.pop()
        if name in again or name in kept or name not in placed:
            continue
        again.add(name)
        pending.extend(arg.name for arg in nodes[name].all_input_nodes if placed.get(arg.name) == placed[name])
    return again


def _selectively_saved(partition: Partition, saved: tuple[SavedTensor, ...]) -> dict[int, int]:
    """Bytes by block that live from forward to backward where the block is recomputed selectively."""
    placed = partition.placements(partition.forward)
    again = _recomputed(partition, saved, placed, selective=True)
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


def analytic_times(partition: Partition, machine: Machine) -> tuple[BlockTimes, ...]:
    """Roofline seconds of every block, a kernel that spans blocks shared by its nodes."""
    count = len(partition.blocks.blocks)
    forward, backward, again, cheap = [0.0] * count, [0.0] * count, [0.0] * count, [0.0] * count
    placed = partition.placements(partition.forward)
    saved = saved_tensors(partition) if partition.training else ()
    recomputed = _recomputed(partition, saved, placed)
    selectively = _recomputed(partition, saved, placed, selective=True)

    graph, nodes = partition.forward_kernels, {node.name: node for node in partition.forward.graph.nodes}
    for kernel in graph.kernels:
        seconds = seconds_of(kernel, graph, nodes, machine)
        for block, share in _share(kernel, placed).items():
            forward[block] += share * seconds
        for block, share in _share(kernel, placed, recomputed).items():
            again[block] += share * seconds
        for block, share in _share(kernel, placed, selectively).items():
            cheap[block] += share * seconds
    if partition.backward is not None:
        placed = partition.placements(partition.backward)
        graph, nodes = partition.backward_kernels, {node.name: node for node in partition.backward.graph.nodes}
        for kernel in graph.kernels:
            seconds = seconds_of(kernel, graph, nodes, machine, backward=True)
            for block, share in _share(kernel, placed).items():
                backward[block] += share * seconds
    return tuple(
        BlockTimes(forward_s=f, backward_s=b, recompute_s=r, selective_s=s)
        for f, b, r, s in zip(forward, backward, again, cheap, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    """Parameters of one block."""

    param_bytes: int = 0
    grad_bytes: int = 0
    optimizer_bytes: int = 0
    num_params: int = 0
    trained: tuple[int, ...] = ()
    trained_states: tuple[int, ...] = ()
    product_flops: tuple[float, ...] = ()
    update_share: float = 1.0
    num_param_tensors: int = 1
    num_grad_tensors: int = 1


def param_owners(partition: Partition) -> dict[str, int]:
    """Parameter fqn to the block that owns it: the one that lists it, else that of its first reader."""
    owners = {fqn: block.index for block in partition.blocks.blocks for fqn in block.param_fqns}
    placed = partition.placements(partition.forward)
    for node in partition.forward.graph.nodes:
        info = partition.params.get(node.name) if node.op == "placeholder" else None
        if info is not None and info.fqn not in owners:
            owners[info.fqn] = min((placed[user.name] for user in node.users if user.name in placed), default=0)
    return owners


def _owned(partition: Partition) -> list[_Owned]:
    owners = param_owners(partition)
    per_block: list[list[ParamInfo]] = [[] for _ in partition.blocks.blocks]
    for info in {info.fqn: info for info in partition.params.values()}.values():
        per_block[owners[info.fqn]].append(info)
    owned = []
    for infos in per_block:
        trained = [info for info in infos if info.requires_grad and partition.training]
        trained.sort(key=lambda info: (info.num_elements, info.fqn))
        is_even = len({Fraction(info.state_bytes, info.num_elements) for info in trained if info.num_elements}) < 2
        owned.append(
            _Owned(
                param_bytes=sum(info.num_bytes for info in infos),
                grad_bytes=sum(info.num_bytes for info in trained),
                optimizer_bytes=sum(info.state_bytes for info in trained),
                num_params=sum(info.num_elements for info in trained),
                trained=tuple(info.num_elements for info in trained),
                trained_states=tuple(info.state_bytes for info in trained) if not is_even else (),
                product_flops=tuple(flops) if any(flops := [info.product_flops for info in trained]) else (),
                update_share=_update_share(trained),
                num_param_tensors=max(1, len(infos)),
                num_grad_tensors=max(1, len(trained)),
            )
        )
    return owned


def _update_share(trained: Sequence[ParamInfo]) -> float:
    """The mean over all elements."""
    shares = {info.update_share for info in trained}
    if len(shares) < 2:
        return next(iter(shares), 1.0)
    return sum(info.update_share * info.num_elements for info in trained) / sum(info.num_elements for info in trained)


def _phases(trace: MemoryTrace, graph_module: fx.GraphModule, placed: Mapping[str, int], *, reverse: bool) -> list[int]:
    """The block that each kernel's moment belongs to: the furthest whose extern kernels have begun.

    Generated kernels say nothing about when a block runs: the compiler moves some of them far ahead. Nor do collectives, which
    run ahead of a block or after it.
    """
    nodes = graph_module.graph.nodes
    anchoring = {node.name for node in nodes if kind_of(node) is Kind.EXTERN and node.target not in COLLECTIVES}
    phase: int | None = None
    phases: list[int | None] = []
    for names in trace.nodes:
        anchors = [placed[name] for name in names if name in placed and name in anchoring]
        if anchors and phase is None:
            phase = anchors[0]
        elif anchors and phase is not None:
            phase = min(phase, *anchors) if reverse else max(phase, *anchors)
        phases.append(phase)
    first = next((p for p in phases if p is not None), 0)
    return [first if p is None else p for p in phases]


def _forward_workspaces(partition: Partition, trace: MemoryTrace) -> list[int]:
    phases = _phases(trace, partition.forward, partition.placements(partition.forward), reverse=False)
    result = [0] * len(partition.blocks.blocks)
    for block in range(len(result)):
        places = [place for place, phase in enumerate(phases) if phase == block]
        if places:
            at_start = trace.after_bytes[places[0] - 1] if places[0] else trace.start_bytes
            peak = max(trace.live_bytes[place] for place in places)
            result[block] = max(0, peak - max(at_start, trace.after_bytes[places[-1]]))
    return result


def _backward_workspaces(
    partition: Partition, trace: MemoryTrace, saved: tuple[SavedTensor, ...], owned: list[_Owned]
) -> list[int]:
    assert partition.backward is not None
    phases = _phases(trace, partition.backward, partition.placements(partition.backward), reverse=True)
    result = [0] * len(owned)
    for block in range(len(owned)):
        held = sum(t.num_bytes for t in saved if t.by_default and t.block <= block)
        held += sum(o.grad_bytes for o in owned[block:])
        peak = max((trace.live_bytes[place] for place, phase in enumerate(phases) if phase == block), default=0)
        result[block] = max(0, peak - held)
    return result


def with_waits(partition: Partition, times: tuple[BlockTimes, ...], machine: Machine) -> tuple[BlockTimes, ...]:
    """The seconds of computation with those that blocks wait for functional collectives."""
    waits = Waits(partition, machine)
    if not waits.any:
        return times
    placed, saved = partition.placements(partition.forward), saved_tensors(partition) if partition.training else ()
    again, cheap = (_recomputed(partition, saved, placed, selective=selective) for selective in (False, True))
    parts = zip(waits.forward(), waits.backward(), waits.forward(again), waits.forward(cheap), strict=True)
    return tuple(
        BlockTimes(
            forward_s=each.forward_s + forward_s,
            backward_s=each.backward_s + backward_s,
            recompute_s=each.recompute_s + again_s,
            selective_s=each.selective_s + cheap_s,
        )
        for each, (forward_s, backward_s, again_s, cheap_s) in zip(times, parts, strict=True)
    )


def costs_from_times(partition: Partition, times: tuple[BlockTimes, ...]) -> tuple[BlockCost, ...]:
    """Block costs with given seconds; all bytes come from the graphs."""
    saved = saved_tensors(partition) if partition.training else ()
    owned = _owned(partition)
    trace = trace_step(
        partition.forward,
        partition.backward,
        partition.num_outputs,
        device_type=partition.device_type,
        inner_backend=partition.inner_backend,
        after=partition.after,
        counts_wholes=False,
        lowered=partition.forward_kernels,
    )
    forward_workspaces = _forward_workspaces(partition, trace.forward)
    backward_workspaces = (
        _backward_workspaces(partition, trace.backward, saved, owned) if trace.backward else [0] * len(owned)
    )
    selectively_saved = _selectively_saved(partition, saved)
    costs = []
    for block, (seconds, params, moved) in enumerate(zip(times, owned, exchanged(partition), strict=True)):
        mine = [tensor for tensor in saved if tensor.block == block and tensor.by_default]
        saved_bytes, selective = sum(t.num_bytes for t in mine), selectively_saved[block]
        costs.append(
            BlockCost(
                forward_s=seconds.forward_s,
                backward_s=seconds.backward_s,
                recompute_s=seconds.recompute_s,
                saved_bytes=saved_bytes,
                boundary_bytes=sum(t.num_bytes for t in saved if t.stays(block)),
                offloadable=tuple(sorted((t.num_bytes for t in mine if t.offloadable), reverse=True)),
                forward_workspace_bytes=forward_workspaces[block],
                backward_workspace_bytes=backward_workspaces[block],
                param_bytes=params.param_bytes,
                grad_bytes=params.grad_bytes,
                optimizer_bytes=params.optimizer_bytes,
                num_params=params.num_params,
                trained=params.trained,
                trained_states=params.trained_states,
                product_flops=params.product_flops,
                update_share=params.update_share,
                num_param_tensors=params.num_param_tensors,
                num_grad_tensors=params.num_grad_tensors,
                gathered_bytes=moved.gathered_bytes,
                gathered_again_bytes=moved.gathered_again_bytes,
                reduced_bytes=moved.reduced_bytes,
                selective=ActivationCost(held_bytes=selective, recompute_s=seconds.selective_s)
                if selective < saved_bytes
                else None,
            )
        )
    return tuple(costs)


def profile_analytic(partition: Partition, machine: Machine, *, inner_backend: str | None = None) -> Profile:
    """The costs of all blocks from FLOPs, bytes and liveness, without running anything.

    ``inner_backend`` overrides the partition's.
    """
    started = time.perf_counter()
    if inner_backend is not None:
        partition = replace(partition, inner_backend=inner_backend)
    costs = costs_from_times(partition, with_waits(partition, analytic_times(partition, machine), machine))
    return Profile(costs=costs, source="analytic", profile_s=time.perf_counter() - started)
