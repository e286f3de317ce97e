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


TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}


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
        (64, 1, 1, TORCHRUN, 1, 1),
        (64, 1, 64, {}, 56, 56),
    ],
)
def test_ranks_of_a_host_share_its_cores(
    cores: int,
    num_ranks: int,
    threads: int,
    environment: dict[str, str],
    expected: int,
    of_all: int,
    monkeypatch: pytest.MonkeyPatch,
):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    team.share_cores(num_ranks)
    try:
        assert team.update_threads() == expected
        assert team.threads_of_all(num_ranks, on_device=False) == of_all
        assert team.threads_of_all(num_ranks, on_device=True) == min(cores, num_ranks * threads)
    finally:
        team.share_cores(1)


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
