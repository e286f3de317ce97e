"""Operators, what draws random numbers, and nests of values."""

from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OrderedSet",
    "TreeSpec",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "tree_flatten",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
