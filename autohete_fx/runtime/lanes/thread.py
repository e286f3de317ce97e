"""Lanes whose work is done by the CPU: copies of a CPU device, and optimizer updates on every device.

A lane has a priority queue, smaller first and equal ones in the order of submission, and threads that serve it. Work that
must follow other work stands in the queue only when that is done, so nothing that is ready waits for it. In the
foreground there is no thread: work is done where it is submitted.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from autohete_fx.ir import Lane, LaneRecord
from autohete_fx.runtime.lanes.ticket import Ticket, failure_of, when_all_ready

Pace = Callable[[Ticket], float]
"""Seconds by which a lane is slower than the host at some work. They pass first, so that whoever does not wait reads what
was there before."""


class ThreadTicket(Ticket):
    """Work of a `ThreadLane`.

    Args:
        work: what is to be done; its references are dropped when it is.
        prepare: done before ``work``, while the lane is still at what is ahead in the queue.
        begin: done between the two, once the lane is at this and before it prepares what is next.
        holds: what stays referenced until somebody has waited.

    Attributes:
        is_counted, is_taken: for the lane: whether it counts as submitted, and whether the lane will see to its end.
    """

    def __init__(
        self,
        lane: Lane,
        label: str,
        priority: int,
        num_bytes: int,
        work: Callable[[], None],
        *,
        prepare: Callable[[], None] | None = None,
        begin: Callable[[], None] | None = None,
        holds: object = None,
    ) -> None:
        super().__init__(lane, label, priority, num_bytes)
        self._work: Callable[[], None] | None = work
        self._prepare = prepare
        self._begin = begin
        self._holds = holds
        self.is_counted = False
        self.is_taken = False
        self._preparing = threading.Lock()
        self._is_complete = False
        # Held until then. Unlike an event's, this lock is never left behind by an interrupt that ends a wait.
        self._working = threading.Lock()
        self._working.acquire()

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def wait(self) -> None:
        with self._working:
            pass
        self.let_go()
        self.raise_error()

    def synchronize(self) -> None:
        self.wait()

    def let_go(self) -> None:
        self._holds = None

    def prepare(self) -> None:
        """Do once what can be done ahead. Return when it is done, also where another thread of the lane is at it."""
        with self._preparing:
            prepare, self._prepare = self._prepare, None
            if prepare is not None and self.error is None:
                self._guarded(prepare)

    def begin(self) -> None:
        """The lane is at it, on this thread."""
        self.prepare()
        begin, self._begin = self._begin, None
        if begin is not None and self.error is None:
            self._guarded(begin)

    def run(self, pace: Pace | None) -> None:
        """Do it, on this thread."""
        self.begin()
        if pace is not None:
            self._guarded(lambda: time.sleep(pace(self)))
        work, self._work = self._work, None
        if work is not None and self.error is None:
            self._guarded(work)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:  # whatever it is, the one who waits gets it
            self.error = error

    def finish(self) -> None:
        """It is complete."""
        if not self._is_complete:
            self._is_complete = True
            self._working.release()
        self.set_ready()


class ThreadLane:
    """A priority queue and the threads that serve it, or the thread that submits.

    Args:
        lane: for records and the threads' names.
        records: where records of what ended go.
        in_background: whether there are threads.
        num_workers: how many; with more than one, work of a lane may overlap.
        pace: see `Pace`.
        begin_thread: what each thread does first.
    """

    def __init__(
        self,
        lane: Lane,
        records: deque[LaneRecord],
        *,
        in_background: bool,
        num_workers: int = 1,
        pace: Pace | None = None,
        begin_thread: Callable[[], None] | None = None,
    ) -> None:
        self._lane = lane
        self._records = records
        self._in_background = in_background
        self._num_workers = num_workers
        self._pace = pace
        self._begin_thread = begin_thread
        # Reentrant: close() may be called by a garbage collection inside a locked region. Entered itself and not through the
        # condition, whose `__enter__` an interrupt can end with the lock taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[tuple[int, int, ThreadTicket]] = []
        self._submitted = 0
        self._started = 0
        self._completed = 0
        self._failed: list[ThreadTicket] = []
        self._closed = False
        self._threads: list[threading.Thread] = []

    def submit(self, ticket: ThreadTicket, after: Sequence[Ticket] = ()) -> ThreadTicket:
        """Queue the ticket's work after that of others. It fails without being done where one of them failed.

        An interrupt may come anywhere in here. Then the ticket has failed, or its work will be done.
        """
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError(f"the {self._lane.value} lane is closed")
                if self._in_background:
                    self._start()
                number, self._submitted, ticket.is_counted = self._submitted, self._submitted + 1, True
            if self._in_background:
                when_all_ready(after, lambda: self._enqueue(number, ticket, after))
            else:
                self._run_behind(ticket, after)
        except BaseException as error:
            self._withdraw(ticket, error)
            raise
        return ticket

    def _withdraw(self, ticket: ThreadTicket, error: BaseException) -> None:
        with self._lock:
            self._changed.notify_all()  # of what was queued, had the interrupt not come first
            if not ticket.is_counted or ticket.is_taken:
                return
            ticket.error, ticket.is_taken = error, True
            self._started += 1
            self._completed += 1
        ticket.finish()

    def _run_behind(self, ticket: ThreadTicket, after: Sequence[Ticket]) -> None:
        try:
            for other in after:
                other.synchronize()
        except Exception as error:
            ticket.error = error
        self._run(ticket)

    def _enqueue(self, number: int, ticket: ThreadTicket, after: Sequence[Ticket]) -> None:
        failure = failure_of(after)
        with self._lock:
            if ticket.is_taken:
                return
            ticket.error, ticket.is_taken = failure, True
            heapq.heappush(self._queue, (ticket.priority, number, ticket))
            self._changed.notify_all()

    def _start(self) -> None:
        while len(self._threads) < self._num_workers:
            thread = threading.Thread(target=self._serve, name=f"autohete-{self._lane.value}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def drain(self) -> None:
        """Return when everything submitted is complete. Raises the first failure that no ticket has raised."""
        with self._lock:
            # Not until as many are complete as there are now: those may be others, submitted later and served first.
            self._changed.wait_for(lambda: self._completed == self._submitted)
            errors = [t.error for t in self._failed if t.error is not None and not t.is_error_raised]
            self._failed.clear()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Refuse new work; the threads end when what was submitted is complete."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Return when the threads have ended, after `close`, or the time is over."""
        for thread in self._threads:
            thread.join(timeout_s)

    @property
    def is_current(self) -> bool:
        """Whether one of its threads asks."""
        return threading.current_thread() in self._threads

    def collect(self) -> None:
        """Nothing to do: records are written as work ends."""

    def _serve(self) -> None:
        if self._begin_thread is not None:
            self._begin_thread()
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._queue or (self._closed and self._started == self._submitted))
                if not self._queue:
                    return
                _, _, ticket = heapq.heappop(self._queue)
                upcoming = self._queue[0][-1] if self._queue else None
                self._started += 1
                self._changed.notify_all()
            ticket.begin()
            if upcoming is not None:
                upcoming.prepare()
            self._run(ticket)
            del ticket, upcoming  # or what they hold would live until the next work

    def _run(self, ticket: ThreadTicket) -> None:
        begin_s = time.perf_counter()
        ticket.run(self._pace)
        if ticket.error is None:
            self._records.append(ticket.record(begin_s, time.perf_counter()))
        ticket.finish()
        with self._lock:
            if ticket.error is not None:
                self._failed = [failed for failed in self._failed if not failed.is_error_raised]
                self._failed.append(ticket)
            self._completed, ticket.is_taken = self._completed + 1, True
            self._changed.notify_all()
