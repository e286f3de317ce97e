"""The notes that our stages write on graph nodes: the only code that touches ``node.meta`` under our keys.

Two annotations exist. Every node of the captured graph carries the index of its block; partitioning and the
compiler's passes copy it along. Every node that a pass inserts carries an `Inserted`.
"""

from dataclasses import dataclass

from torch import fx

from autohete_fx.ir import Lane

_BLOCK = "autohete_block"
_INSERTED = "autohete_inserted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inserted:
    """The purpose of an inserted node.

    Attributes:
        op: its name in `autohete_fx.graph.ops`, such as ``offload`` or ``wait``.
        what: ``parameter``, ``gradient`` or ``activation``.
        block: index of the block that owns the tensor.
        slot: position in the graph's order of regions. The node belongs after all matrix products of earlier regions and, if
            ``before_slot``, before those of region ``slot`` and later. In a forward graph block b is region b; in a backward
            graph of n blocks it is region n - 1 - b.
        before_slot: False for a wait that may sink to its first use.
        num_bytes: of the tensor that is copied, waited for, updated or measured.
        lane, priority: None until lanes are assigned, and for what only waits.
    """

    op: str
    what: str
    block: int
    slot: int
    before_slot: bool
    num_bytes: int
    lane: Lane | None = None
    priority: int | None = None


def set_block(node: fx.Node, block: int) -> None:
    """Say which block a node belongs to."""
    node.meta[_BLOCK] = block


def block_of(node: fx.Node) -> int | None:
    """The node's block, or None for nodes that no grouping has seen (made by a later pass)."""
    return node.meta.get(_BLOCK)


def set_inserted(node: fx.Node, inserted: Inserted) -> None:
    """Mark a node as inserted by one of our passes."""
    node.meta[_INSERTED] = inserted
    node.meta[_BLOCK] = inserted.block


def inserted(node: fx.Node) -> Inserted | None:
    """The node's `Inserted`, or None for nodes that were in the graph already."""
    return node.meta.get(_INSERTED)
