"""Tickets: work that was submitted to a lane, to wait for and to build on."""

import abc
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

    def order(self, stream: torch.Stream) -> None:  # noqa: B027  (work of the CPU that is ready is done: nothing to order)
        """Make a stream go on after the work, which must be ready."""

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Call back, here or on a lane's thread, as soon as other work can be ordered after this one.

        This work is then complete, or has been given to the device, or has failed.
        """
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


def when_all_ready(tickets: Sequence[Ticket], callback: Callable[[], None]) -> None:
    """Call back once every ticket is ready, at once if all are."""
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
