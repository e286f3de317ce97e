"""Listeners, whom compiled code tells of a parameter's gradient while backward still runs.

In: parameters, and the one who waits for their gradients. A compiled graph is one node of autograd's graph, which gives all
gradients at its end. A node of the graph (`autohete_fx.passes.announce_gradients`) therefore tells of those that are there
before. Autograd adds them afterwards as always, unless the listener has put them elsewhere.
"""

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


class Listener(Protocol):
    """One that waits for gradients.

    Attributes:
        device_bytes: that it takes while it waits and until all is done, beside a copy of the gradients.
    """

    device_bytes: int

    def told(self, param: Tensor, grad: Tensor) -> None:
        """A graph's gradient of a parameter in this backward pass.

        Args:
            param: as autograd knows it.
            grad: on the device; of a DTensor its local tensor. Its memory is the graph's.
        """
        ...


_listeners = WeakIdKeyDictionary()  # parameter -> weak reference to its listener


def listen(params: Iterable[Tensor], listener: Listener) -> None:
    """From now on, graphs that are compiled tell a listener of these gradients. It is not kept alive."""
    for param in params:
        _listeners[param] = weakref.ref(listener)


def listener_of(param: Tensor) -> Listener | None:
    """The one that waits for the gradient of a parameter; None where nobody does."""
    reference = _listeners.get(param)
    return None if reference is None else reference()


def tell(param: Tensor, grad: Tensor) -> None:
    """Hand a gradient to whoever waits for it."""
    listener = listener_of(param)
    if listener is not None:
        listener.told(param, grad)
