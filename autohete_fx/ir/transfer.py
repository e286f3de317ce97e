"""Transfers: the copies of a rewritten graph, in schedule order."""

from dataclasses import dataclass

from autohete_fx.ir.lane import Lane


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One inserted copy.

    Attributes:
        graph: ``forward``, ``backward`` or ``inference``.
        node: name of the node that issues it.
        op: ``prefetch``, ``offload`` or ``reload``.
        block: index of the block that it serves.
        lane: where it runs.
        priority: smaller is sooner, among transfers that wait for the same lane.
        num_bytes: bytes copied.
        waits_on: name of the node after which it may be issued; empty for the start of the graph.
        needed_by: name of the first node that needs it complete.
    """

    graph: str
    node: str
    op: str
    block: int
    lane: Lane
    priority: int
    num_bytes: int
    waits_on: str
    needed_by: str
