"""Measures what code outside of a compiled model takes between a forward and its backward, such as a loss.

In: a call when a forward has ended, and one when the next graph of its call or the next backward begins. Out: bytes beyond those
that lived when the forward ended. Why: no graph has that code, so that no plan counts it, and it runs where activations take most.

Where graphs of one call have such code between them, it comes twice. In forward it may leave activations, beside which the later
graphs run. Its own backward runs between theirs, and frees them.

Cost: two readings of the device's memory each time, in the few passes that are watched. Like a `MemoryMeter`, each starts the
peak over.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from autohete_fx.runtime.meter import MemoryMeter, device_live_bytes, is_counted


@dataclass(frozen=True, slots=True)
class Taken:
    """Device bytes of code outside of a graph, between its forward and its backward.

    Attributes:
        peak_bytes: the most beyond those that lived when the forward had ended.
        held_bytes: of these, what lives on while later graphs of the call run.
    """

    peak_bytes: int = 0
    held_bytes: int = 0


@dataclass(eq=False, slots=True)
class _Forward:
    """A forward that has ended.

    Attributes:
        graph: that ran, whatever tells it from others.
        call: within which it ran.
        note: is told what was taken, and the most that a later graph takes beside it.
        outputs: with their bytes.
        taken: so far; None before another graph of the call has begun.
    """

    graph: object
    call: object
    note: Callable[[Taken, int], None]
    outputs: list[tuple[weakref.ref[torch.UntypedStorage], int]] = field(default_factory=list)
    taken: Taken | None = None


class Between:
    """The latest forward of a model whose backward has not begun, and earlier ones of its call."""

    def __init__(self) -> None:
        self._meter: MemoryMeter | None = None
        self._latest: _Forward | None = None
        self._earlier: list[_Forward] = []

    def is_watched(self, graph: object) -> bool:
        """Whether code after a forward of the graph is."""
        return self._meter is not None and self._latest is not None and self._latest.graph == graph

    def begin(
        self,
        device: torch.device,
        outputs: Iterable[torch.Tensor],
        note: Callable[[Taken, int], None],
        *,
        graph: object,
        call: object,
    ) -> None:
        """A forward has ended with these outputs. Nothing happens where the device's memory is not counted.

        ``note`` is told in the end what was taken, and what a later graph of the call takes beside that.
        """
        self._stop()
        storages = [output.untyped_storage() for output in outputs if output.device.type == device.type]
        found = [(weakref.ref(storage), storage.nbytes()) for storage in storages]
        self._latest = _Forward(graph, None if call is None else weakref.ref(call), note, found)
        self._start(device)

    def forget(self) -> None:
        """A forward of another call begins, or none is to be watched."""
        self._stop()
        self._earlier.clear()

    def go_on(self, call: object, peak_bytes: int) -> None:
        """Another forward begins. If it is of a later graph of the same call, which takes so many bytes, note what was taken."""
        forward, meter = self._latest, self._meter
        if forward is None or meter is None or call is None or forward.call != weakref.ref(call):
            self.forget()
            return
        self._stop()
        held_bytes = max(0, device_live_bytes(meter.device) - meter.start_bytes)
        forward.taken = Taken(meter.peak_bytes - meter.start_bytes, held_bytes)
        self._earlier.append(forward)
        forward.note(forward.taken, peak_bytes + held_bytes)

    def go_back(self, device: torch.device) -> None:
        """A backward is over: that of the code before its graph is next."""
        if self._earlier:
            self._stop()
            self._latest = self._earlier.pop()
            self._start(device)

    def end(self, brought_bytes: int) -> None:
        """The backward of the latest forward begins, which is given gradients of so many bytes. The most that lived since the
        forward ended is noted, beyond what lived then.

        Outputs of the step before may die in between, when their names get new ones. They do not count as the forward's, whose own
        may die as well.
        """
        forward, meter = self._latest, self._meter
        assert forward is not None and meter is not None, "nothing is watched"
        self._stop()
        if forward.taken is not None:  # its own forward was before the later graphs, whose gradients count with them
            peak_bytes = forward.taken.held_bytes + meter.peak_bytes - meter.start_bytes
            forward.note(Taken(max(forward.taken.peak_bytes, peak_bytes), forward.taken.held_bytes), 0)
            return
        died_bytes = sum(num_bytes for storage, num_bytes in forward.outputs if storage() is None)
        own_bytes = device_live_bytes(meter.device) - brought_bytes + died_bytes
        forward.note(Taken(max(0, meter.peak_bytes - min(meter.start_bytes, own_bytes))), 0)

    def _start(self, device: torch.device) -> None:
        if is_counted(device):
            self._meter = MemoryMeter(device)
            self._meter.__enter__()

    def _stop(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
        self._meter = self._latest = None

    def __del__(self) -> None:
        self.forget()
