"""A job without a plan: costs are measured once, are equal on all ranks, and tell the planner which ranks are slow."""

from pathlib import Path

import pytest

from tests.dist.automatic_jobs import DEPTH, kinds_of_mixed
from tests.dist.ranks import run
from tests.dist.test_cluster_job import EXACT
from tests.thorough import thorough


def test_layers_of_unlike_parameters_are_two_kinds():
    assert kinds_of_mixed() == ["first", "layer", "layer-2", "layer", "last"]


@pytest.mark.slow
def test_slow_ranks_get_less_and_the_next_start_times_nothing(tmp_path: Path):
    gpus, folder = ["fast", "slow", "slow"], str(tmp_path / "cache")
    found = run("tests.dist.automatic_jobs.without_plan", tmp_path, gpus, folder, num_ranks=3)
    first = found[0]
    assert all(row["plan"] == first["plan"] and row["costs"] == first["costs"] for row in found)
    assert first["kinds"] == ["first", *["layer"] * DEPTH, "last"]
    assert first["least"] > 0 and all(params > 0 and kept > 0 for params, kept in first["bytes"])
    assert all(seconds > 0 for seconds in first["update"]) and first["states"] == pytest.approx(2.0)
    # One rank of each type has timed each kind with two sizes of micro-batch.
    assert [row["timed"] for row in found] == [6, 6, 0]
    work = first["work"]
    assert len(work) > 1 and all(work["node-0"] > done for node, done in work.items() if node != "node-0")
    assert len({row["loss"] for row in found}) == 1

    (tmp_path / "again").mkdir()
    again = run("tests.dist.automatic_jobs.without_plan", tmp_path / "again", gpus, folder, num_ranks=3)
    assert [row["timed"] for row in again] == [0, 0, 0]
    assert all(row["costs"] == first["costs"] and row["work"] == first["work"] for row in again)
    assert again[0]["loss"] == pytest.approx(first["loss"])


def test_a_model_that_fits_nowhere_is_the_planners_error_on_all_ranks(tmp_path: Path):
    found = run("tests.dist.automatic_jobs.too_large", tmp_path, str(tmp_path), num_ranks=2)
    assert found[0] == found[1] and "does not fit on 2 x cpu" in found[0]


def test_a_rank_alone_trains_all_layers(tmp_path: Path):
    (found,) = run("tests.dist.automatic_jobs.alone", tmp_path, str(tmp_path), num_ranks=1)
    assert found["stages"] == [[0, 3]] and found["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "num_ranks"), [(None, 3), thorough("aot_eager", 2)])
def test_a_job_without_a_plan_equals_one_process(tmp_path: Path, backend: str | None, num_ranks: int):
    found = run("tests.dist.automatic_jobs.trains_equal", tmp_path, str(tmp_path), backend, num_ranks=num_ranks)
    for key in ("loss", "norm", "weights", "states"):
        assert max(row[key] for row in found) < EXACT, key
    assert sum(row["held"] for row in found) > 0


@pytest.mark.slow
def test_gpus_of_a_node_time_layers_that_they_share_and_plans_may_share_them(tmp_path: Path):
    found = run("tests.dist.automatic_jobs.shared", tmp_path, str(tmp_path / "cache"), num_ranks=2)
    whole = found[0]["free"]["held"] + found[1]["free"]["held"]
    for row in found:
        assert {degree for degree, *_ in row["times"]} == {1, 2} and row["again"]
        assert min(seconds for _, *both in row["times"] for seconds in both) > 0
        assert row["bytes"]["layer 1"] / 2 < row["bytes"]["layer 2"] < row["bytes"]["layer 1"], "norms are whole"
        assert row["bytes"]["first 2"] < 0.6 * row["bytes"]["first 1"]
        vectors = [8 * (4 * 16 + 48 + 16 + 32 + 16), 8 * (4 * 16 + 48 + 16 + 16 + 16)]
        assert [row["unsharded"][f"layer {tp}"] for tp in (1, 2)] == vectors, (
            "norms and biases, one of them in two parts"
        )
        assert max(row[way][key] for way in ("free", "apart") for key in ("loss", "norm", "weights", "states")) < EXACT
        assert 0 < row["apart"]["held"] < whole, "each has a part of each layer"
