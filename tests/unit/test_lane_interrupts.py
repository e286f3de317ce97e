"""An interrupt in the middle of a submission leaves a lane that works, drains and closes."""

import contextlib
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from autohete_fx.ir import Lane
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.thread import ThreadLane, ThreadTicket
from autohete_fx.runtime.lanes.ticket import Ticket


def works(lanes: Lanes) -> bool:
    """Whether nothing is missed at the end, and what is submitted is done."""
    drained = threading.Thread(target=_drain, args=(lanes,), daemon=True)
    drained.start()
    drained.join(10)
    done = threading.Event()
    lanes.update(0, done.set).wait()
    return done.is_set() and not drained.is_alive()


def _drain(lanes: Lanes) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        lanes.drain()


@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_interrupt_while_a_thread_starts(when: str, monkeypatch: pytest.MonkeyPatch):
    lanes = Lanes("cpu", in_background=True)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if when == "behind":
            start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        lanes.update(0, lambda: None)
    assert works(lanes)
    lanes.close()


@pytest.mark.parametrize("in_background", [True, False])
def test_an_interrupt_anywhere_in_a_submission(in_background: bool):
    """Python looks for signals where calls begin and where those of C functions end: here an interrupt comes at each of
    those places, one after the other."""
    place = 0
    while _is_interrupted(place, in_background):
        place += 1
    assert place > 5


def _is_interrupted(place: int, in_background: bool) -> bool:
    """Whether a submission has a place of that number. It is interrupted there, and what is left must work."""
    lanes = Lanes("cpu", in_background=in_background)
    assert works(lanes)
    places = iter(range(1 << 20))
    files = {f.__code__.co_filename for f in (ThreadLane.submit, Ticket.set_ready, threading.Condition.notify)}

    def interrupt(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in files and next(places) == place:
            sys.setprofile(None)
            raise KeyboardInterrupt

    ticket = ThreadTicket(Lane.UPDATE, "update", 0, 0, lambda: None)
    try:
        sys.setprofile(interrupt)
        lanes._updates.submit(ticket)
        sys.setprofile(None)
    except KeyboardInterrupt:
        is_interrupted = True
    else:
        is_interrupted = False
    assert works(lanes), f"place {place}"
    assert ticket.is_complete or not ticket.is_counted
    lanes.close()
    return is_interrupted
