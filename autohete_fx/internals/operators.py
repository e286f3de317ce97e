"""Operators, what draws random numbers, and nests of values."""

from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_iter, tree_leaves, tree_map

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OrderedSet",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "tree_iter",
    "tree_leaves",
    "tree_map",
]
