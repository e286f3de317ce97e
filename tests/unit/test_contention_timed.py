"""How lanes that slow each other down are timed: fake clocks and streams, and a thread that works."""

import functools
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autohete_fx.ir import Lane
from autohete_fx.machine import contention as timing
from autohete_fx.machine.described import machine_text
from autohete_fx.runtime.lanes.team import update_team
from tests.planner_problems import MACHINE


class Accelerator:
    """Lanes whose pending seconds go by while somebody waits, at the rates of a machine. Streams stand for the first two."""

    def __init__(self, kept: dict[tuple[str, str], float]) -> None:
        self.kept, self.now_s = kept, 0.0
        self.pending_s: dict[str, float] = {"compute": 0.0, "h2d": 0.0, "update": 0.0}
        self.names = iter(self.pending_s)
        self.current = ""

    def stream(self, device: torch.device) -> "FakeStream":
        return FakeStream(self, next(self.names))

    def work(self, seconds: float) -> None:
        self.pending_s[self.current] += seconds

    def wait(self, name: str) -> None:
        while self.pending_s[name] > 1e-12:
            busy = [each for each, left in self.pending_s.items() if left > 1e-12]
            rate = {a: self.kept.get((a, next((b for b in busy if b != a), a)), 1.0) for a in busy}
            took_s = min(self.pending_s[each] / rate[each] for each in busy)
            for each in busy:
                self.pending_s[each] -= took_s * rate[each]
            self.now_s += took_s


class FakeStream:
    def __init__(self, device: Accelerator, name: str) -> None:
        self.device, self.name = device, name

    def __enter__(self) -> None:
        self.device.current = self.name

    def __exit__(self, *error: object) -> None:
        self.device.current = ""

    def synchronize(self) -> None:
        self.device.wait(self.name)


class FakeThread:
    """What the host works on, in pieces of 17 ms."""

    def __init__(self, device: Accelerator) -> None:
        self.device = device

    def begin(self, count: int) -> None:
        self.device.pending_s["update"] += 0.017 * count

    def finish(self) -> None:
        self.device.wait("update")


def test_lanes_are_timed_beside_each_other(monkeypatch: pytest.MonkeyPatch):
    kept = {("compute", "h2d"): 0.8, ("h2d", "compute"): 0.55, ("update", "h2d"): 0.5, ("h2d", "update"): 0.9}
    device = Accelerator(kept)

    def drain(_: object) -> None:
        for name in device.pending_s:
            device.wait(name)

    monkeypatch.setattr(timing.torch, "Stream", device.stream)
    monkeypatch.setattr(timing.torch, "accelerator", SimpleNamespace(synchronize=drain))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: device.now_s))
    cuda = torch.device("cuda")
    seconds = {Lane.COMPUTE: 0.003, Lane.H2D: 0.011}
    work: dict[Lane, timing.LaneWork] = {
        lane: timing.OnStream(cuda, functools.partial(device.work, each_s)) for lane, each_s in seconds.items()
    }
    found = timing.measure_contention(cuda, {**work, Lane.UPDATE: FakeThread(device)})
    assert {(lane, beside): rate for lane, beside, rate in found} == kept and len(found) == 4
    assert not any(left_s > 1e-9 for left_s in device.pending_s.values())
    listed = machine_text(replace(MACHINE, contention=found))
    assert re.search(r"\n  h2d beside compute +55% of its rate", listed)
    assert re.search(r"\n  update beside h2d +50% of its rate", listed)


def test_work_on_a_thread_has_begun_when_begin_returns():
    is_free, has_returned = threading.Event(), threading.Event()
    with update_team(torch.device("cpu")) as thread:
        thread.submit(is_free.wait)
        work = timing.OnThread(thread, lambda: None)
        other = threading.Thread(target=lambda: [work.begin(1), has_returned.set()])
        other.start()
        too_early = has_returned.wait(0.1)
        is_free.set()
        other.join()
    assert not too_early and has_returned.is_set()


def test_work_on_a_thread_is_done_when_it_is_waited_for_and_not_before():
    may_go_on, done = threading.Event(), []

    def do() -> None:
        may_go_on.wait()
        done.append(threading.get_ident())

    with update_team(torch.device("cpu")) as thread:
        work = timing.OnThread(thread, do)
        for count in (2, 1):
            may_go_on.clear()
            before = len(done)
            work.begin(count)
            at_first = len(done)
            may_go_on.set()
            work.finish()
            assert (at_first, len(done)) == (before, before + count)
    assert len({*done}) == 1 and threading.get_ident() not in done


def test_what_a_piece_of_work_on_a_thread_raises_is_raised_to_who_waits():
    def do() -> None:
        raise OSError("no memory")

    with update_team(torch.device("cpu")) as thread:
        work = timing.OnThread(thread, do)
        work.begin(1)
        with pytest.raises(OSError, match="no memory"):
            work.finish()


def test_lanes_that_leave_each_other_alone_are_not_listed():
    seconds = {(Lane.H2D, None): 1.0, (Lane.D2H, None): 1.0, (Lane.H2D, Lane.D2H): 1.02, (Lane.D2H, Lane.H2D): 1.6}
    found = timing.contention_of([Lane.H2D, Lane.D2H], lambda lane, beside: seconds[lane, beside])
    assert found == (("d2h", "h2d", 0.62),)
