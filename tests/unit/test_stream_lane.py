"""Copies of an accelerator that must follow work of the CPU: issued when it is done, by who did it; streams are fakes."""

import gc
import itertools
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autohete_fx.graph.ops import contiguous_stride
from autohete_fx.ir import Lane, Optimizer, Overlap, Params, Schedule
from autohete_fx.optim import AdamW
from autohete_fx.runtime.lanes import stream
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.fence import lower_fences
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import open_tier


class Log:
    """What streams and events were told, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    log, count = Log(), iter(range(1000))

    class Event:
        def __init__(self, device: object = None, enable_timing: bool = False) -> None:
            self.name = f"event {next(count)}"
            self.asked = 0

        def record(self, stream: Any = None) -> None:
            log.lines.append(f"{stream.name} records {self.name}")

        def query(self) -> bool:
            self.asked += 1
            return self.asked > 3

        def synchronize(self) -> None:
            log.lines.append(f"cpu waits {self.name}")

        def elapsed_time(self, end: object) -> float:
            return 1.0

    class Stream:
        def __init__(self, device: object = None, name: str = "lane") -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            log.lines.append(f"{self.name} waits {event.name}")

        def synchronize(self) -> None:
            log.lines.append(f"cpu waits {self.name}")

        def __eq__(self, other: Any) -> bool:
            return self.name == other.name

        def __hash__(self) -> int:
            return id(self)

        device = None

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: Stream(name="compute"))
    yield log


def copies(log: Log) -> int:
    """Copies that were issued: each records its begin and its end on the lane; its opening records once."""
    return (sum(line.startswith("lane records") for line in log.lines) - 1) // 2


def held_update(lanes: Lanes) -> tuple[Ticket, threading.Event]:
    opened = threading.Event()

    def work() -> None:
        assert opened.wait(60)

    return lanes.update(0, work), opened


def test_a_copy_is_issued_behind_the_moment_of_its_submission(log: Log):
    lanes = Lanes("cuda")
    ticket = lanes.submit(Lane.H2D, 0, torch.zeros(4), torch.ones(4))
    recorded = next(line.split(" records ")[1] for line in log.lines if line.startswith("compute records"))
    assert f"lane waits {recorded}" in log.lines and copies(log) == 1
    before = len(log.lines)
    ticket.wait()
    assert log.lines[before:] and log.lines[before].startswith("compute waits")
    lanes.close()


def test_what_updates_copy_waits_behind_nothing_that_waits_for_the_device(log: Log, monkeypatch: pytest.MonkeyPatch):
    """A backward issues its fetches long before the device gets there."""
    streams: list[object] = []
    issue = stream.StreamTicket.issue
    monkeypatch.setattr(
        stream.StreamTicket, "issue", lambda ticket, stream: (streams.append(stream), issue(ticket, stream))
    )
    lanes = Lanes("cuda")
    update, opened = held_update(lanes)
    uploaded = lanes.submit(Lane.H2D, 0, torch.zeros(4), torch.ones(4), (update,), for_update=True)
    fetched = lanes.submit(Lane.H2D, 0, torch.zeros(4), torch.ones(4))
    opened.set()
    for ticket in (uploaded, fetched):
        ticket.synchronize()
    assert len(set(map(id, streams))) == 2 and len(lanes.records()) == 3
    lanes.close()


def test_who_must_have_the_bytes_on_the_cpu_holds_no_stream(log: Log):
    lanes = Lanes("cuda")
    ticket = lanes.submit(Lane.D2H, 0, torch.zeros(4), torch.ones(4))
    before = len(log.lines)
    ticket.synchronize()
    assert [line.split(" event")[0] for line in log.lines[before:]] == ["cpu waits"]
    asked: Any = ticket
    assert asked.end.asked > 3, "where the event has not passed, the CPU would spin"
    lanes.close()


def test_a_copy_behind_an_update_is_issued_when_that_is_done(log: Log):
    lanes = Lanes("cuda")
    update, opened = held_update(lanes)
    dst, seen = torch.zeros(4), []
    ticket = lanes.submit(
        Lane.H2D, 0, dst, torch.ones(4), (update, lanes.now()), then=lambda: seen.append((dst.clone(), len(log.lines)))
    )
    assert copies(log) <= 0 and not ticket.is_complete
    waited = threading.Thread(target=ticket.wait)
    waited.start()
    assert waited.is_alive()
    opened.set()
    waited.join(60)
    assert copies(log) == 1 and torch.equal(dst, torch.ones(4))
    ((copied, at),) = seen
    assert torch.equal(copied, dst), "what follows the copy is given to the stream behind it"
    assert any(line.startswith("lane records") for line in log.lines[at:]), "and belongs to its ticket"
    lanes.close()


def test_what_was_asked_for_under_inference_mode_is_copied_by_the_thread_that_ends_the_update(log: Log):
    lanes = Lanes("cuda")
    update, opened = held_update(lanes)
    with torch.inference_mode():
        dst = torch.zeros(4)
        ticket = lanes.submit(Lane.H2D, 0, dst, torch.ones(4), (update,))
    opened.set()
    ticket.wait()
    assert dst.is_inference() and torch.equal(dst, torch.ones(4))
    lanes.close()


def test_a_copy_behind_a_failed_update_is_never_issued_and_tells_why(log: Log):
    lanes = Lanes("cuda")

    def fail() -> None:
        raise OSError("no luck")

    update = lanes.update(0, fail)
    ticket = lanes.submit(Lane.H2D, 0, torch.zeros(4), torch.ones(4), (update,))
    for _ in range(2):
        with pytest.raises(OSError, match="no luck"):
            ticket.wait()
    assert copies(log) <= 0 and ticket.is_complete
    lanes.close()


def test_a_lane_survives_a_device_that_fails_behind_an_update(log: Log, monkeypatch: pytest.MonkeyPatch):
    """The copy is issued by the thread of the update lane. What fails there must reach the one who waits, and end no thread."""
    lanes = Lanes("cuda")
    update, opened = held_update(lanes)
    ticket = lanes.submit(Lane.H2D, 0, torch.zeros(4), torch.ones(4), (update, lanes.now()))

    def fail(stream: object, event: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Stream, "wait_event", fail)
        opened.set()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            ticket.wait()
    assert log.lines[-1] == "cpu waits lane", "the copy might have been under way"
    lanes.update(0, lambda: None).wait()
    lanes.close()


@pytest.mark.parametrize("wait", ["wait", "synchronize"])
def test_what_follows_a_copy_is_held_until_somebody_waited(wait: str, log: Log):
    """It may own memory that the stream has yet to write."""
    lanes = Lanes("cuda")
    ticket = lanes.submit(Lane.H2D, 0, torch.zeros(4), torch.ones(4), then=(owner := torch.zeros(1)).zero_)
    held = weakref.ref(owner)
    del owner
    gc.collect()
    assert held() is not None
    getattr(ticket, wait)()
    gc.collect()
    assert held() is None
    lanes.close()


def test_from_home_to_home_the_device_copies(log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Host views on both sides would make it a copy of the CPU's, which waits for no stream."""
    viewed: list[torch.Tensor] = []
    monkeypatch.setattr(stream, "host_view", lambda t: viewed.append(t) or t)
    tier = open_tier("cpu", str(tmp_path))
    here, there = (tier.empty_strided((4,), contiguous_stride((4,)), torch.float32).fill_(n) for n in (1, 2))
    lanes = Lanes("cuda")
    lanes.submit(Lane.D2H, 0, here, there).wait()
    assert not viewed and torch.equal(here, there)
    lanes.submit(Lane.D2H, 0, here, torch.zeros(4)).wait()
    assert len(viewed) == 1 and viewed[0] is here
    lanes.close()


def test_records_tell_microseconds_hours_after_the_lane_was_opened(log: Log, monkeypatch: pytest.MonkeyPatch):
    """CUDA gives elapsed milliseconds in single precision."""
    ticks = itertools.count()

    def record(event: Any, stream: Any) -> None:  # a copy of 20 microseconds every 50 seconds
        if stream.name == "lane":
            count = next(ticks) - 1  # the lane's opening came first
            event.at_ms = count // 2 * 50e3 + count % 2 * 0.02

    def elapsed_ms(begin: Any, end: Any) -> float:
        return struct.unpack("f", struct.pack("f", end.at_ms - begin.at_ms))[0]

    monkeypatch.setattr(torch.Event, "record", record)
    monkeypatch.setattr(torch.Event, "elapsed_time", elapsed_ms)
    monkeypatch.setattr(torch.Event, "query", lambda event: True)
    lanes = Lanes("cuda")
    tickets: list[Any] = [lanes.submit(Lane.H2D, 0, torch.zeros(4), torch.ones(4)) for _ in range(300)]
    found = lanes.records()
    assert len(found) == len(tickets)
    origin_s = found[0].end_s - tickets[0].end.at_ms / 1e3
    for ticket, record_ in zip(tickets, found, strict=True):
        begin_s, end_s = (origin_s + event.at_ms / 1e3 for event in (ticket.begin, ticket.end))
        assert record_.end_s - record_.begin_s == pytest.approx(end_s - begin_s, abs=3e-6)
        assert record_.end_s == pytest.approx(end_s, abs=1e-3)
    lanes.close()


def test_what_the_next_update_needs_is_prepared_while_one_runs(log: Log):
    lanes = Lanes("cuda")
    first, opened = held_update(lanes)
    prepared = threading.Event()
    order: list[str] = []
    second = lanes.update(1, lambda: order.append("work"), prepare=lambda: (order.append("prepare"), prepared.set())[0])
    third, _ = held_update(lanes)  # more urgent than the second by its priority
    _.set()
    opened.set()
    second.wait()
    assert prepared.is_set() and order == ["prepare", "work"]
    first.wait(), third.wait()
    lanes.close()


def test_a_wait_that_holds_the_program_is_recorded_as_such():
    lanes = Lanes("cpu", in_background=True, pace=lambda ticket: 0.02)
    lanes.wait(lanes.submit(Lane.D2H, 0, torch.zeros(4), torch.ones(4), label="offload"))
    held, moved = sorted(lanes.records(), key=lambda record: record.lane is not Lane.COMPUTE)
    assert (held.lane, held.label, moved.lane) == (Lane.COMPUTE, "offload", Lane.D2H)
    assert held.end_s - held.begin_s > 0.01
    lanes.close()


def test_streamed_states_are_updated_between_their_copies(log: Log, tmp_path: Path):
    """The kernel is given to the stream that copies up, and the states go down behind its end."""
    tier, lanes = open_tier("cpu", str(tmp_path)), Lanes("cuda")
    param, twin = (torch.nn.Parameter(torch.linspace(-1, 1, 1 << 15)) for _ in "ab")
    updates = Updates(lanes)
    updates.schedule = Schedule(overlap=Overlap.STEP)
    placement = Placement(Params.DEVICE, Optimizer.STREAMED, tier, 0, updates)
    place_param(param, placement)
    optimizer, reference = AdamW([param]), AdamW([twin])
    for step in range(3):
        param.grad, twin.grad = (torch.full_like(twin, 0.5 + step) for _ in "ab")
        log.lines.clear()
        optimizer.step(), reference.step()
        optimizer.synchronize()
        assert torch.equal(param, twin)
        if not step:
            continue  # the lanes were opened, which records too
        (ends, begins), waits = _recorded(log), [line for line in log.lines if line.startswith("lane waits")]
        assert len(ends) == len(begins) > 3, "pieces, up and down"
        assert {f"lane waits {end}" for end in ends[::2]} <= set(waits), "what goes down is behind the kernel"
    lower_fences()
    lanes.close()


def _recorded(log: Log) -> tuple[list[str], list[str]]:
    """Events at the ends and at the begins of copies, in the order of their issue."""
    recorded = [line.split(" records ")[1] for line in log.lines if line.startswith("lane records")]
    return recorded[1::2], recorded[::2]
