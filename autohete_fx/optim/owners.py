"""Which optimizer updates a parameter.

In: the parameters of every optimizer of ours, as it is built. Out: ``optimizer_of``, which the planner's caller
asks for the bytes of the states that a parameter will have, and ``num_changes``, which tells whether an answer may have
changed. Both sides are held weakly: asking keeps nothing alive.
"""

import weakref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.optim.base import Owner

_owners = WeakIdKeyDictionary()
_num_changes = 0


def register_owner(param: Tensor, optimizer: Owner) -> None:
    """Record that ``optimizer`` updates ``param``. The latest optimizer of a parameter wins."""
    _owners[param] = weakref.ref(optimizer, _note_change)
    _note_change()


def num_changes() -> int:
    """How often so far an optimizer got a parameter, or went."""
    return _num_changes


def optimizer_of(param: Tensor) -> Owner | None:
    """The optimizer of ours that updates ``param``; None where there is none, or it is gone."""
    reference = _owners.get(param)
    return None if reference is None else reference()


def _note_change(_: object = None) -> None:
    global _num_changes
    _num_changes += 1
