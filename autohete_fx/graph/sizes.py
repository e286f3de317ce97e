"""Sizes as plain numbers: what a plan counts where Dynamo traced a size as a symbol.

A symbol has a hint, its value in the call that was traced. Reading that adds no guard, as ``int(size)`` would, which makes the
graph one for this value alone.
"""

import math

import torch


def hint(size: int | torch.SymInt) -> int:
    """A size as a plain number, through its hint and without a guard where it is symbolic; 1 where it has none."""
    if isinstance(size, torch.SymInt):
        symbol = size.node
        return int(symbol.hint) if is_known(size) and symbol.hint is not None else 1
    return int(size)


def is_known(size: torch.SymInt) -> bool:
    """Whether a symbolic size has a hint: it depends on no values, and is not that of a jagged dimension."""
    return not size.node.is_nested_int() and size.node.has_hint()


def num_bytes(value: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return math.prod(hint(size) for size in value.shape) * value.element_size()
