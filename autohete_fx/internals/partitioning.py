"""AOTAutograd's partitioners, and graph modules as they make them."""

from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module

__all__ = ["get_default_op_list", "make_graph_module", "min_cut_rematerialization_partition"]
