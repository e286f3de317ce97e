"""Sizes as plain numbers: what a plan counts where Dynamo traced a size as a symbol.

A symbol has a hint, its value in the call that was traced. Reading that adds no guard, as ``int(size)`` would, which makes the
graph one for this value alone. A size that depends on values, such as how many elements a mask selects, has no hint. The most that
it can be counts, where PyTorch knows that.
"""

import math

import torch
from torch import fx


def hint(size: int | torch.SymInt) -> int:
    """A size as a plain number, through its hint and without a guard where it is symbolic. It is the most that it can be where it
    depends on values, and 1 where nobody knows that."""
    if isinstance(size, torch.SymInt):
        symbol = size.node
        return int(symbol.hint) if is_known(size) and symbol.hint is not None else most(size) or 1
    return int(size)


def most(size: torch.SymInt) -> int | None:
    """The most that a symbolic size can be; None where that is not known."""
    symbol = size.node
    if symbol.is_nested_int():
        return None
    upper = symbol.shape_env.bound_sympy(symbol.expr).upper
    return int(upper) if upper.is_finite and upper < _ENDLESS else None


_ENDLESS = 2**48
"""No size is larger. PyTorch bounds one that it knows nothing of by the largest integer."""


def is_known(size: torch.SymInt) -> bool:
    """Whether a symbolic size has a hint: it depends on no values, and is not that of a jagged dimension."""
    return not size.node.is_nested_int() and size.node.has_hint()


def num_bytes(value: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return math.prod(hint(size) for size in value.shape) * value.element_size()


def unbounded(graph: fx.Graph) -> list[str]:
    """Nodes of a graph with a size that depends on values, and of which nobody knows how large it can be."""
    found: list[str] = []
    for node in graph.nodes:
        value = node.meta.get("example_value", node.meta.get("val"))
        sizes = value.shape if isinstance(value, torch.Tensor) else ()
        symbols = [size for size in sizes if isinstance(size, torch.SymInt)]
        if any(not is_known(size) and not size.node.is_nested_int() and most(size) is None for size in symbols):
            found.append(node.name)
    return found
