"""Which memory a tensor is over."""

import torch
from torch import Tensor


def address_of(t: Tensor) -> int | None:
    """Of the memory that the tensor is a view of; None for a tensor of another kind, which may stand for any memory."""
    try:
        with torch._C.DisableTorchFunction():  # or the fence would wait for it
            return t.untyped_storage().data_ptr() or None
    except RuntimeError:  # it has no storage
        return None
