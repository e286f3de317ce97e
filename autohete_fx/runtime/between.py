"""Measures what code outside of a compiled model takes between its forward and its backward, such as a loss.

In: a call when a forward has ended, and one when the next backward begins. Out: bytes beyond those that lived when the forward
ended. Why: no graph has that code, so that no plan counts it, and it runs where activations take most.

Cost: two readings of the device's memory, in the few passes that are watched. Like a `MemoryMeter`, each starts the peak over.
"""

import weakref
from collections.abc import Callable, Iterable

import torch

from autohete_fx.runtime.meter import MemoryMeter, device_live_bytes, is_counted


class Between:
    """The latest forward of a model whose backward has not begun."""

    def __init__(self) -> None:
        self._meter: MemoryMeter | None = None
        self._note: Callable[[int], None] = _ignore
        self._outputs: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []

    @property
    def is_watched(self) -> bool:
        """Whether there is such a forward."""
        return self._meter is not None

    def begin(self, device: torch.device, outputs: Iterable[torch.Tensor], note: Callable[[int], None]) -> None:
        """A forward has ended with these outputs. Nothing happens where the device's memory is not counted.

        ``note`` is told the bytes in the end.
        """
        self.forget()
        self._note = note
        storages = [output.untyped_storage() for output in outputs if output.device.type == device.type]
        self._outputs = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
        if is_counted(device):
            self._meter = MemoryMeter(device)
            self._meter.__enter__()

    def forget(self) -> None:
        """Another forward begins, or none is to be watched."""
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self._meter = None

    def end(self, brought_bytes: int) -> None:
        """The first backward begins, which is given gradients of so many bytes. The most that lived since the forward ended is
        noted, beyond what lived then.

        Outputs of the step before may die in between, when their names get new ones. They do not count as the forward's, whose own
        may die as well.
        """
        meter = self._meter
        assert meter is not None, "nothing is watched"
        self.forget()
        died_bytes = sum(num_bytes for storage, num_bytes in self._outputs if storage() is None)
        own_bytes = device_live_bytes(meter.device) - brought_bytes + died_bytes
        self._note(max(0, meter.peak_bytes - min(meter.start_bytes, own_bytes)))

    def __del__(self) -> None:
        self.forget()


def _ignore(_: int) -> None:
    return None
