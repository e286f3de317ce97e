"""Lanes: the executors that move tensors between the device and host memory, and update them there, while the device computes.

In: pairs of tensors, or work for the CPU, with a priority. Out: tickets to wait on, and a record of what ran when. Why
one object: it alone knows what is in flight and keeps it referenced.

* On a CUDA device a copy lane is three streams (`stream`), which share the link. Copies of compiled code wait in one for the
  device to come to the block that they were issued for, a whole backward ahead. Copies of updates must not wait for that, nor
  for all of the states that pass through the device. Priorities order nothing that has been issued.
* On a CPU device with a core to spare a copy lane is a thread with a priority queue (`thread`). Copies run without
  the GIL and on that one thread: an OpenMP team of the copy's own would fight the compute.
* On a CPU device whose cores all compute there is nothing to overlap with. A thread would take a core from a team that waits
  for its slowest member, and cost the step more than the copy itself. Work is done where it is submitted, with all threads.
* The update lane is a thread that starts an OpenMP team (`team`); on a CPU device without a spare core, again, the caller.
* The net lane is two streams, too, one for gathers and one for reduces. On a CPU device they are threads, even where no core is
  to spare: they mostly wait for other ranks. They have no priorities, and put nothing off for an update: all ranks start
  collectives of one kind in the order of the program. Each kind has process groups of its own, so that neither waits for the other.
* The disk lane is a thread everywhere, for it mostly waits for the disk. It has no priorities: what is read comes to RAM after
  what leaves it.

Threads share the following. "The program" is the thread that runs forward, backward and step; workers are the lanes' threads.

* *Queue and counters of a lane*: everybody, under the lane's lock. An interrupt may end a submission anywhere. The ticket's
  `is_counted` and `is_taken` change in one statement with the counters, so what was counted is done or withdrawn.
* *What work writes* (a copy's destination; parameter, states, step counter and host copy of an update) *and `Ticket.error`*: one
  worker, before `finish`. A reader has waited, which takes the lock that ``finish`` released, or was called back by it.
  ``is_complete`` turns true after the error. A parameter has one update under way: a step waits for the one before.
* *What work reads* (a source, a gradient, an update's hyperparameters): the program, before the submission, whose lock the worker
  takes to find the work. Later writes by the program wait (`fence`, nodes of compiled code); hyperparameters are a copy.
* *Callbacks of a ticket*: under its lock; each is called once, without any lock, by who registers late or by ``set_ready``.
* *Preparation of work*: any worker of its lane, under the ticket's own lock, once.
* *A window of states from disk*: the lane until its read is complete, then who works on it, and the lane from its write on. Which
  walks read ahead, and the buffers of windows: under the tier's lock.
* *Coefficients of a step*: workers; two may make the same entry, of equal values.
* *Staging of streamed states*: who issues their copies uses its slots, one after the other: first the program, then a thread.
* `Updates`, arenas: under their locks. A reader of pending updates without it may see one that is over, and none of its own is
  missing. Leases end by an append. Copies in flight: each under a number of its own, taken out once.
* *Records*: workers append; a reader copies all of them at once.

Single operations on dictionaries, lists and deques count as atomic, as with the GIL they are. Modes of PyTorch, the fence among
them, belong to one thread, so no worker ever waits at the fence. The program waits for updates and copies; updates wait for
copies down and for the disk. Copies that were begun and the disk wait for nobody, and no lock is held in a wait but that of a
preparation. There is no cycle.
"""

import atexit
import dataclasses
import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from autohete_fx.ir import Lane, LaneRecord
from autohete_fx.runtime.lanes.copies import Copy, cpu_copy, has_spare_core
from autohete_fx.runtime.lanes.failures import Group
from autohete_fx.runtime.lanes.net import Start, run_collective
from autohete_fx.runtime.lanes.stream import Moment, StreamLane, copy_between_tiers
from autohete_fx.runtime.lanes.team import select_device, use_update_team, with_index
from autohete_fx.runtime.lanes.thread import Pace, ThreadLane, ThreadTicket
from autohete_fx.runtime.lanes.ticket import IssuedTicket, Ticket

_RECORDS = 8192
_NOTABLE_S = 20e-6

COPY_LANES = tuple(lane for lane in Lane if lane.copies)
COLLECTIVES = ("gather", "reduce")

_working: "weakref.WeakSet[ThreadLane]" = weakref.WeakSet()
_carrying: "weakref.WeakSet[ThreadLane | StreamLane]" = weakref.WeakSet()
"""Lanes of all devices: those whose work gives work to others, and those others."""


def _begin_updates(device: torch.device) -> None:
    """A thread of the update lane of an accelerator begins."""
    select_device(device)
    use_update_team()


class Lanes:
    """The lanes of one device. Threads and streams are made when a lane is first used. Thread safe.

    The threads end with ``close()``, when this object is collected, and with the interpreter; what was submitted is
    completed first.

    Args:
        device: the compute device.
        copy: CPU only: what copies ``(dst, src)``; to delay or fail copies on purpose.
        in_background: CPU only: whether there are threads; by default where `has_spare_core`, and where a ``copy`` is
            given, which may block.
        num_update_workers: threads of the update lane.
        pace: see `Pace`; to emulate slower lanes.
        is_host: whether host and device have one memory, so that the CPU works on the device's tensors as they are. The default
            is yes on a CPU device. False there emulates a device with memory of its own.
    """

    def __init__(
        self,
        device: torch.device | str,
        copy: Copy | None = None,
        *,
        in_background: bool | None = None,
        num_update_workers: int = 1,
        pace: Pace | None = None,
        is_host: bool | None = None,
    ) -> None:
        self.device = with_index(torch.device(device))
        on_cpu = self.device.type == "cpu"
        if in_background is None:
            in_background = not on_cpu or copy is not None or has_spare_core()
        self.in_background = in_background
        self.is_host = on_cpu if is_host is None else is_host
        self._pid = os.getpid()
        self._copy = copy or cpu_copy(in_background)
        self._records: deque[LaneRecord] = deque(maxlen=_RECORDS)
        self.num_update_workers = num_update_workers
        self._is_paced = pace is not None
        select = None if on_cpu else functools.partial(select_device, self.device)
        self._updates = ThreadLane(
            Lane.UPDATE,
            self._records,
            in_background=in_background,
            num_workers=num_update_workers,
            pace=pace,
            begin_thread=None if on_cpu else functools.partial(_begin_updates, self.device),
        )
        # What streams states through the device waits for copies, which neither the update lane nor the program may. It moves
        # and computes nothing itself, so it leaves no records. As long as there is nothing to wait for, the program does it.
        self._issuing = ThreadLane(
            Lane.UPDATE, deque(maxlen=0), in_background=in_background, pace=pace, begin_thread=select
        )
        self._issuing_here = ThreadLane(Lane.UPDATE, deque(maxlen=0), in_background=False)
        self._disk = ThreadLane(Lane.DISK, self._records, in_background=True, pace=pace)
        self._copies: dict[Lane, ThreadLane | StreamLane] = {
            lane: ThreadLane(lane, self._records, in_background=in_background, pace=pace)
            if on_cpu
            else StreamLane(lane, self.device, self._records)
            for lane in COPY_LANES
        }
        self._update_copies, self._state_copies = (
            self._copies if on_cpu else {lane: StreamLane(lane, self.device, self._records) for lane in COPY_LANES}
            for _ in range(2)
        )
        self._net: dict[str, ThreadLane | StreamLane] = {
            kind: ThreadLane(Lane.NET, self._records, in_background=True, pace=pace)
            if on_cpu
            else StreamLane(Lane.NET, self.device, self._records)
            for kind in COLLECTIVES
        }
        for lane in self._all():
            # A thread knows its lane only, so this object can be collected while the thread waits for work.
            weakref.finalize(self, lane.close).atexit = False
        _working.update(self._workers)
        _carrying.update((self._disk, *self._net.values(), *self._all_copies))

    @property
    def _workers(self) -> tuple[ThreadLane, ...]:
        return (self._updates, self._issuing, self._issuing_here)

    @property
    def _all_copies(self) -> tuple[ThreadLane | StreamLane, ...]:
        return tuple(
            dict.fromkeys((*self._copies.values(), *self._update_copies.values(), *self._state_copies.values()))
        )

    def _all(self) -> tuple[ThreadLane | StreamLane, ...]:
        return (*self._workers, self._disk, *self._net.values(), *self._all_copies)

    def submit(
        self,
        lane: Lane,
        priority: int,
        dst: torch.Tensor,
        src: torch.Tensor,
        after: Sequence[Ticket] | None = None,
        *,
        label: str = "copy",
        then: Callable[[], None] | None = None,
        for_update: bool = False,
    ) -> Ticket:
        """Copy ``src`` to ``dst`` (equal sizes) on a lane. See `submit_all`."""
        return self.submit_all(lane, priority, ((dst, src),), after, label=label, then=then, for_update=for_update)

    def submit_all(
        self,
        lane: Lane,
        priority: int,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[Ticket] | None = None,
        *,
        label: str = "copy",
        then: Callable[[], None] | None = None,
        for_update: bool = False,
        streamed: bool = False,
    ) -> Ticket:
        """Copy every ``(dst, src)`` (equal sizes) on a lane, one after the other, under one ticket.

        ``dst`` must not be read or written, nor ``src`` written, before the ticket was waited for. For ``Lane.H2D``
        allocate ``dst`` on the stream that computes. On CUDA give dense tensors of one layout: PyTorch stages any
        others in a device buffer.

        Args:
            after: what the copies must follow; None: the work that the current stream was given so far.
            label: for the record.
            then: what follows the copies on their lane, device work included; it belongs to the ticket.
            for_update: whether it is the optimizer that copies.
            streamed: whether it copies states that pass through the device, of which many stand in line.
        """
        self._check_process()
        assert lane in self._copies, f"{lane} is no copy lane"
        for dst, src in pairs:
            assert dst.shape == src.shape, f"cannot copy {tuple(src.shape)} to {tuple(dst.shape)}"
        behind = (self.now(),) if after is None else after
        executor = (self._state_copies if streamed else self._update_copies if for_update else self._copies)[lane]
        num_bytes = sum(dst.numel() * dst.element_size() for dst, _ in pairs)
        if isinstance(executor, StreamLane):
            return executor.submit(
                label, priority, num_bytes, functools.partial(copy_between_tiers, pairs, then), behind
            )
        work = functools.partial(_copy, self._copy, pairs, then)
        ticket = ThreadTicket(lane, label, priority, num_bytes, work, holds=pairs)
        return executor.submit(ticket, behind)

    def collective(self, label: str, start: Start, *, num_bytes: int, among: Group | None = None) -> Ticket:
        """Run a collective of several ranks after the work that the current stream was given so far, and after all collectives
        of its kind before. Nothing else puts it off, so that all ranks run those of a kind in the order of the program.

        Args:
            label: the kind, one of `COLLECTIVES`; also for the record.
            start: starts it, over a process group that has collectives of this kind alone while the lane is busy.
            num_bytes: for the record.
            among: as for `run_collective`.
        """
        self._check_process()
        net = self._net[label]
        work = functools.partial(run_collective, start, among, on_cpu=not isinstance(net, StreamLane))
        if isinstance(net, StreamLane):
            return net.submit(label, 0, num_bytes, work, (self.now(),))
        return net.submit(ThreadTicket(Lane.NET, label, 0, num_bytes, work), ())

    def update(
        self,
        priority: int,
        work: Callable[[], None],
        *,
        num_bytes: int = 0,
        prepare: Callable[[], None] | None = None,
        begin: Callable[[], None] | None = None,
        after: Sequence[Ticket] = (),
    ) -> Ticket:
        """Run work on the update lane.

        Args:
            num_bytes: for the record.
            prepare: run before ``work``, while the lane is still busy with what is ahead.
            begin: run between the two, when the lane is at this work, before what is next is prepared.
            after: what it must follow. On an accelerator the work begins when those are *ready*, not complete.
        """
        self._check_process()
        return self._updates.submit(
            ThreadTicket(Lane.UPDATE, "update", priority, num_bytes, work, prepare=prepare, begin=begin), after
        )

    def stream(self, priority: int, issue: Callable[[list[Ticket]], None], *, here: bool) -> Ticket:
        """Run ``issue``, which gives copies to the lanes and puts their tickets into a list. The ticket returned is complete when
        all of those are.

        Args:
            here: at once, by the caller, unless these lanes are slower than the host. Else on a thread, which may wait for earlier
                copies.
        """
        here = here and not self._is_paced
        self._check_process()
        copies: list[Ticket] = []
        stream = None if self.device.type == "cpu" else torch.accelerator.current_stream(self.device)
        issued = ThreadTicket(Lane.UPDATE, "states", priority, 0, functools.partial(issue, copies))
        return IssuedTicket((self._issuing_here if here else self._issuing).submit(issued), copies, stream)

    def disk(self, label: str, work: Callable[[], None], *, num_bytes: int) -> Ticket:
        """Run work on the disk lane, in the order of submission. ``label`` and ``num_bytes`` are for the record."""
        self._check_process()
        return self._disk.submit(ThreadTicket(Lane.DISK, label, 0, num_bytes, work))

    def wait(self, ticket: Ticket) -> None:
        """`Ticket.wait`, and a record of how long it held the program. On an accelerator that is the thread that launches
        kernels; how long the device itself is held, only its own profiler can tell."""
        begin_s = time.perf_counter()
        ticket.wait()
        if (end_s := time.perf_counter()) - begin_s > _NOTABLE_S:
            held = dataclasses.replace(ticket.record(begin_s, end_s), lane=Lane.COMPUTE)
            self._records.append(held)

    def now(self) -> Ticket:
        """A ticket for the work that the current stream was given so far."""
        return Moment(self.device)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "the copy lanes do not survive fork(): this process is a child of the one that compiled the model; "
                "start workers with the 'spawn' method, or do not run the compiled model in them"
            )

    def drain(self) -> None:
        """Return when everything that was submitted is complete. Raises the first failure that no ticket has raised."""
        for lane in self._all():
            lane.drain()

    def close(self) -> None:
        """Complete what was submitted, then end the lanes.

        Submitting afterwards is an error, but for updates that are still under way. The lanes that carry for them end when this
        object is collected, which they refer to.
        """
        # A garbage collection on a lane's own thread may drop the model; that thread cannot wait for itself.
        is_current = any(lane.is_current for lane in self._all())
        try:
            if not is_current:
                self.drain()
        finally:
            for lane in self._workers if is_current else self._all():
                lane.close()

    def records(self) -> tuple[LaneRecord, ...]:
        """The latest work that ended, by its end; at most 8192."""
        for lane in (*self._all_copies, *self._net.values()):
            lane.collect()
        return tuple(sorted(self._records, key=lambda record: record.end_s))


def _copy(copy: Copy, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], then: Callable[[], None] | None) -> None:
    for dst, src in pairs:
        copy(dst, src)
    if then is not None:
        then()


@atexit.register
def _end_all() -> None:
    """A process that ends waits for the lanes' threads: what they still do must find its libraries there."""
    for lanes in (list(_working), list(_carrying)):
        for lane in lanes:
            lane.close()
        for lane in lanes:
            lane.join(timeout_s=60)


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of updates that belong to no model: one set a device, as streams are few."""
    return _without_model(with_index(device), os.getpid())


@functools.cache
def _without_model(device: torch.device, process: int) -> Lanes:
    del process  # threads do not come along where it forks
    return Lanes(device)
