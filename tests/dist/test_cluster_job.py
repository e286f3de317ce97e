"""Plans of unlike pipelines train as one process does: losses, norms of gradients, weights and optimizer states, in fp64."""

from pathlib import Path
from typing import Any

import pytest

from tests.dist.cluster_jobs import STEPS
from tests.dist.ranks import run

DEPTH = 3
"""Layers of the model; plans count two more, before and after."""
EXACT = 1e-11
"""Rounding of sums, which AdamW's first steps divide by numbers as small."""


def plans() -> list[Any]:
    """(micro-batch, micro-batches, last layers of stages) of each pipeline."""
    return [
        [(1, 4, [0, 3, 4])],  # the embedding alone, and the head alone
        [(1, 6, [0, 1, 2, 3, 4])],
        [(1, 4, [1, 3, 4]), (3, 2, [2, 4])],  # unequal depth and micro-batches
        [(2, 3, [0, 2, 4]), (1, 2, [2, 4])],
        [(1, 2, [1, 4]), (1, 3, [2, 4]), (2, 2, [3, 4])],
        [(1, 1, [4]), (2, 2, [4]), (3, 1, [4]), (1, 2, [1, 4])],
    ]


def check(found: list[list[dict[str, float]]], cases: list[Any]) -> None:
    for index, case in enumerate(cases):
        rows = [rank[index] for rank in found]
        assert sum(row["held"] for row in rows) > 0
        for key in ("loss", "norm", "weights", "states"):
            assert max(row[key] for row in rows) < EXACT, (key, case)


def check_legs(found: list[list[dict[str, Any]]], steps: int) -> None:
    """Jobs that go on with what others have saved: of so many steps the first, and of two more each."""
    for rank in found:
        for index, row in enumerate(rank):
            assert "error" not in row, row
            assert row["first"] == (steps + 2 * (index - 1) if index else 0)
            assert max(row[key] for key in ("loss", "weights", "states")) < EXACT


@pytest.mark.slow
def test_a_job_of_any_plan_equals_one_process(tmp_path: Path):
    cases = [
        (DEPTH, index % 2 == 0, rows, None, "gpipe" if index % 3 == 1 else "1f1b", "torch")
        for index, rows in enumerate(plans())
    ]
    check(run("tests.dist.cluster_jobs.differences", tmp_path, cases, num_ranks=6), cases)


@pytest.mark.slow
def test_memory_that_only_our_backend_keeps_to_is_told_where_the_job_is_joined(tmp_path: Path):
    for states, wholes in run("tests.dist.cluster_jobs.warned", tmp_path):
        assert states[0] == wholes[0] == "cluster_jobs.py"
        assert "keeps optimizer states of 2 layers on hosts, and AdamW keeps all of them" in states[1]
        assert "the backend 'eager' keeps parameters whole" in wholes[1]


@pytest.mark.thorough
def test_plans_that_hypothesis_draws_equal_one_process(tmp_path: Path):
    first, *others = run("tests.dist.drawn_jobs.exact", tmp_path, 6, STEPS, EXACT, num_ranks=6)
    assert len(first) >= 6 and all(trained == first for trained in others)


@pytest.mark.slow
def test_batches_of_another_length_are_told_by_the_stage_that_hands_them_on(tmp_path: Path):
    first, second = run("tests.dist.drawn_jobs.of_another_length", tmp_path)
    assert first.startswith("a stage hands on a tensor of shape (1, 12, ") and "Pad the batches of load" in first, first
    assert "lost another rank in step 0" in second, second


@pytest.mark.slow
def test_dropout_draws_alike_and_a_rank_that_is_told_to_leave_hands_its_state_over(tmp_path: Path):
    (tmp_path / "root").mkdir()
    found = run("tests.dist.drawn_jobs.told", tmp_path, str(tmp_path / "root"), num_ranks=3)
    for row in found:
        once, again, other = row["losses"]
        assert once == again != other
    assert found[2]["ended"] == "left with 0"
    assert all("node-2 left the job after step 1" in row["ended"] for row in found[:2])
    assert all(row["step"] == 2 and row["equal"] for row in found[:2]), "no step is lost"
    assert found[0]["told"] == ["node-2"] and found[0]["handed_over"] > 0
    assert found[0]["read"][1]["local"] > 0 and found[0]["read"][1]["cloud"] == 0


@pytest.mark.slow
def test_compiled_stages_equal_one_process(tmp_path: Path):
    """By our backend, and Inductor under it. test_automatic.py has a backend of PyTorch's; test_shard_job.py and
    test_tensor_parallel_job.py have ours beside other pipelines, and when their sums start."""
    cases = [(2, True, [(1, 4, [1, 3])], "autohete", "1f1b", "autohete")]
    found = run("tests.dist.cluster_jobs.differences", tmp_path, cases, num_ranks=2)
    check(found, cases)
    assert [rank[0]["early"] for rank in found] == [4, 4], "the tied weight's sum starts before passes end"
