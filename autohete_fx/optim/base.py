"""What the rest of the package knows of an optimizer that steps where a plan says."""

from collections import defaultdict
from typing import Any, Protocol

from torch import Tensor

from autohete_fx.ir import Overlap
from autohete_fx.optim.host_copy import HostCopies


class Owner(Protocol):
    """An optimizer whose states plans may move, and whose updates may overlap with compute.

    Attributes:
        overlap: what its updates may overlap with.
        max_grad_norm: that gradients are clipped to; None where they are not.
        param_groups, state: as in ``torch.optim``.
        host_copies: of its parameters.
    """

    overlap: Overlap
    max_grad_norm: float | None
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    host_copies: HostCopies

    @property
    def starts_in_backward(self) -> bool:
        """Whether updates may start in a backward pass now."""
        ...

    def group_of(self, param: Tensor) -> dict[str, Any] | None:
        """The group of a parameter; None where it has none."""
        ...

    def state_bytes_of(self, param: Tensor) -> int:
        """Bytes of the states that steps hold for ``param``."""
        ...
