"""AOTAutograd's partitioners, what they take for values of other kinds, and graph modules as they make them."""

import torch
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module

__all__ = ["get_default_op_list", "is_opaque", "make_graph_module", "min_cut_rematerialization_partition"]


def is_opaque(value: object) -> bool:
    """Whether the value of a node is an object that graphs only hand on, such as the mesh of a DTensor."""
    return isinstance(value, torch.ScriptObject | FakeScriptObject)
