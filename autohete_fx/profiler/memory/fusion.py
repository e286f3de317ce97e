"""Which generated kernels Inductor merges, and the order that this leaves.

Enters a `KernelGraph` with one kernel a buffer; the same graph leaves with merged kernels and without the buffers that only
their own kernel reads. The rules of ``torch/_inductor/scheduler.py`` and ``codegen/cpp.py`` are restated. Two generated kernels
merge if one loop nest holds both, they share data, lie near each other, and no third kernel stands between them. Consumers are
tried before kernels that merely read the same buffers. Merged kernels stand where their first part stood, as far as
dependencies allow.
"""

from autohete_fx.profiler.memory.kernels import Kernel, KernelGraph

_MAX_DISTANCE = 64
"""Kernels further apart than that stay apart, lest buffers live long."""

_MAX_PARTS = 16
"""Buffers that one horizontally merged kernel computes at most."""


class _Groups:
    """Merged kernels with their dependencies; ``above`` holds all ancestors of a group as bits."""

    def __init__(self) -> None:
        self.kernels: list[Kernel | None] = []
        self.producers: list[set[int]] = []
        self.above: list[int] = []
        self.first: list[int] = []
        self.last: list[int] = []
        self.parts: list[int] = []

    def add(self, kernel: Kernel, producers: set[int], order: int) -> int:
        self.kernels.append(kernel)
        self.producers.append(set(producers))
        self.above.append(self._closure(producers))
        self.first.append(order)
        self.last.append(order)
        self.parts.append(1)
        return len(self.kernels) - 1

    def kernel(self, group: int) -> Kernel:
        kernel = self.kernels[group]
        assert kernel is not None
        return kernel

    def _closure(self, producers: set[int]) -> int:
        bits = 0
        for producer in producers:
            bits |= self.above[producer] | (1 << producer)
        return bits

    def can_merge(self, first: int, second: int) -> bool:
        """One loop nest holds both, neither must come after the other, and no third group depends on one while the other depends
        on it."""
        if not loops_match(self.kernel(first), self.kernel(second)):
            return False
        for one, other in ((first, second), (second, first)):
            if self.kernel(other).after & self.kernel(one).writes.keys():
                return False
        for one, other in ((first, second), (second, first)):
            if any(self.above[p] >> one & 1 for p in self.producers[other] if p != one):
                return False
        return True

    def near(self, first: int, second: int) -> bool:
        spread = max(abs(self.first[first] - self.last[second]), abs(self.first[second] - self.last[first]))
        return spread <= _MAX_DISTANCE

    def merge(self, into: int, other: int) -> None:
        _absorb(self.kernel(into), self.kernel(other))
        self.kernels[other] = None
        self.producers[into] = (self.producers[into] | self.producers[other]) - {into, other}
        self.first[into] = min(self.first[into], self.first[other])
        self.last[into] = max(self.last[into], self.last[other])
        self.parts[into] += self.parts[other]
        for producers in self.producers:
            if other in producers:
                producers.discard(other)
                producers.add(into)
        self.above[into] = self._closure(self.producers[into])
        gone, bits = 1 << other, self.above[into] | (1 << into)
        for group, kernel in enumerate(self.kernels):
            if kernel is not None and group != into and self.above[group] & (gone | (1 << into)):
                self.above[group] = (self.above[group] | bits) & ~gone

    def ordered(self) -> list[Kernel]:
        """By the place of the first part, each after what it depends on."""
        seen: set[int] = set()
        result: list[Kernel] = []
        for start in sorted((g for g, k in enumerate(self.kernels) if k is not None), key=lambda g: self.first[g]):
            stack = [(start, False)]
            while stack:
                group, done = stack.pop()
                if done:
                    result.append(self.kernel(group))
                elif group not in seen:
                    seen.add(group)
                    stack.append((group, True))
                    pending = sorted(self.producers[group] - seen, key=lambda g: self.first[g], reverse=True)
                    stack.extend((producer, False) for producer in pending)
        return result


def fuse_kernels(graph: KernelGraph) -> None:
    """Merge the kernels of a graph in place, and drop the buffers that nobody else reads."""
    groups = _Groups()
    made_by: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for order, kernel in enumerate(graph.kernels):
        reads = list(kernel.reads)
        producers = {made_by[index] for index in (*reads, *kernel.after) if index in made_by}
        for index in kernel.writes:
            if index in made_by:  # it changes memory in place: behind all who read it before
                producers |= {made_by[index]} | readers.get(index, set())
        group = groups.add(kernel, producers, order)
        if kernel.fused:
            group = _merge_vertically(groups, group, producers)
            sharing = {reader for index in reads for reader in readers.get(index, ())}
            group = _merge_horizontally(groups, group, sharing)
        for index in reads:
            readers.setdefault(index, set()).add(group)
        if group != len(groups.kernels) - 1 or any(k is None for k in groups.kernels[-1:]):
            _rename(made_by, readers, groups, group)
        made_by.update(dict.fromkeys(groups.kernel(group).writes, group))
    graph.kernels = groups.ordered()
    _drop_internal(graph)


def _merge_vertically(groups: _Groups, group: int, producers: set[int]) -> int:
    for producer in sorted(producers, reverse=True):
        if groups.kernels[producer] is not None and groups.can_merge(producer, group):
            groups.merge(producer, group)
            group = producer
    return group


def _merge_horizontally(groups: _Groups, group: int, sharing: set[int]) -> int:
    for other in sorted(sharing, reverse=True):
        if other == group or groups.kernels[other] is None or not groups.kernel(other).fused:
            continue
        small = groups.parts[group] + groups.parts[other] <= _MAX_PARTS
        if small and groups.near(group, other) and groups.can_merge(other, group):
            groups.merge(other, group)
            group = other
    return group


def _rename(made_by: dict[int, int], readers: dict[int, set[int]], groups: _Groups, group: int) -> None:
    """Merged groups go by the name of the one that is left."""
    kernel = groups.kernel(group)
    for index in kernel.writes:
        made_by[index] = group
    for index in (*kernel.reads, *kernel.writes):
        known = readers.get(index)
        if known is not None:
            gone = {other for other in known if groups.kernels[other] is None}
            if gone:
                readers[index] = (known - gone) | {group}


def loops_match(first: Kernel, second: Kernel) -> bool:
    """Both are generated, and a loop nest over (rows, iterations) can hold both; ``rows`` 0 matches nothing."""
    if not (first.fused and second.fused and first.rows and second.rows):
        return False
    if first.iterations == second.iterations:
        return first.rows == second.rows or first.iterations == first.rows or second.iterations == second.rows
    return first.rows == second.iterations or second.rows == first.iterations


def _absorb(kernel: Kernel, other: Kernel) -> None:
    kernel.nodes.update(other.nodes)
    kernel.reads.update(other.reads)
    kernel.writes.update(other.writes)
    kernel.after |= other.after
    kernel.parts.extend(other.parts)
    kernel.rows = min(kernel.rows, other.rows)
    kernel.iterations = max(kernel.iterations, other.iterations)


def _drop_internal(graph: KernelGraph) -> None:
    """A buffer that is read only by the kernel that writes it stays in registers."""
    readers: dict[int, set[int]] = {}
    for place, kernel in enumerate(graph.kernels):
        for index in kernel.reads:
            readers.setdefault(index, set()).add(place)
    kept = {index for index in graph.outputs if index is not None}
    for place, kernel in enumerate(graph.kernels):
        internal = [i for i in kernel.writes if i not in kept and readers.get(i, set()) == {place}]
        for index in internal:
            del kernel.writes[index]
            del kernel.reads[index]
            kernel.register_bytes += graph.storages[index].num_bytes
        for index in kernel.writes:
            kernel.reads.pop(index, None)
