"""Stages whose GPUs hold shards train as one process does, beside stages of other units too; other plans go on with their saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autohete_fx.cluster.plan import ClusterPlan
from tests.dist.ranks import run
from tests.dist.shard_jobs import LEGS, STEPS
from tests.dist.test_cluster_job import EXACT, check, check_legs
from tests.thorough import thorough


def plans() -> list[Any]:
    """(micro-batch, micro-batches, last layers of stages, degree and shards of all stages or by stage) of each pipeline."""
    return [
        [(3, 2, [3], 1, 3), (1, 2, [3])],  # padded, beside a whole
        [(2, 2, [1, 3], [1, 2], [2, 1])],  # to parts
        [(2, 2, [3], 2, 2)],  # shards of parts
    ]


def further_plans() -> list[Any]:
    return [
        [(2, 1, [3], 1, 2), (2, 2, [3], 1, 2)],
        [(6, 2, [1, 3], 1, [1, 3])],  # unequal shards in a pipeline
        [(2, 2, [3], 1, 2), (1, 2, [3], 2)],  # shards beside parts
    ]


@pytest.mark.parametrize(
    ("rows_of", "num_jobs"),
    [pytest.param(plans, 2, id="plans", marks=pytest.mark.slow), thorough(further_plans, 4, id="further plans")],
)
def test_stages_of_shards_train_as_one_process_does(rows_of: Callable[[], list[Any]], num_jobs: int, tmp_path: Path):
    """Of four jobs, ranks of other pasts compile one graph, too, whose collectives do not go over process groups of an earlier
    job."""
    cases: list[Any] = [
        (2, index % 2 == 0, rows, "eager", "1f1b" if index != 1 else "gpipe", "torch", 3)
        for index, rows in enumerate(rows_of())
    ]
    root = tmp_path / "root"
    root.mkdir()
    found = run("tests.dist.shard_jobs.trained", tmp_path, cases, str(root), num_jobs, num_ranks=4)
    check([rank["differences"] for rank in found], cases)
    for rank in found:
        assert "a stage of 2 shards, and the job has no backend" in rank["refusal"]
        for row, first in zip(rank["within"], (0, 4, 6, 8)[:num_jobs], strict=True):
            assert row.get("first") == first, row
            assert max(row[key] for key in ("loss", "weights", "states")) < EXACT
            assert row["peaks"] and row["peaks"][-1] <= row["given"]
    assert any("host" in rank["within"][0]["states at"] for rank in found)


@pytest.mark.slow
def test_a_search_finds_shards_where_nothing_else_fits_and_its_job_equals_one_process(tmp_path: Path):
    found = run("tests.dist.shard_jobs.searched", tmp_path, str(tmp_path / "cache"), num_ranks=2)
    assert "does not fit on 2 x cpu" in found[0]["error"]
    plan = ClusterPlan.from_json(found[0]["plan"])
    assert [stage.shards for _, _, stage in plan.stages()] == [2]
    for row in found:
        assert row["held"] > 0 and max(row[key] for key in ("loss", "weights", "states")) < EXACT


@pytest.mark.slow
def test_shards_that_leave_hand_over_what_only_they_have(tmp_path: Path):
    (tmp_path / "root").mkdir()
    *gone, alone = run("tests.dist.shard_jobs.left", tmp_path, str(tmp_path / "root"), num_ranks=3)
    assert gone == [{"left": 0}] * 2
    assert alone["first"] == 2, "no step is lost"
    assert alone["bytes"]["local"] and not alone["bytes"]["peer"]
    assert max(alone[key] for key in ("loss", "weights", "states")) < EXACT


@pytest.mark.thorough
def test_plans_of_other_units_go_on_with_what_shards_saved(tmp_path: Path):
    root = tmp_path / "root"
    root.mkdir()
    found = run("tests.dist.shard_jobs.legs", tmp_path, str(root), num_ranks=4)
    check_legs(found, STEPS)
    read = {name: row["bytes"] for (name, *_), row in zip(LEGS, found[0][1:], strict=True)}
    assert read["same"]["local"] and not read["same"]["peer"] and not read["same"]["cloud"]
    assert read["none"]["local"] and read["none"]["peer"] and not read["none"]["cloud"]
    assert found[0][-1]["exported"] == STEPS + 2 * len(LEGS)
    assert [32, 16] in found[0][-1]["shapes"], "the whole embedding"
