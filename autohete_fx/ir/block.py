"""Blocks: the units of decision, and the graph that they form."""

import enum
from dataclasses import dataclass


class BlockKind(enum.Enum):
    """Where a block stands relative to the repeated layers."""

    PROLOGUE = "prologue"
    LAYER = "layer"
    BRIDGE = "bridge"
    """The block between two stacks of layers, such as an encoder's final norm and a decoder's embedding."""
    EPILOGUE = "epilogue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One group of nodes of the joint graph: a transformer layer, or what lies before, between or after layers.

    Attributes:
        index: position in forward execution order, 0-based, over all groups.
        kind: prologue, layer, bridge or epilogue.
        module_fqn: dotted path of the layer's module, such as ``model.layers.3``; empty where no path is known.
        forward_nodes: names of the joint graph's forward nodes, in graph order.
        backward_nodes: names of its backward nodes, in graph order.
        param_fqns: parameters first used here, in graph order. A tied parameter belongs to its first user.
        digest: equal for blocks with the same operators, shapes, dtypes and wiring, whatever their names.
    """

    index: int
    kind: BlockKind
    module_fqn: str
    forward_nodes: tuple[str, ...]
    backward_nodes: tuple[str, ...]
    param_fqns: tuple[str, ...] = ()
    digest: str = ""

    @property
    def label(self) -> str:
        """The name that tables print: the module path, or the kind where there is none."""
        return self.module_fqn or self.kind.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Activations that ``producer`` computes and ``consumer`` reads in forward."""

    producer: int
    consumer: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGraph:
    """All blocks in execution order and the activations that pass between them.

    Every non-placeholder, non-output node of the joint graph stands in exactly one block.
    """

    blocks: tuple[Block, ...]
    edges: tuple[Edge, ...]
    digest: str
