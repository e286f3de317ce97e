"""The team of threads that updates on the host beside an accelerator."""

import os
import threading
import time
from unittest import mock

import pytest
import torch

from autohete_fx.ir import Lane
from autohete_fx.runtime.lanes import team
from autohete_fx.runtime.lanes.lanes import Lanes, lanes_of
from autohete_fx.runtime.lanes.thread import ThreadTicket
from autohete_fx.runtime.shard import ranks
from autohete_fx.runtime.shard.imagined import imagined_mesh


@pytest.mark.parametrize(
    ("cores", "threads", "expected"),
    [(1, 1, 1), (2, 2, 1), (4, 4, 3), (16, 16, 14), (16, 8, 8), (64, 64, 56), (8, 16, 7)],
)
def test_it_leaves_cores_to_the_threads_that_launch(
    cores: int, threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert team.update_threads() == expected


TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}


def surround(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Have of torchrun's variables these alone."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("cores", "num_ranks", "threads", "environment", "expected", "of_all"),
    [
        (64, 4, 1, TORCHRUN, 14, 56),  # torchrun's choice is nobody's
        (16, 8, 1, TORCHRUN, 1, 8),
        (2, 4, 1, TORCHRUN, 1, 1),
        (64, 4, 64, {}, 14, 56),  # as a program starts that knows of no other
        (64, 4, 3, {}, 3, 12),  # by torch.set_num_threads
        (64, 4, 3, TORCHRUN, 3, 12),
        (64, 4, 4, {"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "none"}, 4, 16),
        (64, 4, 20, {"OMP_NUM_THREADS": "20"}, 20, 56),  # as the user says, though it is too many
        (64, 4, 1, {"OMP_NUM_THREADS": "1"}, 1, 4),
        (64, None, 1, TORCHRUN, 1, 1),  # of a job that shares no model
        (16, 1, 1, TORCHRUN, 14, 14),  # bound to cores of its own
        (64, 1, 1, {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, 1, 1),  # torchrun leaves one process alone
        (64, None, 64, {}, 56, 56),
    ],
)
def test_ranks_of_a_host_share_its_cores(
    cores: int,
    num_ranks: int | None,
    threads: int,
    environment: dict[str, str],
    expected: int,
    of_all: int,
    monkeypatch: pytest.MonkeyPatch,
):
    surround(monkeypatch, environment)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(team, "_count", lambda: num_ranks)
    assert team.update_threads() == expected
    count = team.ranks_sharing_cores()
    assert team.threads_of_all(count, on_device=False) == of_all
    assert team.threads_of_all(count, on_device=True) == min(cores, count * threads)


@pytest.mark.parametrize(
    ("mine", "others", "cores_of_host", "environment", "expected"),
    [
        (range(8), [range(8)] * 3, 8, {}, 4),
        (range(2), [range(2, 4), range(4, 8)], 8, TORCHRUN, 1),  # each bound to its own
        (range(4), [range(4), range(4, 8), range(2, 8)], 8, TORCHRUN, 3),
        (range(8), [range(8)], 8, TORCHRUN, 4),  # two meshes of two
        (range(8), [range(8)], 8, {"LOCAL_WORLD_SIZE": "4"}, 2),
    ],
)
def test_those_whose_cores_overlap_share_them(
    mine: range,
    others: list[range],
    cores_of_host: int,
    environment: dict[str, str],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
):
    surround(monkeypatch, environment)
    monkeypatch.setattr(os, "cpu_count", lambda: cores_of_host)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(mine))
    elsewhere = ("another host", frozenset(mine))

    def exchanged(value: tuple[str, frozenset[int]], group: object) -> list[tuple[str, frozenset[int]]]:
        return [elsewhere, value, *((value[0], frozenset(cores)) for cores in others)]

    monkeypatch.setattr(ranks, "_exchanged", exchanged)
    places = ranks._places(mock.Mock())
    assert places == {"hosts": (0, *[1] * (1 + len(others))), "num_sharing_cores": expected}


def test_ranks_whose_groups_were_destroyed_share_nothing_any_more():
    with imagined_mesh(4) as mesh:
        assert ranks.ranks_of(mesh).num_sharing_cores == team.ranks_sharing_cores() == 4
    assert team.ranks_sharing_cores() == 1


def test_no_other_thread_computes_with_fewer(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(team, "update_threads", lambda: before + 3)
    with team.update_team(torch.device("cpu")) as updating:
        assert updating.submit(torch.get_num_threads).result() == before + 3
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == before and later == [before]


def test_a_thread_lets_go_of_those_it_computes_with_and_computes_again():
    before, gone, found = torch.get_num_threads(), list[bool](), list[float]()

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def computes() -> None:
        torch.set_num_threads(3)
        alone = threads()
        found.append(torch.ones(1 << 20).sum().item())
        mine = threads() - alone
        assert len(mine) >= 2
        team.let_go_of_team()
        deadline = time.monotonic() + 10.0  # they end by themselves
        while len(mine & threads()) > len(mine) - 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        gone.append(len(mine & threads()) <= len(mine) - 2)
        found.append(torch.ones(1 << 20).sum().item())
        team.let_go_of_team()

    thread = threading.Thread(target=computes)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert gone == [True] and found == [1 << 20] * 2


def test_threads_of_an_accelerators_lanes_work_with_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's device is the first of all, where others may train."""
    selected: list[tuple[str, object]] = []

    def select(device: torch.device) -> None:
        selected.append((threading.current_thread().name, device))

    monkeypatch.setattr(torch.accelerator, "set_device_index", select)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    lanes = Lanes("cuda")
    assert lanes.device == torch.device("cuda", 1)
    for lane in (lanes._updates, lanes._issuing):
        ticket = ThreadTicket(Lane.UPDATE, "work", 0, 0, lambda: None)
        lane.submit(ticket, ())
        ticket.synchronize()
    with team.update_team(torch.device("cuda")) as thread:
        thread.submit(lambda: None).result()
    assert [device for _, device in selected] == [torch.device("cuda", 1)] * 3
    assert threading.current_thread().name not in dict(selected)
    assert lanes_of(torch.device("cuda")) is lanes_of(torch.device("cuda", 1))
