"""Which optimizer updates a parameter.

In: the parameters of every optimizer of ours, as it is built. Out: ``optimizer_of``, which the planner's caller asks for the
bytes of the states that a parameter will have. ``num_changes`` tells whether an answer may have changed. Both sides are held
weakly: asking keeps nothing alive.
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.ir import Overlap
from autohete_fx.optim.host_copy import HostCopies
from autohete_fx.optim.rule import Rule
from autohete_fx.runtime.held import held


class Owner(Protocol):
    """An optimizer whose states plans may move, and whose updates may overlap with compute.

    Attributes:
        overlap: what its updates may overlap with.
        max_grad_norm: that gradients are clipped to; None where they are not.
        param_groups, state: as in ``torch.optim``.
        host_copies: of its parameters.
        has_stepped: whether a step has made states, and compiled kernels, for where they are.
    """

    overlap: Overlap
    max_grad_norm: float | None
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    host_copies: HostCopies
    has_stepped: bool

    @property
    def starts_in_backward(self) -> bool:
        """Whether updates may start in a backward pass now."""
        ...

    def rule_of(self, param: Tensor) -> Rule:
        """The arithmetic of a parameter's updates."""
        ...

    def group_of(self, param: Tensor) -> dict[str, Any] | None:
        """The group of a parameter; None where it has none."""
        ...

    def state_bytes_of(self, param: Tensor) -> int:
        """Bytes of the states that steps hold for ``param``."""
        ...

    def update_share_of(self, param: Tensor) -> float:
        """Bytes that an update of ``param`` reads and writes, over those of an AdamW update."""
        ...

    def uses_mixed(self, param: Tensor) -> bool:
        """Whether the kernel for 16-bit parameters updates ``param``."""
        ...

    def product_flops_of(self, param: Tensor) -> float:
        """Floating point operations of matrix products in an update of ``param``."""
        ...

    def workspace_bytes_of(self, param: Tensor) -> int:
        """Memory that an update of ``param`` needs beside it, its gradient and its states."""
        ...


_owners: MutableMapping[Tensor, "tuple[weakref.ref[Owner], ...]"] = WeakIdKeyDictionary()
"""By parameter; the one that updates it comes last."""
_num_changes = 0


def claim(params: Iterable[Tensor], optimizer: Owner) -> None:
    """Record that ``optimizer`` updates these from now on, and what this rank holds of them: it was made, or steps for the first
    time. When it is gone, the one before it does again."""
    for param in params:
        if optimizer_of(param) is not optimizer:
            _owners[param] = _owners[held(param)] = (*_others(param, optimizer), weakref.ref(optimizer, note_change))
            note_change()


def forget_owner(param: Tensor, optimizer: object) -> None:
    """``optimizer`` does not update ``param`` after all."""
    _owners[param] = _owners[held(param)] = _others(param, optimizer)
    note_change()


def _others(param: Tensor, optimizer: object) -> "tuple[weakref.ref[Owner], ...]":
    return tuple(each for each in _owners.get(param, ()) if each() not in (None, optimizer))


def num_changes() -> int:
    """How often so far an optimizer got a parameter, or went, or needs other states."""
    return _num_changes


def optimizer_of(param: Tensor) -> Owner | None:
    """The optimizer of ours that updates ``param``; None where there is none, or it is gone."""
    living = (optimizer for each in reversed(_owners.get(param, ())) if (optimizer := each()) is not None)
    return next(living, None)


def note_change(_: object = None) -> None:
    """The states that optimizers hold for their parameters may be others from now on."""
    global _num_changes
    _num_changes += 1
