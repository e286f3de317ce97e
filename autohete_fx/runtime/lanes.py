"""Copy lanes: the executors that move tensors between the device and host memory while the device computes.

In: pairs of tensors with a lane and a priority. Out: tickets to wait on, and a record of what ran when. Why one object:
it alone knows what is in flight and keeps it referenced.

* On a CUDA device a lane is a stream. A copy is issued at once, behind everything that the current stream has been
  given so far, and waiting makes the current stream wait, not the CPU. Priorities order nothing that has been issued.
* On a CPU device with a core to spare a lane is a thread with a priority queue: smaller first, equal ones in the order
  of submission. Copies run without the GIL and on that one thread: an OpenMP team of the copy's own would fight the
  compute.
* On a CPU device whose cores all compute there is nothing to overlap with. A thread would take a core from a team that
  waits for its slowest member, and cost the step more than the copy itself: copies run where they are submitted, with
  all threads.
"""

import ctypes
import heapq
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autohete_fx.ir import Lane
from autohete_fx.runtime.tiers import host_view, is_dense, is_home

_RECORDS = 8192
_PIECE_BYTES = 64 * 2**20
_SERIAL_ELEMENTS = 32767
"""PyTorch parallelises element-wise work from 32768 elements on."""

COPY_LANES = (Lane.H2D, Lane.D2H)

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""Copies a destination's worth from a source: ``copy(dst, src)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRecord:
    """A copy that ended: ``begin_s`` and ``end_s`` are readings of ``time.perf_counter``."""

    lane: Lane
    priority: int
    num_bytes: int
    begin_s: float
    end_s: float


class Ticket:
    """A copy that was submitted. It keeps source and destination referenced until it has been waited for.

    Attributes:
        lane, priority: as submitted.
        num_bytes: bytes that are copied.
    """

    def __init__(self, lane: Lane, priority: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.lane = lane
        self.priority = priority
        self.num_bytes = dst.numel() * dst.element_size()
        self._tensors: tuple[torch.Tensor, torch.Tensor] | None = (dst, src)

    def wait(self) -> None:
        """Return when (CPU), or make the current stream wait until (CUDA), the copy is complete.

        Raises what the copy raised, with the worker's traceback. Waiting again is allowed.
        """
        raise NotImplementedError


class Lanes:
    """The copy lanes of one device. Threads and streams are made when a lane is first used. Thread safe.

    On a CPU device the threads end with ``close()``, when this object is collected, and with the interpreter; copies
    that were submitted are completed in the first two cases.

    Args:
        device: the compute device.
        copy: CPU only: what copies ``(dst, src)``; to delay or fail copies on purpose.
        in_background: CPU only: whether copies run on threads of the lanes; by default where `has_spare_core`, and where
            a ``copy`` is given, which may block.
    """

    def __init__(
        self, device: torch.device | str, copy: Copy | None = None, *, in_background: bool | None = None
    ) -> None:
        self.device = torch.device(device)
        if in_background is None:
            in_background = copy is not None or has_spare_core()
        self._pid = os.getpid()
        self._records: deque[TransferRecord] = deque(maxlen=_RECORDS)
        self._lanes: dict[Lane, _ThreadLane | _StreamLane] = {}
        for lane in COPY_LANES:
            if self.device.type == "cpu":
                worker = _ThreadLane(lane, copy or cpu_copy(in_background), self._records, in_background)
                # The thread knows the lane only, so this object can be collected while the thread waits for work.
                weakref.finalize(self, worker.close)
                self._lanes[lane] = worker
            else:
                self._lanes[lane] = _StreamLane(lane, self.device, self._records)

    def submit(self, lane: Lane, priority: int, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        """Copy ``src`` to ``dst`` (equal sizes) on a lane, after the work that the current stream was given so far.

        ``dst`` must not be read or written, nor ``src`` written, before the ticket was waited for. For ``Lane.H2D``
        allocate ``dst`` on the stream that computes. On CUDA give dense tensors of one layout: PyTorch stages any
        others in a device buffer.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the copy lanes do not survive fork(): this process is a child of the one that compiled the model; "
                "start workers with the 'spawn' method, or do not run the compiled model in them"
            )
        assert lane in self._lanes, f"{lane} is no copy lane"
        assert dst.shape == src.shape, f"cannot copy {tuple(src.shape)} to {tuple(dst.shape)}"
        return self._lanes[lane].submit(priority, dst, src)

    def drain(self) -> None:
        """Return when every copy that was submitted is complete. Raises the first failure that no ticket has raised."""
        for lane in self._lanes.values():
            lane.drain()

    def close(self) -> None:
        """Complete what was submitted, then end the lanes. Submitting afterwards is an error."""
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            lane.drain()

    def records(self) -> tuple[TransferRecord, ...]:
        """The latest copies that ended, by their end; at most 8192."""
        for lane in self._lanes.values():
            lane.collect()
        return tuple(sorted(self._records, key=lambda record: record.end_s))


class _ThreadTicket(Ticket):
    def __init__(self, lane: Lane, priority: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        super().__init__(lane, priority, dst, src)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._raised = False

    def run(self, copy: Copy) -> None:
        """Copy, on this thread."""
        assert self._tensors is not None
        try:
            with torch.no_grad():
                copy(*self._tensors)
        except BaseException as error:  # whatever it is, the one who waits gets it
            self._error = error

    def finish(self) -> None:
        self._done.set()

    def unraised_error(self) -> BaseException | None:
        return None if self._raised else self._error

    def wait(self) -> None:
        self._done.wait()
        self._tensors = None
        if self._error is not None:
            self._raised = True
            raise self._error


class _ThreadLane:
    """A lane of a CPU device: one thread and one priority queue, or the thread that submits."""

    def __init__(self, lane: Lane, copy: Copy, records: deque[TransferRecord], in_background: bool) -> None:
        self._lane = lane
        self._copy = copy
        self._records = records
        self._in_background = in_background
        # Its lock is reentrant: close() may be called by a garbage collection inside a locked region.
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, _ThreadTicket]] = []
        self._submitted = 0
        self._completed = 0
        self._failed: list[_ThreadTicket] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, priority: int, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        ticket = _ThreadTicket(self._lane, priority, dst, src)
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the {self._lane.value} lane is closed")
            if self._in_background:
                self._start()
                heapq.heappush(self._queue, (priority, self._submitted, ticket))
            self._submitted += 1
            self._changed.notify_all()
        if not self._in_background:
            self._run(ticket)
        return ticket

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"autohete-{self._lane.value}", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        with self._changed:
            last = self._submitted
            self._changed.wait_for(lambda: self._completed >= last)
            errors = [error for error in (ticket.unraised_error() for ticket in self._failed) if error is not None]
            self._failed.clear()
        if errors:
            raise errors[0]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def collect(self) -> None:
        """Nothing to do: the thread writes its records itself."""

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                _, _, ticket = heapq.heappop(self._queue)
            self._run(ticket)
            del ticket  # or its tensors would live until the next copy

    def _run(self, ticket: _ThreadTicket) -> None:
        begin_s = time.perf_counter()
        ticket.run(self._copy)
        end_s = time.perf_counter()
        with self._changed:
            if ticket.unraised_error() is None:
                self._records.append(
                    TransferRecord(
                        lane=ticket.lane,
                        priority=ticket.priority,
                        num_bytes=ticket.num_bytes,
                        begin_s=begin_s,
                        end_s=end_s,
                    )
                )
            else:
                self._failed = [failed for failed in self._failed if failed.unraised_error() is not None]
                self._failed.append(ticket)
            self._completed += 1
            self._changed.notify_all()
        ticket.finish()


class _StreamTicket(Ticket):
    def __init__(
        self, lane: Lane, priority: int, dst: torch.Tensor, src: torch.Tensor, begin: torch.Event, end: torch.Event
    ) -> None:
        super().__init__(lane, priority, dst, src)
        self._device = dst.device if dst.device.type != "cpu" else src.device
        self.begin = begin
        self.end = end

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self.end)
        # From here on the current stream is behind the copy, so memory that is freed on it is safe to use again.
        self._tensors = None


class _StreamLane:
    """A lane of an accelerator: one stream."""

    def __init__(self, lane: Lane, device: torch.device, records: deque[TransferRecord]) -> None:
        self._lane = lane
        self._device = device
        self._records = records
        self._lock = threading.RLock()
        self._stream: torch.Stream | None = None
        self._origin: tuple[torch.Event, float] | None = None
        # Tickets whose copy may not have ended: a dropped ticket must not free what is being copied. One that was
        # waited for has let go of its tensors: held until the device gets there, they would count against the budget,
        # because the CPU issues a whole step ahead.
        self._in_flight: deque[_StreamTicket] = deque()
        self._closed = False

    def submit(self, priority: int, dst: torch.Tensor, src: torch.Tensor) -> Ticket:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self._lane.value} lane is closed")
            stream = self._open()
            self.collect()
            begin = torch.Event(self._device, enable_timing=True)
            end = torch.Event(self._device, enable_timing=True)
            stream.wait_stream(torch.accelerator.current_stream(self._device))
            # The driver should be told that a home is host memory, which its device tensor does not say.
            to = host_view(dst) if is_home(dst) else dst
            of = host_view(src) if is_home(src) else src
            with stream, torch.no_grad():
                begin.record(stream)
                to.copy_(of, non_blocking=True)
                end.record(stream)
            ticket = _StreamTicket(self._lane, priority, dst, src, begin, end)
            self._in_flight.append(ticket)
            return ticket

    def drain(self) -> None:
        with self._lock:
            if self._stream is not None:
                self._stream.synchronize()
            self.collect()

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def collect(self) -> None:
        """Let go of the copies that ended, and record them."""
        with self._lock:
            while self._in_flight and self._in_flight[0].end.query():
                ticket = self._in_flight.popleft()
                assert self._origin is not None
                origin, origin_s = self._origin
                self._records.append(
                    TransferRecord(
                        lane=ticket.lane,
                        priority=ticket.priority,
                        num_bytes=ticket.num_bytes,
                        begin_s=origin_s + origin.elapsed_time(ticket.begin) / 1e3,
                        end_s=origin_s + origin.elapsed_time(ticket.end) / 1e3,
                    )
                )

    def _open(self) -> torch.Stream:
        if self._stream is None:
            self._stream = torch.Stream(self._device)
            origin = torch.Event(self._device, enable_timing=True)
            origin.record(self._stream)
            origin.synchronize()
            self._origin = (origin, time.perf_counter())
        return self._stream


def has_spare_core() -> bool:
    """Whether this process may use more cores than PyTorch computes with, so that copies can run beside compute."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores > torch.get_num_threads()


def cpu_copy(in_background: bool) -> Copy:
    """How the lanes of a CPU device copy."""
    return copy_on_this_thread if in_background else copy_with_all_threads


def copy_with_all_threads(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy between CPU tensors of equal size as PyTorch does, with every thread that computes."""
    dst.copy_(src)


def copy_on_this_thread(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy between CPU tensors of equal size on this thread alone; without the GIL where both have one dense layout."""
    if dst.numel() == 0:
        return
    same_bits = dst.dtype == src.dtype and dst.is_conj() == src.is_conj() and dst.is_neg() == src.is_neg()
    if same_bits and dst.stride() == src.stride() and is_dense(dst.shape, dst.stride()):
        to, of, num_bytes = dst.data_ptr(), src.data_ptr(), dst.numel() * dst.element_size()
        for offset in range(0, num_bytes, _PIECE_BYTES):
            # ctypes lets go of the GIL for the call.
            ctypes.memmove(to + offset, of + offset, min(_PIECE_BYTES, num_bytes - offset))
    else:
        _copy_serially(dst, src)


def _copy_serially(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy any layouts in tiles that are too small for PyTorch to parallelise, and that suit the cache."""
    if dst.numel() <= _SERIAL_ELEMENTS:
        dst.copy_(src)
        return
    dim = max(range(dst.dim()), key=lambda d: dst.shape[d])
    half = dst.shape[dim] // 2
    _copy_serially(dst.narrow(dim, 0, half), src.narrow(dim, 0, half))
    _copy_serially(dst.narrow(dim, half, dst.shape[dim] - half), src.narrow(dim, half, dst.shape[dim] - half))
