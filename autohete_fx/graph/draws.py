"""Which nodes of a graph draw random numbers. In: nodes. Out: answers about them."""

import torch
from torch import fx

from autohete_fx.internals.operators import OpOverload, run_and_save_rng_state, run_with_rng_state

DRAWN_AGAIN = (run_and_save_rng_state, run_with_rng_state)
"""Operations by which PyTorch's partitioner replaces a random one that is computed again: in forward, and in backward."""

_SEEDS = ("prims::inductor_seed", "prims::inductor_seeds")
"""By name: they exist once Inductor has been imported."""


def draws(node: fx.Node) -> bool:
    """Whether the node draws from a generator, which has other numbers for whatever draws after it."""
    is_random = isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return is_random or node.target is run_and_save_rng_state


def makes_seeds(node: fx.Node) -> bool:
    """Whether a node makes the seeds that random numbers of any module are made from. PyTorch 2.15 says that the first module that
    draws has made it."""
    return isinstance(node.target, OpOverload) and node.target._schema.name in _SEEDS
