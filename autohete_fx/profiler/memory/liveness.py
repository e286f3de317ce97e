"""How many device bytes a compiled graph holds over time.

Enter a graph, or a forward and a backward graph that share saved tensors. Leaves a `MemoryTrace` each: bytes while every kernel
runs, the peak, and what made it up. Parameters and other inputs are not in it. Saved activations are: they are outputs of the
forward graph and die in the backward graph after their last use.

The trace follows the wrapper code that Inductor writes. A kernel's outputs are allocated before it runs, and an input that dies
with it may be written over in place. All else that died is released after it, or kept for a later buffer of the same size
(`reuse`). On a CPU, neighbouring generated kernels become one call, so that the outputs of all are allocated before the first
runs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autohete_fx.internals import versions
from autohete_fx.profiler.memory.kernels import Kernel, KernelGraph, Storage
from autohete_fx.profiler.memory.lowering import lower
from autohete_fx.profiler.memory.node_kinds import holds_tensor, tensor_bytes
from autohete_fx.profiler.memory.ordering import order_for_peak_memory
from autohete_fx.profiler.memory.reuse import Lifetimes, plan_reuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """Device bytes that one value holds at the peak."""

    node: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """Device bytes of a graph's intermediates over time.

    Attributes:
        kernels: name of the last graph node of each kernel, in the order they run.
        live_bytes: while each kernel runs, scratch memory included.
        after_bytes: after each kernel, when what it was the last to use is released.
        nodes: per kernel, the graph nodes computed in it.
        start_bytes: held when the graph starts: the saved tensors and the gradients of outputs, for a backward graph.
        end_bytes: held when it has returned: its outputs, saved tensors included.
        peak_bytes: the maximum of all of these.
        contributors: what is alive at the peak, largest first.
    """

    kernels: tuple[str, ...]
    live_bytes: tuple[int, ...]
    after_bytes: tuple[int, ...]
    nodes: tuple[tuple[str, ...], ...]
    start_bytes: int
    end_bytes: int
    peak_bytes: int
    contributors: tuple[Contributor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """A forward pass followed by its backward pass (None in inference)."""

    forward: MemoryTrace
    backward: MemoryTrace | None

    @property
    def peak_bytes(self) -> int:
        """The largest of both passes."""
        return max(self.forward.peak_bytes, self.backward.peak_bytes if self.backward else 0)


def trace_memory(
    graph_module: fx.GraphModule,
    *,
    device_type: str,
    inner_backend: str = "inductor",
    saved: Mapping[str, Storage] | None = None,
) -> MemoryTrace:
    """The device bytes that one graph holds over time.

    Args:
        graph_module: ATen graph with fake ``meta["val"]``; the ops of `autohete_fx.graph.ops` may be in it.
        device_type: whose memory is meant, ``cpu`` or ``cuda``.
        inner_backend: ``inductor`` or ``eager``.
        saved: placeholders whose bytes count and that are released after their last use, with their memory.
            Several may share one `Storage`, the very same object. All others are not counted.
    """
    graph = lower(graph_module, device_type=device_type, inner_backend=inner_backend)
    return _trace(graph, device_type=device_type, inner_backend=inner_backend, saved=saved or {})


def trace_step(
    forward: fx.GraphModule,
    backward: fx.GraphModule | None,
    num_outputs: int,
    *,
    device_type: str,
    inner_backend: str = "inductor",
    donates: bool = True,
    after: Mapping[str, Sequence[str]] | None = None,
    counts_wholes: bool = True,
    lowered: KernelGraph | None = None,
) -> StepTrace:
    """The device bytes of a forward graph and of the backward graph that follows it.

    Args:
        forward, backward: the two results of partitioning, before or after nodes were inserted.
        num_outputs: leading outputs of ``forward`` that are the caller's; the others are the leading placeholders
            of ``backward``, in order.
        device_type, inner_backend: as in `trace_memory`.
        donates: whether backward may write over saved tensors (AOTAutograd's ``donated_buffer``). Over the gradients of
            outputs it never may.
        after: for nodes of ``backward``, others that will have run before them, by name, beside their arguments.
        counts_wholes: as in `lower`.
        lowered: kernels of ``forward`` that were made alike; None to make them.
    """
    how: Any = {"device_type": device_type, "inner_backend": inner_backend, "counts_wholes": counts_wholes}
    graph = lower(forward, **how) if lowered is None else lowered
    first = _trace(graph, device_type=device_type, inner_backend=inner_backend, saved={})
    if backward is None:
        return StepTrace(forward=first, backward=None)
    kept = {index for index in graph.outputs[:num_outputs] if index is not None}
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    saved: dict[str, Storage] = {}
    for node, index in zip(placeholders, graph.outputs[num_outputs:], strict=False):
        if index is not None and not graph.storages[index].is_input:
            saved[node.name] = graph.storages[index]
    held = {id(graph.storages[index]) for index in kept}
    for node in placeholders[len(graph.outputs) - num_outputs :]:
        # A gradient of an output: autograd brings one for each, zeros for what the loss does not depend on.
        if holds_tensor(node):
            saved[node.name] = Storage(name=node.name, num_bytes=tensor_bytes(node.meta["val"], device_type))
            held |= {id(saved[node.name])} if versions.backward_holds_arguments() else set()
    second = _trace(
        lower(backward, after=after, **how),
        device_type=device_type,
        inner_backend=inner_backend,
        saved=saved,
        held=held,
        lent={node.name for node in placeholders[len(graph.outputs) - num_outputs if donates else 0 :]},
    )
    return StepTrace(forward=first, backward=second)


def _lifetimes(
    graph: KernelGraph,
    kernels: list[Kernel],
    saved: Mapping[str, Storage],
    held: Collection[int],
    lent: Collection[str],
) -> Lifetimes:
    num_bytes = [0 if storage.is_input else storage.num_bytes for storage in graph.storages]
    root = list(range(len(graph.storages)))
    first_of: dict[int, int] = {}
    end = len(kernels)
    last_use: dict[int, int] = {}
    for name, storage in saved.items():
        if name not in graph.inputs:
            continue
        index = graph.inputs[name]
        root[index] = first_of.setdefault(id(storage), index)
        num_bytes[root[index]] = storage.num_bytes
        last_use.setdefault(root[index], end if id(storage) in held else -1)
    at_start = set(first_of.values())
    for place, kernel in enumerate(kernels):
        for index in (*kernel.reads, *kernel.writes):
            last_use[root[index]] = max(last_use.get(root[index], -1), place)
    for index in graph.outputs:
        if index is not None:
            last_use[root[index]] = end
    not_ours = {root[graph.inputs[name]] for name in lent if name in graph.inputs}
    return Lifetimes(num_bytes, root, last_use, at_start, not_ours)


def _launches(kernels: list[Kernel], *, together: bool) -> list[list[Kernel]]:
    """Kernels that one call runs: on a CPU, all neighbouring generated ones."""
    launches: list[list[Kernel]] = []
    for kernel in kernels:
        if together and launches and kernel.fused and launches[-1][-1].fused:
            launches[-1].append(kernel)
        else:
            launches.append([kernel])
    return launches


def _trace(
    graph: KernelGraph,
    *,
    device_type: str,
    inner_backend: str,
    saved: Mapping[str, Storage],
    held: Collection[int] = (),
    lent: Collection[str] = (),
) -> MemoryTrace:
    fuse = inner_backend != "eager"
    kernels = order_for_peak_memory(graph, saved) if fuse else graph.kernels
    memory = _lifetimes(graph, kernels, saved, held, lent)
    launches = _launches(kernels, together=fuse and device_type == "cpu")
    taken_over = plan_reuse(graph, kernels, launches, memory) if fuse else {}
    alive = {index for index in memory.at_start if memory.num_bytes[index]}
    current = sum(memory.num_bytes[index] for index in alive)
    start = peak = current
    at_peak = set(alive)
    live: list[int] = []
    after: list[int] = []
    waiting: set[int] = set()
    given_away = set(taken_over.values())
    place = 0
    for launch in launches:
        for kernel in launch:
            for index in dict.fromkeys(memory.root[i] for i in kernel.writes):
                if index in alive or not memory.num_bytes[index]:
                    continue
                alive.add(index)
                if index in taken_over:
                    # in the memory of a dead or dying buffer of the same size
                    waiting.discard(taken_over[index])
                    alive.discard(taken_over[index])
                else:
                    current += memory.num_bytes[index]
        during = current + max(kernel.workspace_bytes for kernel in launch)
        if during > peak:
            peak, at_peak = during, set(alive) | waiting
        place += len(launch)
        dead = {index for index in alive if memory.last_use.get(index, -1) < place}
        alive -= dead
        waiting |= dead & given_away
        current -= sum(memory.num_bytes[index] for index in dead - given_away)
        live.extend([during] * len(launch))
        after.extend([current] * len(launch))
    named = sorted(((memory.num_bytes[i], graph.storages[i].name) for i in at_peak), reverse=True)
    return MemoryTrace(
        kernels=tuple(kernel.name for kernel in kernels),
        live_bytes=tuple(live),
        after_bytes=tuple(after),
        nodes=tuple(tuple(kernel.nodes) for kernel in kernels),
        start_bytes=start,
        end_bytes=current,
        peak_bytes=peak,
        contributors=tuple(Contributor(node=name, num_bytes=size) for size, name in named),
    )
