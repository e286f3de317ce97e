"""Stages of several GPUs train as one process does, beside stages of one GPU too; other plans go on with their saves."""

from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import run
from tests.dist.tensor_parallel_jobs import LEGS, STEPS
from tests.dist.test_cluster_job import DEPTH, EXACT, check, check_legs


def plans() -> list[Any]:
    """(micro-batch, micro-batches, last layers of stages, GPUs of a stage or by stage) of each pipeline."""
    return [
        [(1, 3, [3, 4], 2)],  # the head alone
        [(2, 2, [4], 4)],
        [(2, 2, [4], 2), (3, 2, [4]), (2, 3, [4])],  # two degrees
        [(1, 2, [4], 2), (1, 3, [1, 4])],  # of unequal depth and micro-batches
        [(1, 4, [0, 2, 4], [1, 2, 1])],  # two degrees in a pipeline
    ]


@pytest.mark.slow
def test_stages_of_several_gpus_train_as_one_process_does(tmp_path: Path):
    cases: list[Any] = [
        (DEPTH, index % 2 == 0, rows, None, "gpipe" if index % 4 == 1 else "1f1b", "torch")
        for index, rows in enumerate(plans())
    ]
    # A transformers model, whose tied weight is in stages of both degrees.
    cases.append((0, True, [(1, 2, [1, 3], [2, 1]), (2, 1, [3])], None, "1f1b", "torch"))
    root = tmp_path / "root"
    root.mkdir()
    found = run("tests.dist.tensor_parallel_jobs.trained", tmp_path, cases, str(root), num_ranks=4)
    check([rank["differences"] for rank in found], cases)
    for rank in found:
        wrong, unmatched = rank["errors"]
        assert "different gradients of 'inner.model.layers.0.self_attn.q_norm.weight'" in wrong
        assert "has no such module" in unmatched
        for row, first in zip(rank["within"], (0, 4), strict=True):
            assert row.get("first") == first, row
            assert max(row[key] for key in ("loss", "weights", "states")) < EXACT
            assert row["peaks"] and row["peaks"][-1] <= row["given"]
    assert any("host" in rank["within"][0]["states at"] for rank in found)
    # With room, sums start within the last backward, where several GPUs share layers after the step that compares gradients.
    assert [rank["within"][1]["early"] for rank in found] == [[0, 2, 2], [0, 2, 2], [3, 3, 3], []]


@pytest.mark.thorough
def test_they_do_in_further_plans_and_by_a_backend_of_pytorch(tmp_path: Path):
    cases: list[Any] = [
        (DEPTH, False, [(2, 1, [4], 2), (1, 2, [4], 2)], None, "gpipe", "torch"),
        (DEPTH, True, [(2, 2, [2, 4], [1, 2]), (1, 2, [4])], None, "1f1b", "torch"),
        (2, True, [(2, 2, [3], 2), (1, 2, [3])], "aot_eager", "1f1b", "torch"),
    ]
    check(run("tests.dist.cluster_jobs.differences", tmp_path, cases, num_ranks=4), cases)


@pytest.mark.slow
def test_plans_of_other_degrees_go_on_with_what_was_saved(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    found = run("tests.dist.tensor_parallel_jobs.legs", tmp_path, str(root), num_ranks=4)
    check_legs(found, STEPS)
    assert found[0][0]["layers"] == {"a": [0, 1, 2, 3, 4], "b": [0, 1], "c": [2, 3, 4]}
    read = {name: row["bytes"] for (name, *_), row in zip(LEGS, found[0][1:], strict=True)}
    assert read["same"]["local"] and not read["same"]["peer"] and not read["same"]["cloud"]
    assert read["other degree"]["local"] and read["other degree"]["peer"] and not read["other degree"]["cloud"]
    assert read["cloud"]["cloud"] == pytest.approx(8 * 7220 * 3, rel=0.01), "each saved piece once"
    assert 0 < read["halves"]["cloud"] < read["cloud"]["cloud"]
    assert found[0][-1]["exported"] == STEPS + 2 * len(LEGS)
    assert [32, 16] in found[0][-1]["shapes"], "the whole embedding"
