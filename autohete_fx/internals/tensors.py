"""Storages over given memory, PyTorch's grouping of tensors for its foreach kernels, and the backward that runs.

Also the local tensor of a DTensor, what tensors are made of that wrap others, and which sizes a program has marked as dynamic.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._C import _construct_storage_from_data_pointer as storage_at
from torch._C import _current_autograd_node as current_autograd_node
from torch._C import _current_graph_task_id as current_graph_task_id
from torch.autograd import Variable
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as group_by_device_and_dtype
from torch.utils._foreach_utils import _has_foreach_support as has_foreach_support
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_made_of_tensors

__all__ = [
    "after_backward",
    "current_autograd_node",
    "current_graph_task_id",
    "group_by_device_and_dtype",
    "has_foreach_support",
    "is_made_of_tensors",
    "local_of",
    "parts_of",
    "storage_at",
]


def after_backward(call: Any) -> None:
    """Call back when the backward that runs in this thread has ended, and saves nothing any more."""
    Variable._execution_engine.queue_callback(call)


def dims_marked_dynamic(tensor: torch.Tensor | None) -> Collection[int]:
    """Those that the program has given to ``torch._dynamo.mark_dynamic``."""
    return getattr(tensor, "_dynamo_dynamic_indices", ())


def parts_of(value: object) -> Iterator[torch.Tensor]:
    """A tensor, or those that it is made of, such as the values and the offsets of a jagged one; nothing for another value."""
    if is_made_of_tensors(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from parts_of(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value


def local_of(dtensor: Any) -> Any:
    """The tensor that holds a DTensor's part on this rank: itself, where ``to_local`` makes a view."""
    return dtensor._local_tensor
