"""The values that treatments of activations keep, and those that they compute again.

In: a node of an ATen forward graph, and a treatment that recomputes. Out: whether its value is kept. The pass that tags nodes and
the profiler that counts bytes and seconds both ask here. A plan is thus written into the graph as it was costed.
"""

import functools
import operator
from typing import Any

import torch
from torch import fx

from autohete_fx.graph.sizes import num_bytes
from autohete_fx.internals.operators import OpOverload
from autohete_fx.internals.partitioning import get_default_op_list
from autohete_fx.ir import Activations

_SMALL_SHARE = 4
"""A value so many times smaller than what it is made from is kept. It is a norm's statistic or a dropout's mask: to make it
again would read, or draw, all of that and save next to nothing. PyTorch's partitioner draws the same line."""

_CHEAP_NAMES = frozenset(
    "aten::cat aten::stack aten::constant_pad_nd aten::native_layer_norm aten::_softmax aten::_log_softmax "
    "prims::inductor_random prims::inductor_randint prims::inductor_lookup_seed prims::fma".split()
)
"""Operators that read and write memory, which PyTorch's list of those that fuse leaves out."""


def is_kept(node: fx.Node, activations: Activations) -> bool:
    """Whether a treatment that recomputes keeps the value, which it computes again otherwise."""
    if node.op != "call_function" or activations not in _KEPT:
        return False
    if node.target is operator.getitem:
        return is_kept(node.all_input_nodes[0], activations)
    return _KEPT[activations](node)


@functools.cache
def _is_cheap(target: Any) -> bool:
    """Whether an operator does no more than walk over its arguments. One that is not known is expensive."""
    if not isinstance(target, OpOverload):
        return target in get_default_op_list().fusible_ops
    if torch.Tag.pointwise in target.tags or target.overloadpacket in get_default_op_list().fusible_ops:
        return True
    views = [result.alias_info is not None and not result.alias_info.is_write for result in target._schema.returns]
    return target._schema.name in _CHEAP_NAMES or (bool(views) and all(views))


def _is_small(node: fx.Node) -> bool:
    return 0 < _SMALL_SHARE * _num_bytes(node) <= sum(map(_num_bytes, node.all_input_nodes))


_KEPT = {Activations.SELECTIVE: lambda node: not _is_cheap(node.target) or _is_small(node)}
"""By treatment in `PARTIAL`."""


def _num_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else (value,)
    return sum(num_bytes(t) for t in tensors if isinstance(t, torch.Tensor))
