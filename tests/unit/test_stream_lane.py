"""Copies of an accelerator that must follow work of the CPU: issued when it is done, by who did it; streams are fakes."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autohete_fx.ir import Lane
from autohete_fx.runtime.lanes import Lanes
from autohete_fx.runtime.ticket import Ticket


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

        def record(self, stream: Any = None) -> None:
            log.lines.append(f"{stream.name} records {self.name}")

        def query(self) -> bool:
            return False

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


def test_who_must_have_the_bytes_on_the_cpu_holds_no_stream(log: Log):
    lanes = Lanes("cuda")
    ticket = lanes.submit(Lane.D2H, 0, torch.zeros(4), torch.ones(4))
    before = len(log.lines)
    ticket.synchronize()
    assert [line.split(" event")[0] for line in log.lines[before:]] == ["cpu waits"]
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
