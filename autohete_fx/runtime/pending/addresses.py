"""Which memory a tensor is over."""

from torch import Tensor

from autohete_fx.internals.modes import DisableTorchFunction


def address_of(t: Tensor) -> int | None:
    """The address of the memory that the tensor is a view of; None for a tensor of another kind, which may stand for any memory."""
    try:
        with DisableTorchFunction():  # or the fence would wait for it
            return t.untyped_storage().data_ptr() or None
    except RuntimeError:  # it has no storage
        return None
