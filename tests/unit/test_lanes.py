"""Copy lanes: order, failure, lifetime."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from autohete_fx.ir import Lane
from autohete_fx.runtime.lanes.copies import copy_on_this_thread, has_spare_core
from autohete_fx.runtime.lanes.lanes import COPY_LANES, Lanes
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.updates import Updates


class Gate:
    """A copy that waits until it is opened, and remembers what it copied."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.order: list[float] = []

    def __call__(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.entered.set()
        assert self.open.wait(60)
        self.order.append(float(src[0]))
        copy_on_this_thread(dst, src)


def pair(value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4), torch.full((4,), value)


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("autohete-")]


@pytest.mark.parametrize("lane", COPY_LANES)
def test_a_copy_arrives(lane: Lane) -> None:
    lanes = Lanes("cpu")
    dst, src = torch.zeros(1000, 7), torch.randn(1000, 7)
    ticket = lanes.submit(lane, 3, dst, src)
    ticket.wait()
    ticket.wait()
    assert torch.equal(dst, src)
    lanes.drain()
    (record,) = lanes.records()
    assert (record.lane, record.priority, record.num_bytes) == (lane, 3, 28000) and record.begin_s <= record.end_s
    lanes.close()


def test_smaller_priorities_go_first_and_equal_ones_in_order() -> None:
    gate = Gate()
    lanes = Lanes("cpu", copy=gate)
    lanes.submit(Lane.D2H, 0, *pair(-1))
    assert gate.entered.wait(60)
    tickets = [lanes.submit(Lane.D2H, p, *pair(v)) for p, v in [(5, 50), (2, 20), (5, 51), (1, 10), (2, 21)]]
    gate.open.set()
    for ticket in tickets:
        ticket.wait()
    assert gate.order == [-1, 10, 20, 21, 50, 51]
    lanes.close()


def test_lanes_do_not_wait_for_one_another() -> None:
    gate = Gate()
    lanes = Lanes("cpu", copy=lambda dst, src: gate(dst, src) if src[0] < 0 else copy_on_this_thread(dst, src))
    stuck = lanes.submit(Lane.D2H, 0, *pair(-1))
    dst, src = pair(4)
    lanes.submit(Lane.H2D, 0, dst, src).wait()
    assert torch.equal(dst, src) and not gate.order
    gate.open.set()
    stuck.wait()
    lanes.close()


def test_a_failure_reaches_who_waits_and_the_lane_goes_on() -> None:
    def fail(dst: torch.Tensor, src: torch.Tensor) -> None:
        if src[0] < 0:
            raise OSError("the disk is gone")
        copy_on_this_thread(dst, src)

    lanes = Lanes("cpu", copy=fail)
    failed = lanes.submit(Lane.H2D, 0, *pair(-1))
    dst, src = pair(2)
    good = lanes.submit(Lane.H2D, 1, dst, src)
    good.wait()
    assert torch.equal(dst, src)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        failed.wait()
    assert any(entry.name == "fail" for entry in caught.traceback)
    lanes.drain()  # it was raised already
    lanes.submit(Lane.H2D, 0, *pair(-1))
    with pytest.raises(OSError, match="the disk is gone"):
        lanes.drain()
    lanes.drain()
    assert [record.priority for record in lanes.records()] == [1]
    lanes.close()


def test_tensors_are_kept_until_waited_and_not_longer() -> None:
    gate = Gate()
    lanes = Lanes("cpu", copy=gate)
    dst, src = pair(1)
    dead = weakref.ref(src)
    ticket = lanes.submit(Lane.D2H, 0, dst, src)
    del src
    gc.collect()
    assert dead() is not None
    gate.open.set()
    ticket.wait()
    assert dead() is None
    # A ticket that nobody waits for goes with its copy.
    dropped = torch.ones(4)
    dead = weakref.ref(dropped)
    lanes.submit(Lane.D2H, 0, dst, dropped)
    del dropped
    lanes.close()
    for thread in lane_threads():
        thread.join(60)
    assert dead() is None


def test_close_completes_what_was_submitted() -> None:
    lanes = Lanes("cpu")
    pairs = [pair(v) for v in range(20)]
    for dst, src in pairs:
        lanes.submit(Lane.D2H, 0, dst, src)
    lanes.close()
    assert all(torch.equal(dst, src) for dst, src in pairs)
    with pytest.raises(RuntimeError, match="the d2h lane is closed"):
        lanes.submit(Lane.D2H, 0, *pair(1))


def test_work_begins_behind_its_preparation_whoever_prepares() -> None:
    """One thread of the lane prepares what is next in the queue while another takes that from it."""
    lanes = Lanes("cpu", in_background=True, num_update_workers=2)
    for _ in range(10):
        queued, prepared = threading.Event(), threading.Event()
        blockers = [lanes.update(0, lambda event=queued: event.wait(10)) for _ in range(2)]
        first = lanes.update(1, lambda: None)
        found: list[bool] = []
        second = lanes.update(
            2,
            lambda event=prepared, found=found: found.append(event.is_set()),
            prepare=lambda event=prepared: (time.sleep(0.01), event.set()),
        )
        queued.set()
        for ticket in (*blockers, first, second):
            ticket.wait()
        assert found == [True]
    lanes.close()


def test_a_lanes_own_thread_may_close_it() -> None:
    """As a garbage collection does that drops the model there: it must not wait for itself."""
    lanes = Lanes("cpu", in_background=True)
    closing = lanes.update(0, lanes.close)
    waiter = threading.Thread(target=closing.wait, daemon=True)
    waiter.start()
    waiter.join(10)
    assert closing.is_complete
    with pytest.raises(RuntimeError, match="closed"):
        lanes.update(0, lambda: None)


def test_dropping_the_lanes_ends_their_threads_and_completes_tickets() -> None:
    gate = Gate()
    lanes = Lanes("cpu", copy=gate)
    dst, src = pair(6)
    assert not lane_threads()  # started lazily
    ticket = lanes.submit(Lane.D2H, 0, dst, src)
    threads = lane_threads()
    assert len(threads) == 1 and threads[0].daemon
    del lanes
    gc.collect()
    gate.open.set()
    ticket.wait()
    assert torch.equal(dst, src)
    for thread in threads:
        thread.join(60)
    assert not lane_threads()


@pytest.mark.parametrize(
    ("make_dst", "make_src"),
    [
        (lambda: torch.zeros(300, 400), lambda: torch.randn(400, 300).t()),
        (lambda: torch.zeros(400, 300).t(), lambda: torch.randn(400, 300).t()),
        (lambda: torch.zeros(700, 200)[::2], lambda: torch.randn(350, 400)[:, ::2]),
        (lambda: torch.zeros(100_000, dtype=torch.bfloat16), lambda: torch.randn(100_000)),
        (lambda: torch.zeros(3, 70_000), lambda: torch.randn(1, 70_000).expand(3, -1)),
        (lambda: torch.zeros(5, 1, 9), lambda: torch.randn(9, 1, 5).transpose(0, 2)),
        (lambda: torch.zeros(40_000, dtype=torch.cfloat), lambda: torch.randn(40_000, dtype=torch.cfloat).conj()),
        (lambda: torch.tensor(0.0), lambda: torch.tensor(3.0)),
        (lambda: torch.zeros(0, 3), lambda: torch.zeros(0, 3)),
    ],
)
def test_every_layout_is_copied(make_dst: Callable[[], torch.Tensor], make_src: Callable[[], torch.Tensor]) -> None:
    dst, src = make_dst(), make_src()
    copy_on_this_thread(dst, src)
    assert torch.equal(dst, src.to(dst.dtype))


def test_copies_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autohete_fx.runtime.lanes.copies._PIECE_BYTES", 1000)
    dst, src = torch.zeros(1777), torch.randn(1777)
    copy_on_this_thread(dst, src)
    assert torch.equal(dst, src)


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes("cpu")
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(RuntimeError, match="'spawn' method"):
        lanes.submit(Lane.H2D, 0, *pair(1))


def test_mismatched_submissions_are_bugs() -> None:
    lanes = Lanes("cpu")
    with pytest.raises(AssertionError, match="cannot copy"):
        lanes.submit(Lane.H2D, 0, torch.zeros(2), torch.zeros(3))
    with pytest.raises(AssertionError, match="no copy lane"):
        lanes.submit(Lane.UPDATE, 0, torch.zeros(2), torch.zeros(2))


class DeviceClock:
    """Stands in for an accelerator's streams and events; ``passed`` says whether the device has got to the events."""

    passed = False
    device = None

    def __init__(self, device: object = None, enable_timing: bool = False) -> None: ...
    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return id(self)

    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: object) -> float:
        return 1.0


class OtherStream(DeviceClock):
    """A stream of the user's own."""


@pytest.fixture
def device_clock(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Streams and events are `DeviceClock`s, and may be patched further."""
    monkeypatch.setattr(torch, "Event", DeviceClock)
    monkeypatch.setattr(torch, "Stream", DeviceClock)
    monkeypatch.setattr(torch.accelerator, "current_stream", DeviceClock)
    return monkeypatch


def test_a_stream_holds_a_copys_tensors_until_it_was_waited_for_or_ended(device_clock: pytest.MonkeyPatch) -> None:
    """Held any longer, offloaded activations would stay on the device: the CPU issues far ahead of it."""
    lanes = Lanes("cuda")

    def submit() -> tuple[Ticket, weakref.ref[torch.Tensor]]:
        dst, src = pair(3)
        return lanes.submit(Lane.D2H, 0, dst, src), weakref.ref(src)

    waited, source = submit()
    forgotten, unread = submit()
    waited.wait()
    del forgotten
    assert source() is None and unread() is not None
    device_clock.setattr(DeviceClock, "passed", True)
    assert len(lanes.records()) == 2 and unread() is None


def test_who_waited_for_a_copy_has_waited_for_what_it_follows(device_clock: pytest.MonkeyPatch) -> None:
    """A gradient that an update read goes when the forward has waited for the parameter, which was fetched behind the update."""
    lanes = Lanes("cuda")
    sources: list[weakref.ref[torch.Tensor]] = []

    def issue(copies: list[Ticket]) -> None:
        for _ in range(3):
            dst, src = pair(3)
            sources.append(weakref.ref(src))
            copies.append(lanes.submit_all(Lane.D2H, 0, [(dst, src)], for_update=True))

    for here in (True, False):
        sources.clear()
        streamed = lanes.stream(0, issue, here=here)
        fetched = lanes.submit(Lane.H2D, 0, *pair(3), (streamed,))
        while len(sources) < 3 or not fetched.is_ready:
            time.sleep(1e-3)
        assert all(source() is not None for source in sources)
        fetched.wait()
        assert all(source() is None for source in sources)
    device_clock.setattr(DeviceClock, "passed", True)
    lanes.close()


def test_a_stream_that_does_not_compute_waits_and_lets_go_of_nothing(device_clock: pytest.MonkeyPatch) -> None:
    """What computes may write over memory that is free again before the copy has ended."""
    lanes = Lanes("cuda")
    dst, src = pair(3)
    source = weakref.ref(src)
    copies = [lanes.submit_all(Lane.D2H, 0, [(dst, src)], streamed=True)]
    streamed = lanes.stream(0, lambda given: given.extend(copies), here=True)
    copies.clear()
    del dst, src
    device_clock.setattr(torch.accelerator, "current_stream", lambda device: OtherStream())
    streamed.wait()
    lanes.submit(Lane.H2D, 0, *pair(3), (streamed,)).wait()
    assert source() is not None and not streamed.is_complete
    device_clock.setattr(torch.accelerator, "current_stream", DeviceClock)
    streamed.wait()
    assert source() is None
    device_clock.setattr(DeviceClock, "passed", True)
    assert streamed.is_complete
    lanes.close()


def test_updates_that_are_over_are_let_go_of_whoever_waits(device_clock: pytest.MonkeyPatch) -> None:
    lanes = Lanes("cuda")
    updates, param, (dst, src) = Updates(lanes), torch.zeros(1), pair(3)
    gradient = weakref.ref(src)
    copy = lanes.submit(Lane.H2D, 0, dst, src, for_update=True)
    updates.add(lanes.stream(0, lambda copies: copies.append(copy), here=True), param)
    del dst, src
    updates.prune()
    assert gradient() is not None and updates.is_pending
    device_clock.setattr(DeviceClock, "passed", True)
    updates.prune()
    assert gradient() is None and not updates.is_pending
    lanes.close()


@pytest.mark.parametrize("lane", COPY_LANES)
def test_without_a_spare_core_a_copy_is_complete_when_it_was_submitted(lane: Lane):
    lanes = Lanes("cpu", in_background=False)
    dst, src = torch.zeros(64, 48), torch.randn(48, 64).t()
    before = threading.active_count()
    ticket = lanes.submit(lane, 1, dst, src)
    assert torch.equal(dst, src) and threading.active_count() == before
    ticket.wait()
    lanes.drain()
    assert [(record.lane, record.num_bytes) for record in lanes.records()] == [(lane, dst.nbytes)]
    lanes.close()
    with pytest.raises(RuntimeError, match="closed"):
        lanes.submit(lane, 1, dst, src)


def test_without_a_spare_core_a_failure_still_reaches_who_waits():
    def fail(dst: torch.Tensor, src: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    lanes = Lanes("cpu", copy=fail, in_background=False)
    ticket = lanes.submit(Lane.D2H, 0, *pair(1))
    with pytest.raises(OSError, match="the disk is gone"):
        ticket.wait()
    lanes.drain()  # it was raised already
    assert not lanes.records()


def test_copies_run_in_the_background_where_cores_are_spare(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert has_spare_core()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert not has_spare_core()
