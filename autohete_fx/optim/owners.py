"""Which optimizer updates a parameter.

In: the parameters of every ``autohete_fx.AdamW``, as it is built. Out: ``optimizer_of``, which the planner's caller
asks for the bytes of the states that a parameter will have. Both sides are held weakly: asking keeps nothing
alive.
"""

import weakref
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from autohete_fx.optim.adamw import AdamW

_owners = WeakIdKeyDictionary()


def register_owner(param: Tensor, optimizer: "AdamW") -> None:
    """Record that ``optimizer`` updates ``param``. The latest optimizer of a parameter wins."""
    _owners[param] = weakref.ref(optimizer)


def optimizer_of(param: Tensor) -> "AdamW | None":
    """The ``autohete_fx.AdamW`` that updates ``param``; None where there is none, or it is gone."""
    reference = _owners.get(param)
    return None if reference is None else reference()
