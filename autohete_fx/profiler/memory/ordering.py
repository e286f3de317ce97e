"""The order in which Inductor runs kernels: the best of four by its own estimate of peak memory.

Enters a `KernelGraph`; leaves its kernels in that order. It restates ``torch/_inductor/memory.py``
(``reorder_for_peak_memory``): the order of the graph, least peak memory first, breadth first, depth first. The
estimate is Inductor's, which takes host tensors for device ones; the true bytes are counted afterwards.

Kernels that issue a copy or wait for one are pinned between the extern kernels around them.
"""

import heapq
from collections.abc import Collection
from dataclasses import dataclass

from autohete_fx.profiler.memory.kernels import Kernel, KernelGraph


@dataclass(slots=True)
class _Buffer:
    """One storage as the scheduler sees it; ``kept`` to the end where it is an output or a fixed input."""

    num_bytes: int
    readers: set[int]
    kept: bool


@dataclass(slots=True)
class _Schedule:
    """Kernels: predecessors, successors, buffers read, bytes written, ``scratch`` bytes of those gone after it."""

    before: list[set[int]]
    behind: list[set[int]]
    reads: list[list[int]]
    sizes: list[int]
    buffers: dict[int, _Buffer]
    input_bytes: int
    scratch: list[int]


def order_for_peak_memory(graph: KernelGraph, saved: Collection[str]) -> list[Kernel]:
    """The kernels in the order that they will run.

    Args:
        graph: kernels in graph order.
        saved: names of placeholders that may be released after their last use.
    """
    if not graph.kernels:
        return []
    schedule = _schedule(graph, saved)
    orders = [list(range(len(graph.kernels)))]
    orders += [_least_peak_first(schedule), _breadth_first(schedule), _depth_first(schedule)]
    best = min(orders, key=lambda order: _estimated_peak(schedule, order))
    return [graph.kernels[place] for place in best]


def _schedule(graph: KernelGraph, saved: Collection[str]) -> _Schedule:
    count = len(graph.kernels)
    outputs = {index for index in graph.outputs if index is not None}
    freeable = {graph.inputs[name] for name in saved if name in graph.inputs}
    buffers: dict[int, _Buffer] = {}
    before: list[set[int]] = [set() for _ in range(count)]
    last_writer: dict[int, int] = {}
    sizes = [kernel.register_bytes for kernel in graph.kernels]
    for place, kernel in enumerate(graph.kernels):
        for index in kernel.writes:
            if index not in buffers:
                buffers[index] = _Buffer(believed(graph, index), set(), index in outputs)
                sizes[place] += buffers[index].num_bytes
        for index in (*kernel.reads, *kernel.writes):
            if index in last_writer:
                before[place].add(last_writer[index])
                buffers[index].readers.add(place)
            elif index in freeable:
                entry = buffers.setdefault(index, _Buffer(believed(graph, index), set(), index in outputs))
                entry.readers.add(place)
        for index in kernel.writes:
            # whoever writes again comes behind the readers of what was there
            if index in last_writer:
                before[place] |= buffers[index].readers
            last_writer[index] = place
        before[place].update(last_writer[index] for index in kernel.after if index in last_writer)
        before[place].discard(place)
        for index in kernel.writes:
            buffers[index].readers.discard(place)
    _pin_copies(graph, before)
    behind: list[set[int]] = [set() for _ in range(count)]
    for place, earlier in enumerate(before):
        for other in earlier:
            behind[other].add(place)
    reads: list[list[int]] = [[] for _ in range(count)]
    for index, buffer in buffers.items():
        for place in buffer.readers:
            reads[place].append(index)
    input_bytes = sum(buffers[index].num_bytes for index in freeable if index in buffers)
    scratch = [kernel.register_bytes for kernel in graph.kernels]
    return _Schedule(before, behind, reads, sizes, buffers, input_bytes, scratch)


def believed(graph: KernelGraph, index: int) -> int:
    """Bytes of a storage in the compiler's own estimate."""
    return graph.storages[index].believed_bytes or graph.storages[index].num_bytes


def _pin_copies(graph: KernelGraph, before: list[set[int]]) -> None:
    """A kernel that issues or awaits a copy stays between the extern kernels around it in the graph."""
    anchor: int | None = None
    waiting: list[int] = []
    for place, kernel in enumerate(graph.kernels):
        if kernel.pinned:
            if anchor is not None:
                before[place].add(anchor)
            waiting.append(place)
        elif not kernel.fused:
            before[place].update(waiting)
            waiting = []
            anchor = place


def _estimated_peak(schedule: _Schedule, order: list[int]) -> int:
    step = {place: number for number, place in enumerate(order)}
    released = [0] * len(order)
    for buffer in schedule.buffers.values():
        if buffer.readers and not buffer.kept:
            released[max(step[place] for place in buffer.readers)] += buffer.num_bytes
    live = peak = schedule.input_bytes
    for number, place in enumerate(order):
        live += schedule.sizes[place]
        peak = max(peak, live)
        live -= released[number] + schedule.scratch[place]
    return peak


def _least_peak_first(schedule: _Schedule) -> list[int]:
    count = len(schedule.sizes)
    missing = [len(earlier) for earlier in schedule.before]
    ready = {place for place in range(count) if not missing[place]}
    users = {index: len(buffer.readers) + buffer.kept for index, buffer in schedule.buffers.items()}
    frees = list(schedule.scratch)
    for place in range(count):
        frees[place] += sum(schedule.buffers[i].num_bytes for i in schedule.reads[place] if users[i] == 1)
    live = schedule.input_bytes
    gap = max(live, sum(b.num_bytes for b in schedule.buffers.values() if b.kept)) - live
    highest = live + gap
    order: list[int] = []
    while ready:
        place = min(ready, key=lambda p: (_above(schedule.sizes[p], gap), schedule.sizes[p] - frees[p], p))
        ready.remove(place)
        order.append(place)
        live += schedule.sizes[place]
        highest = max(highest, live)
        live -= frees[place]
        gap = highest - live
        for other in schedule.behind[place]:
            missing[other] -= 1
            if not missing[other]:
                ready.add(other)
        for index in schedule.reads[place]:
            users[index] -= 1
            if users[index] == 1:
                for other in schedule.buffers[index].readers:
                    frees[other] += schedule.buffers[index].num_bytes
    return order


def _above(size: int, gap: int) -> int:
    return size if size > gap else 0


def _breadth_first(schedule: _Schedule) -> list[int]:
    missing = [len(earlier) for earlier in schedule.before]
    step: dict[int, int] = {}

    def entry(place: int) -> tuple[list[int], int]:
        return sorted(step[other] for other in schedule.before[place]), place

    heap = [entry(place) for place in range(len(missing)) if not missing[place]]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        _, place = heapq.heappop(heap)
        step[place] = len(order)
        order.append(place)
        for other in sorted(schedule.behind[place]):
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(heap, entry(other))
    return order


def _depth_first(schedule: _Schedule) -> list[int]:
    touched = [
        schedule.sizes[place] + sum(schedule.buffers[index].num_bytes for index in schedule.reads[place])
        for place in range(len(schedule.sizes))
    ]
    rank = sorted(range(len(touched)), key=lambda place: (touched[place], place))
    seen: set[int] = set()
    order: list[int] = []
    for start in rank:
        stack = [(start, False)]
        while stack:
            place, done = stack.pop()
            if done:
                order.append(place)
            elif place not in seen:
                seen.add(place)
                stack.append((place, True))
                pending = [other for other in schedule.before[place] if other not in seen]
                stack.extend((o, False) for o in sorted(pending, key=lambda o: (touched[o], o), reverse=True))
    return order
