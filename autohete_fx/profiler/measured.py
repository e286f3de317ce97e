"""The costs of every block, with seconds timed on the device: each distinct block once, compiled on its own.

Enters a `Partition` and a `Machine`; leaves a `Profile`. Blocks with one digest share one timing, and timings are kept between
processes. Bytes are those of `analytic`. A block cannot be timed where its working set is above ``max_bytes``, its sizes are
symbolic, or the time is used up. It gets its analytic seconds times the ratio that the timed blocks show, and
``Profile.source`` says how many do.
"""

import hashlib
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autohete_fx.cache import load_text, machine_key, store_text
from autohete_fx.graph.collectives import needs_others
from autohete_fx.internals.partitioning import make_graph_module
from autohete_fx.ir import Machine, Profile
from autohete_fx.profiler.analytic import BlockTimes, analytic_times, costs_from_times, with_waits
from autohete_fx.profiler.memory.dry_run import CompiledCode, dry_run
from autohete_fx.profiler.memory.liveness import trace_memory
from autohete_fx.profiler.memory.lowering import lower
from autohete_fx.profiler.memory.node_kinds import extent_bytes
from autohete_fx.profiler.partition import Partition
from autohete_fx.profiler.timed_graph import (
    CompileGraph,
    TimedGraph,
    compile_eager,
    compile_inductor,
    computing_device,
    integer_results,
    outside_tracing,
)

_NEGLIGIBLE_SHARE = 0.05
"""Blocks with less than this part of the estimated time are not worth compiling on their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timing:
    """Seconds of one distinct block."""

    forward_s: float
    backward_s: float


def extract_block(
    graph_module: fx.GraphModule, placed: dict[str, int], block: int, *, not_stored: Collection[str] = ()
) -> fx.GraphModule | None:
    """The nodes of one block as a graph of their own.

    Values from outside become placeholders; what is read outside, or returned, becomes the outputs, in graph order.
    ``not_stored`` names values that the compiler never puts in memory but computes again wherever they are read, such as the
    sines of rotary positions. Where the block reads one, its nodes come along. None where the block has no nodes here.
    Collectives belong to no block, or one rank would run them without the others: their results come from outside.
    """
    nodes = graph_module.graph.nodes
    own = {node for node in nodes if placed.get(node.name) == block and not needs_others(node.target)}
    inside = set(own)
    for node in reversed(graph_module.graph.nodes):
        if node in inside:
            for source in node.all_input_nodes:
                # A tuple cannot be passed in either: who reads an item of one belongs with it.
                if not needs_others(source.target) and (
                    source.name in not_stored or isinstance(source.meta.get("val"), (tuple, list))
                ):
                    inside.add(source)
    if not own:
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    ordered = [node for node in graph_module.graph.nodes if node in inside]
    for source in dict.fromkeys(arg for node in ordered for arg in node.all_input_nodes if arg not in inside):
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in ordered:
        copies[node] = graph.node_copy(node, lambda arg: copies[arg])
    results = [
        copies[node]
        for node in ordered
        if node in own
        and any(user not in inside for user in node.users)
        and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    output = graph.output(tuple(results))
    output.meta["val"] = tuple(node.meta["val"] for node in results)
    return make_graph_module(graph_module, graph)


def values_not_stored(graph_module: fx.GraphModule, device_type: str, inner_backend: str) -> frozenset[str]:
    """Names of the values that become no buffer: expressions, computed by every kernel that reads them."""
    stored = lower(graph_module, device_type=device_type, inner_backend=inner_backend).storage_of
    return frozenset(
        node.name
        for node in graph_module.graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and node.name not in stored
    )


def structure_digest(graph_module: fx.GraphModule | None) -> str:
    """A digest of operators, wiring, sizes and dtypes, whatever the names."""
    if graph_module is None:
        return ""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in graph_module.graph.nodes:
        number[node] = len(number)
        args = fx.node.map_arg((node.args, node.kwargs), lambda arg: number[arg])  # type: ignore[arg-type,return-value]
        value = node.meta.get("val")
        layout = (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else ""
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {args} {layout}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _measurable(graph_module: fx.GraphModule | None) -> bool:
    """All inputs are tensors of known sizes."""
    for node in graph_module.graph.nodes if graph_module is not None else ():
        value = node.meta.get("val")
        if node.op == "placeholder" and not isinstance(value, torch.Tensor):
            return False
        if isinstance(value, torch.Tensor) and not all(isinstance(s, int) for s in (*value.shape, *value.stride())):
            return False
    return True


def _working_set(graph_module: fx.GraphModule | None, device_type: str, inner_backend: str) -> int:
    """Device bytes that timing a graph takes: inputs and intermediates."""
    if graph_module is None:
        return 0
    values = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    inputs = sum(extent_bytes(value, device_type) for value in values)
    return inputs + trace_memory(graph_module, device_type=device_type, inner_backend=inner_backend).peak_bytes


def _needed_bytes(timed: TimedGraph, device_type: str) -> int:
    """Device bytes that timing takes as the compiled code tells: 0 where there is none, as node by node."""
    code = CompiledCode(graph=timed.run, inputs=timed.fakes)
    with outside_tracing():
        allocated = dry_run(code, None, 0, device_type=device_type)
    return 0 if allocated is None else allocated + sum(extent_bytes(value, device_type) for value in timed.fakes)


class _Stopwatch:
    """Times distinct blocks until the time is used up."""

    def __init__(
        self, partition: Partition, compile_graph: CompileGraph, *, max_bytes: int | None, time_limit_s: float
    ) -> None:
        self.partition = partition
        self.compile_graph = compile_graph
        self.max_bytes = max_bytes
        self.deadline = time.perf_counter() + time_limit_s
        self.machine_key = machine_key(computing_device(partition.forward))
        graphs = [gm for gm in (partition.forward, partition.backward) if gm is not None]
        self.graphs = [
            (gm, partition.placements(gm), values_not_stored(gm, partition.device_type, partition.inner_backend))
            for gm in graphs
        ]
        self.keys: dict[int, str] = {}
        self.timed: dict[int, list[TimedGraph | None]] = {}

    def begin(self, block: int) -> _Timing | None:
        """The timing of a block from the cache; else None, and it is compiled and timed where that can be done."""
        part = self.partition
        pieces = [extract_block(gm, placed, block, not_stored=not_stored) for gm, placed, not_stored in self.graphs]
        if not all(map(_measurable, pieces)):
            return None
        structure = [structure_digest(piece) for piece in (*pieces, *[None] * (2 - len(pieces)))]
        self.keys[block] = "|".join(
            [part.blocks.blocks[block].digest, *structure, self.machine_key, part.inner_backend]
        )
        known = load_text("block", self.keys[block])
        if known is not None:
            return _Timing(**json.loads(known))
        if time.perf_counter() > self.deadline:
            return None
        device_type, inner = part.device_type, part.inner_backend
        kept = [node for piece in pieces if piece is not None for node in integer_results(piece).values()]
        kept_bytes = sum(extent_bytes(node.meta["val"], device_type) for node in kept)
        kept_bytes += torch.get_rng_state().nbytes if device_type == "cpu" else 0  # to be put back
        needed = max(_working_set(piece, device_type, inner) for piece in pieces) + kept_bytes
        if self.max_bytes is not None and needed > self.max_bytes:
            return None
        compiled = [None if piece is None else TimedGraph(piece, self.compile_graph) for piece in pieces]
        # The trace may be off by some: what the code takes is seen before anything runs.
        needed = max(0 if graph is None else _needed_bytes(graph, device_type) for graph in compiled) + kept_bytes
        if self.max_bytes is not None and needed > self.max_bytes:
            return None
        self.timed[block] = compiled
        self._time(block)
        return None

    def _time(self, block: int) -> None:
        known: dict[str, torch.Tensor] = {}
        for graph in self.timed[block]:
            if graph is not None:
                known = graph.time(known)

    def finish(self) -> dict[int, _Timing]:
        """Time what was begun once more, a while later, so that a disturbance has passed; and keep the results."""
        found: dict[int, _Timing] = {}
        for block, graphs in self.timed.items():
            if time.perf_counter() < self.deadline:
                self._time(block)
            forward_s, backward_s = (0.0 if g is None else g.best_s for g in (*graphs, *[None] * (2 - len(graphs))))
            found[block] = _Timing(forward_s=forward_s, backward_s=backward_s)
            store_text("block", self.keys[block], json.dumps({"forward_s": forward_s, "backward_s": backward_s}))
        return found


def measure_blocks(
    partition: Partition,
    estimates: Sequence[BlockTimes],
    *,
    compile_graph: CompileGraph,
    max_bytes: int | None = None,
    time_limit_s: float = 20.0,
) -> dict[int, BlockTimes]:
    """Timed seconds of blocks, all blocks of a digest alike; blocks that were not timed are absent.

    A kind of block that makes up less than 5% of the estimated time is left out.

    Args:
        partition: what to time.
        estimates: analytic seconds: the order in which blocks are timed, and the recomputed share of a forward.
        compile_graph: how a block's graphs are compiled.
        max_bytes: device memory that timing may take; a block that needs more is left out. None for no limit.
        time_limit_s: no further block is begun after that.
    """
    groups: dict[str, list[int]] = {}
    for block in partition.blocks.blocks:
        groups.setdefault(block.digest or f"#{block.index}", []).append(block.index)

    def weight(members: list[int]) -> float:
        return sum(estimates[b].forward_s + estimates[b].backward_s for b in members)

    stopwatch = _Stopwatch(partition, compile_graph, max_bytes=max_bytes, time_limit_s=time_limit_s)
    timings: dict[int, _Timing] = {}
    worth_timing = _NEGLIGIBLE_SHARE * sum(map(weight, groups.values()))
    heaviest_first = sorted(groups.values(), key=weight, reverse=True)
    for members in heaviest_first:
        if weight(members) < worth_timing:
            break
        known = stopwatch.begin(_timed_member(members))
        if known is not None:
            timings[_timed_member(members)] = known
    timings |= stopwatch.finish()
    found: dict[int, BlockTimes] = {}
    for members in heaviest_first:
        timing = timings.get(_timed_member(members))
        for block in members if timing is not None else ():
            assert timing is not None
            estimate = estimates[block]
            scale = timing.forward_s / estimate.forward_s if estimate.forward_s else 0.0
            found[block] = BlockTimes(
                forward_s=timing.forward_s,
                backward_s=timing.backward_s,
                recompute_s=min(timing.forward_s, scale * estimate.recompute_s),
                partial_s=tuple(min(timing.forward_s, scale * again_s) for again_s in estimate.partial_s),
            )
    return found


def _timed_member(members: Sequence[int]) -> int:
    """The block that stands for those like it: one in the middle."""
    return members[len(members) // 2]


def _scaled(estimates: Sequence[BlockTimes], found: dict[int, BlockTimes]) -> tuple[BlockTimes, ...]:
    """Timed seconds where there are any, else analytic ones times what the timed blocks took against theirs."""
    estimated = sum(estimates[block].forward_s + estimates[block].backward_s for block in found)
    timed = sum(times.forward_s + times.backward_s for times in found.values())
    ratio = timed / estimated if estimated and timed else 1.0
    return tuple(
        found.get(
            block,
            BlockTimes(
                forward_s=ratio * times.forward_s,
                backward_s=ratio * times.backward_s,
                recompute_s=ratio * times.recompute_s,
                partial_s=tuple(ratio * again_s for again_s in times.partial_s),
            ),
        )
        for block, times in enumerate(estimates)
    )


def profile_measured(
    partition: Partition,
    machine: Machine,
    *,
    inner_backend: str | None = None,
    compile_graph: CompileGraph | None = None,
    max_bytes: int | None = None,
    time_limit_s: float = 20.0,
) -> Profile:
    """The costs of all blocks, with seconds timed on the device where that was possible.

    Args:
        partition, machine: as in `profile_analytic`.
        inner_backend: overrides the partition's.
        compile_graph: how a block is compiled; by default what the inner backend does.
        max_bytes, time_limit_s: see `measure_blocks`.
    """
    started = time.perf_counter()
    if inner_backend is not None:
        partition = replace(partition, inner_backend=inner_backend)
    if compile_graph is None:
        compile_graph = compile_eager if partition.inner_backend == "eager" else compile_inductor
    estimates = analytic_times(partition, machine)
    found = measure_blocks(
        partition, estimates, compile_graph=compile_graph, max_bytes=max_bytes, time_limit_s=time_limit_s
    )
    costs = costs_from_times(partition, with_waits(partition, _scaled(estimates, found), machine))
    return Profile(costs=costs, source=_source(estimates, found), profile_s=time.perf_counter() - started)


def _source(estimates: Sequence[BlockTimes], found: dict[int, BlockTimes]) -> str:
    """``measured``, ``analytic``, or how much is which where a considerable part could not be timed."""
    if not found:
        return "analytic"
    total = sum(times.forward_s + times.backward_s for times in estimates)
    timed = sum(estimates[block].forward_s + estimates[block].backward_s for block in found)
    if timed >= (1 - 2 * _NEGLIGIBLE_SHARE) * total:
        return "measured"
    return f"measured, {len(estimates) - len(found)} of {len(estimates)} blocks analytic"
