"""Jobs that go on with other ranks and other plans: exact, from the nearest place, and only what was lost."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import run

EXACT = 1e-11
WHOLE_BYTES = 8 * 7220 * 3
"""Weights and two moments of the model in fp64; steps of the optimizer come on top."""
TWO_PIPELINES = [(1, 4, [1, 4]), (2, 2, [2, 4])]
NODES = ["a", "b", "c", "d"]


def leg(tmp_path: Path, name: str, rows: Any, nodes: list[str], steps: int, **store: Any) -> list[dict[str, Any]]:
    meeting = tmp_path / f"meeting-{name}"
    meeting.mkdir()
    root = str(tmp_path / "root")
    (tmp_path / "root").mkdir(exist_ok=True)
    return run("tests.dist.cluster_jobs.leg", meeting, root, rows, nodes, steps, store, num_ranks=len(nodes))


def check(found: list[dict[str, Any]], first: int) -> dict[str, int]:
    """They began with that step and were exact; returns bytes by source."""
    for row in found:
        assert "error" not in row, row
        assert row["first"] == first
        assert max(row[key] for key in ("loss", "weights", "states")) < EXACT
    return found[0]["bytes"]


@pytest.mark.slow
def test_a_job_goes_on_with_what_is_nearest(tmp_path: Path):
    cloud = str(tmp_path / "cloud")
    found = leg(tmp_path, "begin", TWO_PIPELINES, NODES, 4, cloud=cloud)
    assert check(found, 0) == {"local": 0, "peer": 0, "cloud": 0}
    assert all(row["saved"] == [4, 4] for row in found)

    # the same nodes and plan read their own disks
    read = check(leg(tmp_path, "same", TWO_PIPELINES, NODES, 6, cloud=cloud), 4)
    assert read["peer"] == read["cloud"] == 0 and 2 * WHOLE_BYTES < read["local"] < 2.3 * WHOLE_BYTES

    # a node is lost whose layers another pipeline has: from its disk, nothing from the cloud
    shutil.rmtree(tmp_path / "root" / "b")
    read = check(leg(tmp_path, "replica", [(2, 4, [1, 3, 4])], ["a", "c", "d"], 8, cloud=cloud), 6)
    assert read["cloud"] == 0 and 0 < read["peer"] < read["local"] < WHOLE_BYTES

    # nodes are lost that alone had their layers: these come from the cloud once, though two ranks need them
    shutil.rmtree(tmp_path / "root" / "c")
    shutil.rmtree(tmp_path / "root" / "d")
    rows = [(1, 4, [1, 4]), (1, 4, [1, 4])]
    read = check(leg(tmp_path, "cloud", rows, ["a", "e", "f", "g"], 10, cloud=cloud), 8)
    assert 0 < read["cloud"] < WHOLE_BYTES
    assert read["local"] + read["peer"] + read["cloud"] == pytest.approx(2 * WHOLE_BYTES, rel=0.3)


@pytest.mark.slow
def test_saves_that_were_cut_off_are_not_restored_and_old_ones_are_removed(tmp_path: Path):
    check(leg(tmp_path, "begin", [(2, 4, [2, 4])], ["a", "b"], 8), 0)
    saves = {node: sorted(path.name[:14] for path in (tmp_path / "root" / node).iterdir()) for node in ("a", "b")}
    assert saves["a"] == saves["b"] == ["step-000000006", "step-000000008"]
    (metadata,) = (tmp_path / "root" / "b").glob("step-000000008-*/part-*/.metadata")
    metadata.unlink()
    check(leg(tmp_path, "again", [(2, 4, [2, 4])], ["a", "b"], 8), 6)


@pytest.mark.slow
def test_a_store_that_lacks_parameters_is_an_error_and_a_cloud_that_is_down_is_not(tmp_path: Path):
    cloud = str(tmp_path / "cloud")
    check(leg(tmp_path, "begin", [(2, 4, [2, 4])], ["a", "b"], 4, cloud=cloud), 0)
    down = "ftp://127.0.0.1:9/run"
    found = leg(tmp_path, "down", [(2, 4, [2, 4])], ["a", "b"], 6, cloud=down)
    check(found, 4)
    assert all(row["saved"] == [6, -1] for row in found)
    assert all("Training goes on" in row["save_error"] for row in found)
    shutil.rmtree(tmp_path / "root" / "b")
    for row in leg(tmp_path, "lost", [(2, 4, [2, 4])], ["a", "c"], 6, cloud=down):
        assert "no save of which all parameters are somewhere" in row["error"] and "could not be read" in row["error"]
    check(leg(tmp_path, "older", [(2, 4, [2, 4])], ["a", "c"], 6, cloud=cloud), 4)

    # states are lost before the cloud has any: training begins again, and nobody removes what is left of them
    shutil.rmtree(tmp_path / "root" / "c")
    check(leg(tmp_path, "anew", [(2, 4, [2, 4])], ["a", "d"], 2, cloud=str(tmp_path / "empty")), 0)


@pytest.mark.slow
def test_a_disk_that_is_full_stops_saving_and_not_training(tmp_path: Path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "b").write_text("no folder: every write fails")
    found = leg(tmp_path, "full", [(2, 4, [2, 4])], ["a", "b"], 4, cloud=str(tmp_path / "cloud"))
    check(found, 0)
    assert found[0]["save_error"] is None and "could not save step 4" in found[1]["save_error"]
    assert found[0]["saved"] == [-1, 4], "the cloud has all of it"


@pytest.mark.slow
def test_optimizer_states_are_where_each_stage_has_them_and_any_stage_goes_on_with_them(tmp_path: Path):
    (tmp_path / "root").mkdir()
    found = run("tests.dist.cluster_jobs.states_on_hosts", tmp_path, str(tmp_path / "root"), num_ranks=2)
    for index, first in enumerate((0, 4, 6)):
        check([rank[index] for rank in found], first)
    places = [row["states at"] for row in found[0]]
    assert "host" in places[0] and places[1] == [] and "disk" in places[2]
