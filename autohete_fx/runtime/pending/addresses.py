"""Which memory a tensor is over."""

from torch import Tensor

from autohete_fx.internals import versions
from autohete_fx.internals.modes import DisableTorchFunction
from autohete_fx.internals.tensors import local_of


def address_of(t: Tensor) -> int | None:
    """The address of the memory that the tensor, or a DTensor's local tensor, is a view of.

    None stands for a tensor of another kind, which may have any memory.
    """
    if versions.is_dtensor(t):
        t = local_of(t)
    try:
        with DisableTorchFunction():  # or the fence would wait for it
            return t.untyped_storage().data_ptr() or None
    except RuntimeError:  # it has no storage
        return None
