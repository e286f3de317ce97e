"""Kernels and the memory that they read and write: what a graph becomes when it is compiled."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Storage:
    """Memory that one kernel fills, or that a placeholder brings along.

    Attributes:
        name: of the node that it belongs to.
        num_bytes: device bytes; 0 on the host.
        is_input: it belongs to a placeholder.
        dtype: a dead buffer is handed on to one of the same dtype only.
        poolable: its memory may be handed on to another buffer after its death.
        believed_bytes: what the compiler counts, where that differs; else 0. It takes host tensors for device ones, and counts
            a placeholder by its elements although a saved view holds the whole of its base.
    """

    name: str
    num_bytes: int
    is_input: bool = False
    dtype: str = ""
    poolable: bool = True
    believed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One buffer's worth of a generated kernel.

    Attributes:
        reads: storages that it reads.
        in_place: those that it reads in the order in which it writes, and so may write over.
        writes: storages that it writes.
    """

    reads: frozenset[int]
    in_place: frozenset[int]
    writes: frozenset[int]


@dataclass(slots=True)
class Kernel:
    """The work of one launch: an extern call, or a loop nest that holds several nodes.

    Attributes:
        nodes: names of graph nodes computed here; a node inlined into several kernels is in each.
        reads, writes: indexes into ``KernelGraph.storages``.
        fused: generated code, which may write over an input that it is the last to read.
        workspace_bytes: scratch that lives during the call only.
        pinned: it issues or awaits a copy.
        parts: what a generated kernel was merged from.
        after: storages that must be made before it runs, although it does not read them.
        register_bytes: buffers that merging did away with; the compiler's estimate of memory still counts them.
        iterations, rows: size of its loop nest, and of the outer part of it that reductions leave.
    """

    nodes: dict[str, None]
    reads: dict[int, None]
    writes: dict[int, None]
    fused: bool
    workspace_bytes: int = 0
    iterations: int = 0
    rows: int = 0
    pinned: bool = False
    parts: list[Part] = field(default_factory=list)
    register_bytes: int = 0
    after: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """Its last node."""
        return next(reversed(self.nodes))


@dataclass(slots=True)
class KernelGraph:
    """Kernels in graph order.

    Attributes:
        storages: everything that is read or written.
        storage_of: graph node name to the storages of its value (several for a tuple); nodes without memory absent.
        outputs: per graph output the index of its storage, or None.
        inputs: placeholder name to the index of its storage.
    """

    kernels: list[Kernel] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    storage_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    outputs: list[int | None] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
