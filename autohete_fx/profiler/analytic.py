"""The costs of every block, told from the graphs alone: seconds by the roofline, bytes by liveness.

Enters a `Partition` and a `Machine`; leaves a `Profile`. Nothing runs on the device.
"""

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import fx

from autohete_fx.graph.collectives import COLLECTIVES
from autohete_fx.ir import PARTIAL, ActivationCost, Activations, BlockCost, Machine, Profile
from autohete_fx.profiler.exchanged import Waits, exchanged
from autohete_fx.profiler.flops import seconds_of
from autohete_fx.profiler.memory.kernels import Kernel
from autohete_fx.profiler.memory.liveness import MemoryTrace, trace_step
from autohete_fx.profiler.memory.node_kinds import Kind, kind_of
from autohete_fx.profiler.partition import ParamInfo, Partition
from autohete_fx.profiler.saved_tensors import SavedTensor, computed_again, partly_saved_bytes, saved_tensors

_RECOMPUTING = (Activations.RECOMPUTE, *PARTIAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """Seconds of one block; ``partial_s``: of what each of the `PARTIAL` treatments computes again."""

    forward_s: float
    backward_s: float
    recompute_s: float
    partial_s: tuple[float, ...]


def _share(kernel: Kernel, placed: Mapping[str, int], among: set[str] | None = None) -> dict[int, float]:
    """How a kernel's time divides over blocks: by nodes. ``among`` leaves out the other nodes' part."""
    shares: dict[int, float] = {}
    for name in kernel.nodes:
        if name in placed and (among is None or name in among):
            shares[placed[name]] = shares.get(placed[name], 0.0) + 1.0 / len(kernel.nodes)
    return shares


def analytic_times(partition: Partition, machine: Machine) -> tuple[BlockTimes, ...]:
    """Roofline seconds of every block, a kernel that spans blocks shared by its nodes."""
    count = len(partition.blocks.blocks)
    forward, backward = [0.0] * count, [0.0] * count
    placed = partition.placements(partition.forward)
    saved = saved_tensors(partition) if partition.training else ()
    again = [(computed_again(partition, saved, placed, kind), [0.0] * count) for kind in _RECOMPUTING]

    graph, nodes = partition.forward_kernels, {node.name: node for node in partition.forward.graph.nodes}
    for kernel in graph.kernels:
        seconds = seconds_of(kernel, graph, nodes, machine)
        for block, share in _share(kernel, placed).items():
            forward[block] += share * seconds
        for among, total in again:
            for block, share in _share(kernel, placed, among).items():
                total[block] += share * seconds
    if partition.backward is not None:
        placed = partition.placements(partition.backward)
        graph, nodes = partition.backward_kernels, {node.name: node for node in partition.backward.graph.nodes}
        for kernel in graph.kernels:
            seconds = seconds_of(kernel, graph, nodes, machine, backward=True)
            for block, share in _share(kernel, placed).items():
                backward[block] += share * seconds
    return tuple(
        BlockTimes(forward_s=f, backward_s=b, recompute_s=r, partial_s=tuple(partial))
        for f, b, r, *partial in zip(forward, backward, *(total for _, total in again), strict=True)
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
    mixed_share: float = 0.0
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
                mixed_share=_mixed_share(trained),
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


def _mixed_share(trained: Sequence[ParamInfo]) -> float:
    """Over all that updates read and write."""
    of_kind = [sum(i.update_share * i.num_elements for i in trained if i.is_mixed is kind) for kind in (True, False)]
    return of_kind[0] / sum(of_kind) if of_kind[0] else 0.0


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
    again = (waits.forward(computed_again(partition, saved, placed, kind)) for kind in _RECOMPUTING)
    parts = zip(waits.forward(), waits.backward(), *again, strict=True)
    return tuple(
        BlockTimes(
            forward_s=each.forward_s + forward_s,
            backward_s=each.backward_s + backward_s,
            recompute_s=each.recompute_s + again_s,
            partial_s=tuple(map(operator.add, each.partial_s, partial_s)),
        )
        for each, (forward_s, backward_s, again_s, *partial_s) in zip(times, parts, strict=True)
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
    partly_saved = [partly_saved_bytes(partition, saved, kind) for kind in PARTIAL]
    costs = []
    for block, (seconds, params, moved) in enumerate(zip(times, owned, exchanged(partition), strict=True)):
        mine = [tensor for tensor in saved if tensor.block == block and tensor.by_default]
        saved_bytes = sum(t.num_bytes for t in mine)
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
                mixed_share=params.mixed_share,
                num_param_tensors=params.num_param_tensors,
                num_grad_tensors=params.num_grad_tensors,
                gathered_bytes=moved.gathered_bytes,
                gathered_again_bytes=moved.gathered_again_bytes,
                reduced_bytes=moved.reduced_bytes,
                partial=tuple(
                    (kind, ActivationCost(held_bytes=held[block], recompute_s=again_s))
                    for kind, held, again_s in zip(PARTIAL, partly_saved, seconds.partial_s, strict=True)
                    if held[block] < saved_bytes
                ),
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
