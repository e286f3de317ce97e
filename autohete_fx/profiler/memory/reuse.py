"""Which dead buffers Inductor hands on to later ones.

Enter kernels in the order they run, and when each storage is last used. Leaves a map from a storage to the one whose memory it
takes over. Two rules of ``torch/_inductor/codegen/wrapper.py`` and ``scheduler.py`` are restated:

* a generated kernel writes over an input of the same size that dies with it and that only one part of it reads;
* a buffer that died is kept for a later one of the same size and dtype. It is not where that would raise the peak that Inductor
  estimates. Its estimate takes host tensors for device ones, so that with offloading it keeps more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autohete_fx.profiler.memory.kernels import Kernel, KernelGraph
from autohete_fx.profiler.memory.ordering import believed


@dataclass(slots=True)
class Lifetimes:
    """Bytes and last uses of a graph's storages.

    Attributes:
        num_bytes: by storage; 0 for what is not counted.
        root: by storage, the one whose memory it shows: saved tensors may be views of one storage.
        last_use: place of the kernel that reads or writes a storage last; the number of kernels for outputs.
        at_start: storages that are there when the graph starts.
        lent: those of them that nothing may be written over.
    """

    num_bytes: list[int]
    root: list[int]
    last_use: dict[int, int]
    at_start: set[int]
    lent: set[int]


def plan_reuse(
    graph: KernelGraph, kernels: Sequence[Kernel], launches: Sequence[Sequence[Kernel]], lifetimes: Lifetimes
) -> dict[int, int]:
    """New storage to the dead or dying one in whose memory it lies."""
    estimate = _estimated_live(graph, kernels, lifetimes)
    highest = max(estimate, default=0)
    taken_over: dict[int, int] = {}
    pool: dict[tuple[int, str], list[tuple[int, int]]] = {}
    born = {index: 0 for index in lifetimes.at_start}
    place = 0
    for launch in launches:
        for offset, kernel in enumerate(launch):
            now = place + offset
            dying = _dying(kernel, now, lifetimes, set(taken_over.values())) if kernel.fused else []
            for index in dict.fromkeys(lifetimes.root[i] for i in kernel.writes):
                size = lifetimes.num_bytes[index]
                if index in born or not size:
                    continue
                born[index] = now
                fitting = (i for i in dying if lifetimes.num_bytes[i] == size and _in_place(kernel, i, index))
                source = next(fitting, None)
                if source is not None:
                    dying.remove(source)
                    taken_over[index] = source
                    continue
                shelf = pool.get((size, graph.storages[index].dtype), [])
                if not shelf or not graph.storages[index].poolable:
                    continue
                released, source = shelf[-1]
                between = range(released + 1, now)
                if not between or size + max(estimate[p] for p in between) <= highest:
                    shelf.pop()
                    taken_over[index] = source
                    for p in between:
                        estimate[p] += size
        place += len(launch)
        gone = set(taken_over.values())
        for index in dict.fromkeys(lifetimes.root[i] for kernel in launch for i in (*kernel.reads, *kernel.writes)):
            dead = index in born and index not in lifetimes.at_start and lifetimes.last_use.get(index, -1) < place
            if dead and index not in gone and graph.storages[index].poolable and lifetimes.num_bytes[index]:
                key = (lifetimes.num_bytes[index], graph.storages[index].dtype)
                pool.setdefault(key, []).append((place - 1, index))
    return taken_over


def _dying(kernel: Kernel, place: int, lifetimes: Lifetimes, gone: set[int]) -> list[int]:
    """Storages that a kernel may write over: it is the last to read them."""
    read = dict.fromkeys(lifetimes.root[index] for index in kernel.reads)
    return [
        i
        for i in read
        if lifetimes.last_use.get(i) == place and lifetimes.num_bytes[i] and i not in gone | lifetimes.lent
    ]


def _in_place(kernel: Kernel, source: int, target: int) -> bool:
    """The part that writes ``target`` is the only one that reads ``source``, and reads it in the same order."""
    readers = [part for part in kernel.parts if source in part.reads]
    return len(readers) == 1 and target in readers[0].writes and source in readers[0].in_place


def _estimated_live(graph: KernelGraph, kernels: Sequence[Kernel], lifetimes: Lifetimes) -> list[int]:
    """Bytes that Inductor believes to be live at each kernel. It counts saved views of one storage one by one."""
    end = len(kernels)
    born = {index: 0 for index in range(len(lifetimes.root)) if lifetimes.root[index] in lifetimes.at_start}
    dies: dict[int, int] = {}
    for place, kernel in enumerate(kernels):
        for index in kernel.writes:
            born.setdefault(index, place)
        for index in (*kernel.reads, *kernel.writes):
            dies[index] = place
    dies.update({index: end for index in graph.outputs if index is not None})
    change = [0] * (end + 1)
    for index, place in born.items():
        if index in dies:
            change[place] += believed(graph, index)
            change[min(end, dies[index] + 1)] -= believed(graph, index)
    live: list[int] = []
    held = 0
    for kernel, delta in zip(kernels, change[:end], strict=True):
        held += delta
        live.append(held + kernel.register_bytes)
    return live
