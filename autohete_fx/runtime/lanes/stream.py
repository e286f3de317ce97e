"""Lanes of an accelerator: one stream each.

A copy, or a collective, is issued at once and ordered after everything that the current stream has been given so far. A wait
makes the current stream wait, not the CPU. The thread that ends work of the CPU issues the copies that must follow it. Until
then a wait holds the thread that launches, which could not launch what needs the copy anyhow.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from autohete_fx.ir import Lane, LaneRecord
from autohete_fx.runtime.lanes.ticket import Ticket, failure_of, when_all_ready
from autohete_fx.runtime.tiers.host import host_view, is_home

_ORIGIN_LASTS_S = 60.0
"""CUDA tells milliseconds between two events as a float, which an hour after the first can tell no microseconds."""

_LONGEST_NAP_S = 200e-6


def _sleep_until(event: torch.Event) -> None:
    """Return when an event has passed, on a thread of the CPU that has nothing else to do.

    ``Event.synchronize`` spins, and keeps asking the driver for what the thread that launches kernels needs of it; to have it sleep
    takes ``blocking=True``, which ``torch.Event`` ignores on CUDA.
    """
    nap_s = _LONGEST_NAP_S / 16
    while not event.query():
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    event.synchronize()  # raises what the device failed with


class Moment(Ticket):
    """The work that a device's current stream has been given so far: a ticket that is ready from the start."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(Lane.COMPUTE, "moment", 0, 0)
        self._device = device
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device)
            self._event.record(torch.accelerator.current_stream(device))
        self.set_ready()

    @property
    def is_complete(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        if self._event is not None:
            _sleep_until(self._event)

    def order(self, stream: torch.Stream) -> None:
        if self._event is not None:
            stream.wait_event(self._event)


class StreamTicket(Ticket):
    """Work on a stream.

    It keeps the work, and with it the tensors that it reads and writes, referenced until it has been waited for. Memory that is
    freed before that could be in use again while the stream still writes there. A wait for it is one for what it follows, too.

    Args:
        work: gives the device's work to the current stream, which is the lane's.
        after: what it follows.
    """

    def __init__(
        self,
        lane: Lane,
        label: str,
        priority: int,
        num_bytes: int,
        device: torch.device,
        work: Callable[[], None],
        after: Sequence[Ticket],
    ) -> None:
        super().__init__(lane, label, priority, num_bytes)
        self._device = device
        self._issued = threading.Event()
        self._work: Callable[[], None] | None = work
        self._after = after
        self.begin = torch.Event(device, enable_timing=True)
        self.end = torch.Event(device, enable_timing=True)

    @property
    def is_complete(self) -> bool:
        return self._issued.is_set() and (self.error is not None or self.end.query())

    def issue(self, stream: torch.Stream) -> None:
        """Give the work to the stream."""
        assert self._work is not None
        with stream:
            self.begin.record(stream)
            self._work()
            self.end.record(stream)

    def finish_issue(self) -> None:
        """It has been issued, or has failed."""
        self._issued.set()
        self.set_ready()

    def wait(self) -> None:
        self._issued.wait()
        self.raise_error()
        torch.accelerator.current_stream(self._device).wait_event(self.end)
        # From here on the current stream is behind the copy, so memory that is freed on it is safe to use again.
        self.let_go()

    def synchronize(self) -> None:
        # Not by `wait`: on a lane's thread the current stream may be the one that computes, which must not be held.
        self._issued.wait()
        self.raise_error()
        _sleep_until(self.end)
        self.let_go()

    def order(self, stream: torch.Stream) -> None:
        stream.wait_event(self.end)

    def let_go(self) -> None:
        self._work, after, self._after = None, self._after, ()
        for ticket in after:
            ticket.let_go()


def copy_between_tiers(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], then: Callable[[], None] | None = None
) -> None:
    """Copy each ``(dst, src)`` on the current stream, ``then`` what follows. All ``dst`` are inference tensors, or none is."""
    ends = [_ends(dst, src) for dst, src in pairs]
    # A copy that follows an update is issued by another thread than the one that asked for it under inference mode.
    with torch.inference_mode(ends[0][0].is_inference()), torch.no_grad():
        for to, of in ends:
            to.copy_(of, non_blocking=True)
        if then is not None:
            then()


def _ends(dst: torch.Tensor, src: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors that are copied. The driver should be told that a home is host memory, which its device tensor does not say. But
    from home to home the device copies: the CPU would at once, whatever the stream is behind."""
    if is_home(dst) and is_home(src):
        return dst, src
    return host_view(dst) if is_home(dst) else dst, host_view(src) if is_home(src) else src


class StreamLane:
    """A stream, what is in flight on it, and records of what ended."""

    def __init__(self, lane: Lane, device: torch.device, records: deque[LaneRecord]) -> None:
        self._lane = lane
        self._device = device
        self._records = records
        self._lock = threading.RLock()
        self._stream: torch.Stream | None = None
        self._origin: tuple[torch.Event, float] | None = None
        # Tickets whose copy may not have ended: a dropped ticket must not free what is being copied. One that was
        # waited for has let go of its tensors: held until the device gets there, they would count against the budget,
        # because the CPU issues a whole step ahead.
        self._in_flight: deque[StreamTicket] = deque()
        self._closed = False

    def submit(
        self,
        label: str,
        priority: int,
        num_bytes: int,
        work: Callable[[], None],
        after: Sequence[Ticket],
    ) -> StreamTicket:
        """Run work of the device after the work of the tickets."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self._lane.value} lane is closed")
            self._open()
            self.collect()
        ticket = StreamTicket(self._lane, label, priority, num_bytes, self._device, work, after)
        when_all_ready(after, lambda: self._issue(ticket, after))
        return ticket

    def _issue(self, ticket: StreamTicket, after: Sequence[Ticket]) -> None:
        """On the thread that ends what the copy follows. Nothing may escape: that thread serves a lane, and would end."""
        ticket.error = failure_of(after)
        if ticket.error is None:
            try:
                self._give(ticket, after)
            except BaseException as error:  # the one who waits gets it
                ticket.error = error
        ticket.finish_issue()

    def _give(self, ticket: StreamTicket, after: Sequence[Ticket]) -> None:
        with self._lock:
            stream = self._open()
            try:
                for other in after:
                    other.order(stream)
                ticket.issue(stream)
            except BaseException:
                # The copy may be under way, and nobody will hold its tensors.
                with contextlib.suppress(Exception):
                    stream.synchronize()
                raise
            self._in_flight.append(ticket)

    def drain(self) -> None:
        """Return when every copy that was issued is complete."""
        with self._lock:
            if self._stream is not None:
                self._stream.synchronize()
            self.collect()

    def close(self) -> None:
        """Refuse new copies."""
        with self._lock:
            self._closed = True

    def join(self, timeout_s: float) -> None:
        """Nothing to do: there is no thread."""

    @property
    def is_current(self) -> bool:
        """There is no thread that could ask."""
        return False

    def collect(self) -> None:
        """Let go of the copies that ended, and record them."""
        with self._lock:
            while self._in_flight and self._in_flight[0].end.query():
                ticket = self._in_flight.popleft()
                assert self._origin is not None
                origin, origin_s = self._origin
                end_s = origin_s + origin.elapsed_time(ticket.end) / 1e3
                self._records.append(ticket.record(end_s - ticket.begin.elapsed_time(ticket.end) / 1e3, end_s))
                if end_s - origin_s > _ORIGIN_LASTS_S:
                    self._origin = (ticket.end, end_s)

    def _open(self) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream(self._device)
            origin = torch.Event(self._device, enable_timing=True)
            origin.record(self._stream)
            origin.synchronize()
            self._origin = (origin, time.perf_counter())
        return self._stream
