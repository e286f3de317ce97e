"""Graphs traced on one device as if they had been traced on another.

Fake CUDA tensors cannot run autograd where there is no driver. A step for a GPU that is not there is therefore traced on a CPU.
Every value of its graphs is then said to be on the GPU, because kinds of devices differ in what counts. They differ in rounding
of allocations, expressions that the compiler stores, and kernels that it fuses. Two things stay those of the CPU. Attention is
the CPU's fused operator, which saves and computes what CUDA's does: its output and one number a row. Decompositions that
PyTorch chooses by device are the CPU's, too.
"""

from typing import Any

import torch
from torch import fx

from autohete_fx.internals.modes import FakeTensor, no_python_dispatcher, unset_fake_temporarily


def retarget(graph_module: fx.GraphModule, device: torch.device) -> None:
    """Say in every node's ``meta["val"]`` that it is on ``device``, in place. Sizes must be numbers."""
    with unset_fake_temporarily(), no_python_dispatcher():  # tracing would go through each for every value
        for node in graph_module.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = _on(node.meta["val"], device)


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_on(item, device) for item in value)
    if not isinstance(value, FakeTensor):
        return value
    like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, like, device)
