"""Tickets: work that was submitted to a lane, to wait for and to build on."""

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence

import torch

from autohete_fx.ir import Lane, LaneRecord


class Ticket(abc.ABC):
    """Work that was submitted to a lane.

    Attributes:
        lane, label, priority, num_bytes: as in `ir.LaneRecord`.
    """

    def __init__(self, lane: Lane, label: str, priority: int, num_bytes: int) -> None:
        self.lane = lane
        self.label = label
        self.priority = priority
        self.num_bytes = num_bytes
        self.error: BaseException | None = None
        self.is_error_raised = False
        self._lock = threading.Lock()
        self._is_ready = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    @abc.abstractmethod
    def is_complete(self) -> bool:
        """Whether nothing is left to wait for; a failure counts."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Return when (CPU), or make the current stream wait until (CUDA), the work is complete.

        Raises what the work raised, with the worker's traceback. Waiting again is allowed, and raises again.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Return when the work is complete, on the device too. Raises as `wait` does."""

    @property
    def is_ready(self) -> bool:
        """Whether other work can be ordered after this one: it is complete, or has been given to the device, or has failed."""
        return self._is_ready

    def order(self, stream: torch.Stream) -> None:  # noqa: B027  (work of the CPU that is ready is done: nothing to order)
        """Make a stream go on after the work, which must be ready."""

    def let_go(self) -> None:  # noqa: B027  (most hold nothing)
        """The work is complete, or what the current stream is given from here on comes after it: drop what it holds."""

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back, here or on a lane's thread, as soon as it is ready."""
        with self._lock:
            if not self._is_ready:
                self._callbacks.append(callback)
                return
        callback()

    def set_ready(self) -> None:
        """Call back who asked for it."""
        with self._lock:
            self._is_ready = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def record(self, begin_s: float, end_s: float) -> LaneRecord:
        """The record of it."""
        return LaneRecord(
            lane=self.lane,
            label=self.label,
            priority=self.priority,
            num_bytes=self.num_bytes,
            begin_s=begin_s,
            end_s=end_s,
        )

    def raise_error(self) -> None:
        """Raise what the work raised, if it did."""
        if self.error is not None:
            self.is_error_raised = True
            raise self.error


class IssuedTicket(Ticket):
    """All that another work gives to the lanes.

    Args:
        issued: of the work that gives it; with its failure this fails.
        copies: what was given, complete when that work is. The last comes after all others, unless one fails.
        stream: of an accelerator the stream that computes, whose memory they hold. A wait of another stream lets go of nothing.
    """

    def __init__(self, issued: Ticket, copies: list[Ticket], stream: torch.Stream | None) -> None:
        super().__init__(issued.lane, issued.label, issued.priority, 0)
        self._issued = issued
        self._copies = copies
        self._stream = stream
        issued.when_ready(lambda: when_all_ready(copies, self._note_ready))

    def _note_ready(self) -> None:
        self.error = next((t.error for t in (self._issued, *self._copies) if t.error is not None), None)
        self.set_ready()

    @property
    def is_complete(self) -> bool:
        return self.is_ready and self._issued.is_complete and all(copy.is_complete for copy in self._copies)

    def wait(self) -> None:
        if self._is_of_current_stream:
            self._reach(lambda copy: copy.wait())
        else:
            assert self._stream is not None
            self._issued.synchronize()
            self.order(torch.accelerator.current_stream(self._stream.device))
            self._raise_failure()

    @property
    def _is_of_current_stream(self) -> bool:
        return self._stream is None or torch.accelerator.current_stream(self._stream.device) == self._stream

    def synchronize(self) -> None:
        self._reach(lambda copy: copy.synchronize())

    def _reach(self, reach: Callable[[Ticket], None]) -> None:
        """Wait for all and let go of them. Raises the first failure, whichever copy it is of."""
        failure = _failure_in(self._issued.synchronize, self._issued)
        for copy in self._copies[-1:]:
            failure = _failure_in(functools.partial(reach, copy), copy) or failure
        if failure is not None or self.error is not None:
            for copy in self._copies:  # the last one tells nothing of the others
                _failure_in(functools.partial(reach, copy), copy)
        self.let_go()
        self._raise_failure()
        if failure is not None:
            raise failure

    def _raise_failure(self) -> None:
        failures = [error for ticket in (self._issued, *self._copies) if (error := failure_of((ticket,))) is not None]
        if failures:
            raise failures[0]

    def let_go(self) -> None:
        if self._is_of_current_stream or self.is_complete:
            for copy in self._copies:
                copy.let_go()

    def order(self, stream: torch.Stream) -> None:
        for copy in self._copies[-1:]:
            copy.order(stream)


def _failure_in(wait: Callable[[], None], ticket: Ticket) -> BaseException | None:
    """What waiting for a ticket raises, unless it is the wait that is interrupted."""
    try:
        wait()
    except BaseException as error:
        if not isinstance(error, Exception) and error is not ticket.error:
            raise
        return error
    return None


class Failed(Ticket):
    """A ticket of work that was done without a lane, and failed."""

    def __init__(self, lane: Lane, label: str, error: BaseException) -> None:
        super().__init__(lane, label, 0, 0)
        self.error = error
        self.is_error_raised = True
        self.set_ready()

    @property
    def is_complete(self) -> bool:
        return True

    def wait(self) -> None:
        self.raise_error()

    def synchronize(self) -> None:
        self.raise_error()


class Settled(Ticket):
    """Another ticket's end, whether it failed or not: what follows this does not fail with it."""

    def __init__(self, other: Ticket) -> None:
        super().__init__(other.lane, other.label, other.priority, 0)
        self._other = other
        other.when_ready(self.set_ready)

    @property
    def is_complete(self) -> bool:
        return self._other.is_complete

    def wait(self) -> None:
        with contextlib.suppress(Exception):
            self._other.wait()

    def synchronize(self) -> None:
        with contextlib.suppress(Exception):
            self._other.synchronize()

    def order(self, stream: torch.Stream) -> None:
        if self._other.error is None:
            self._other.order(stream)


def when_all_ready(tickets: Sequence[Ticket], callback: Callable[[], None]) -> None:
    """Call back once every ticket is ready, at once if all are."""
    if all(ticket.is_ready for ticket in tickets):
        return callback()
    lock, missing = threading.Lock(), len(tickets) + 1

    def one_is_ready() -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = not missing
        if is_last:
            callback()

    for ticket in tickets:
        ticket.when_ready(one_is_ready)
    one_is_ready()


def failure_of(tickets: Sequence[Ticket]) -> BaseException | None:
    """The exception of the first of them that failed; the caller raises it."""
    failed = next((ticket for ticket in tickets if ticket.error is not None), None)
    if failed is None:
        return None
    failed.is_error_raised = True
    return failed.error
