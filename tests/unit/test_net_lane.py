"""The net lane on a CPU device: collectives of a kind in the order of the program, beside computation and the other kind."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from autohete_fx.errors import ShardError
from autohete_fx.ir import Lane
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.net import run_collective
from autohete_fx.runtime.shard.imagined import imagined_mesh
from autohete_fx.runtime.shard.ranks import ranks_of


def collective(log: list[str], name: str, wait: float = 0.0) -> list[SimpleNamespace]:
    log.append(f"start {name}")

    def ends(_: object) -> None:
        time.sleep(wait)
        log.append(f"end {name}")

    return [SimpleNamespace(wait=ends)]


def test_collectives_of_a_kind_follow_each_other_in_the_order_of_the_program_while_it_and_the_other_kind_go_on():
    lanes, log, goes_on = Lanes("cpu", in_background=False), [], threading.Event()

    def first() -> list[SimpleNamespace]:
        goes_on.wait(10)
        return collective(log, "first", 0.01)

    tickets = [
        lanes.collective("gather", first, num_bytes=8),
        lanes.collective("gather", lambda: collective(log, "second"), num_bytes=16),
    ]
    assert not log and not tickets[0].is_complete  # the program is here, although no core is to spare
    lanes.wait(lanes.collective("reduce", lambda: collective(log, "other"), num_bytes=32))
    assert log == ["start other", "end other"]
    goes_on.set()
    lanes.wait(tickets[1])
    assert log[2:] == ["start first", "end first", "start second", "end second"]
    records = [record for record in lanes.records() if record.lane is Lane.NET]
    assert [(record.label, record.num_bytes) for record in records] == [("reduce", 32), ("gather", 8), ("gather", 16)]
    assert records[1].end_s <= records[2].begin_s
    lanes.close()


def test_who_waits_for_a_failed_collective_learns_why():
    lanes = Lanes("cpu")

    def fails() -> list[SimpleNamespace]:
        raise RuntimeError("Connection closed by peer [127.0.0.1]")

    ticket = lanes.collective("gather", fails, num_bytes=8)
    with pytest.raises(ShardError, match=r"over the ranks that hold the model failed: Connection closed by peer"):
        ticket.wait()
    lanes.close()


def test_a_failure_is_told_as_it_is_where_the_ranks_of_an_earlier_model_are_gone():
    with imagined_mesh(2) as mesh:
        earlier = ranks_of(mesh)

    def fails() -> list[SimpleNamespace]:
        raise RuntimeError("Connection closed by peer [127.0.0.1]")

    with pytest.raises(ShardError, match=r"failed: Connection closed by peer .*Look at the other ranks' output"):
        run_collective(fails, on_cpu=True)
    assert earlier.total == 2


def test_a_rank_that_has_no_memory_itself_looks_for_no_other():
    def takes_too_much() -> list[SimpleNamespace]:
        return [SimpleNamespace(wait=torch.empty(2**50))]

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        run_collective(takes_too_much, on_cpu=True)


def test_a_session_gives_each_result_of_a_collective_once():
    from autohete_fx.runtime.session import Session

    session = Session("net", torch.device("cpu"))
    sources, results = [torch.zeros(2), torch.zeros(3)], [torch.zeros(4), torch.zeros(6)]

    def start() -> list[SimpleNamespace]:
        for at, result in enumerate(results):
            result.fill_(at + 1)
        return []

    handle = session.issue_collective("gather", start, sources, results, num_bytes=40)
    with pytest.raises(AssertionError, match="wait must get the tensor"):
        session.wait(handle, sources[0], 1)
    second = session.wait(handle, sources[1], 1)
    assert second is results[1] and second.tolist() == [2.0] * 6
    assert session._in_flight
    assert session.wait(handle, sources[0], 0) is results[0] and not session._in_flight
    session.close()
