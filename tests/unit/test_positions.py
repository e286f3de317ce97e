"""Where ranks are in their program, as each counts for itself."""

import json
from typing import Any

import pytest
import torch.distributed as dist

from autohete_fx.runtime.lanes import positions


class Group:
    """Stands for a process group."""

    group_name = "control"


def test_a_backward_counts_with_its_first_collective():
    """Of a graph without collectives, ranks may leave a backward out: its gradients are averaged by the step."""
    ranks: list[Any] = [Group(), Group()]
    for rank in ranks:
        positions.note_forward(rank)
        positions.note_collective(rank)
    positions.note_backward(ranks[0])  # without a collective
    for rank in ranks:
        positions.note_step(rank)
        positions.note_forward(rank)
    positions.note_collective(ranks[0])
    assert positions.position_of(ranks[0]) == (2, 0, 1, 2) and positions.position_of(ranks[1]) == (2, 0, 1, 1)
    positions.note_backward(ranks[0])
    for _ in range(2):
        positions.note_collective(ranks[0])
    assert positions.position_of(ranks[0]) == (2, 1, 1, 4)


@pytest.mark.parametrize(("other", "is_told"), [(1, True), (2, False)])
def test_ranks_of_other_replicas_may_run_other_collectives(other: int, is_told: bool, monkeypatch: pytest.MonkeyPatch):
    """Where the values of a batch decide what a graph runs, as for experts."""
    control: Any = Group()
    store = dist.HashStore()
    monkeypatch.setattr(positions, "meeting", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2, 3])
    positions.are_alike(control, [0, 1])
    positions.note_forward(control)
    positions.note_step(control)
    store.set(f"autohete_fx/position/control/{other}", json.dumps((1, 0, 0, 5)))
    assert (
        positions.diverged(control).startswith(f"rank {other} has begun 1 forwards, 0 backwards, 0 steps and 5")
        is is_told
    )
