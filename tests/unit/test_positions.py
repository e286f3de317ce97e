"""Where ranks are in their program, as each counts for itself."""

from typing import Any

from autohete_fx.runtime.lanes import positions


class Group:
    """Stands for a process group."""


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
