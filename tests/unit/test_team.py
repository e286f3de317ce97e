"""The team of threads that updates on the host beside an accelerator."""

import os
import threading
import time

import pytest
import torch

from autohete_fx.runtime.lanes import team


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


def test_no_other_thread_computes_with_fewer(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(team, "update_threads", lambda: before + 3)
    with team.update_team() as updating:
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
