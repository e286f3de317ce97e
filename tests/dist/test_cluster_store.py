"""Jobs that go on with other ranks and other plans: exact, from the nearest place, and only what was lost."""

from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import run

EXACT = 1e-11
WHOLE_BYTES = 8 * 7220 * 3
"""Weights and two moments of the model in fp64; steps of the optimizer come on top."""
TWO_PIPELINES = [(1, 4, [1, 4]), (2, 2, [2, 4])]
ROWS = [(2, 4, [2, 4])]


def run_legs(tmp_path: Path, *legs: Any) -> list[list[dict[str, Any]]]:
    """By leg, what it was on each rank: of (rows, nodes, steps, cloud, what is lost before)."""
    (tmp_path / "root").mkdir(exist_ok=True)
    num_ranks = len(legs[0][1])
    found = run("tests.dist.cluster_jobs.legs", tmp_path, str(tmp_path / "root"), legs, num_ranks=num_ranks)
    return [list(of_leg) for of_leg in zip(*found, strict=True)]


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
    begin, same, replica, lost = run_legs(
        tmp_path,
        (TWO_PIPELINES, "abcd", 4, cloud, ()),
        (TWO_PIPELINES, "abcd", 6, cloud, ()),
        ([(2, 4, [1, 3, 4])], "acdx", 8, cloud, ["b"]),
        ([(1, 4, [1, 4]), (1, 4, [1, 4])], "aefg", 10, cloud, ["c", "d"]),
    )
    assert check(begin, 0) == {"local": 0, "peer": 0, "cloud": 0}
    assert all(row["saved"] == [4, 4] for row in begin)

    # the same nodes and plan read their own disks
    read = check(same, 4)
    assert read["peer"] == read["cloud"] == 0 and 2 * WHOLE_BYTES < read["local"] < 2.3 * WHOLE_BYTES

    # a node is lost whose layers another pipeline has: from its disk, nothing from the cloud
    read = check(replica, 6)
    assert read["cloud"] == 0 and 0 < read["peer"] < read["local"] < WHOLE_BYTES

    # nodes are lost that alone had their layers: these come from the cloud once, though two ranks need them
    read = check(lost, 8)
    assert 0 < read["cloud"] < WHOLE_BYTES
    assert read["local"] + read["peer"] + read["cloud"] == pytest.approx(2 * WHOLE_BYTES, rel=0.3)


@pytest.mark.slow
def test_saves_that_were_cut_off_are_not_restored_and_old_ones_are_removed(tmp_path: Path):
    begin, again = run_legs(
        tmp_path, (ROWS, "ab", 8, None, ()), (ROWS, "ab", 8, None, ["b/step-000000008-*/part-*/.metadata"])
    )
    check(begin, 0)
    assert all(row["steps saved"] == [6, 8] for row in begin)
    check(again, 6)


@pytest.mark.slow
def test_a_store_that_lacks_parameters_is_an_error_and_a_cloud_that_is_down_is_not(tmp_path: Path):
    cloud, down = str(tmp_path / "cloud"), "ftp://127.0.0.1:9/run"
    begin, found, lost, older, anew = run_legs(
        tmp_path,
        (ROWS, "ab", 4, cloud, ()),
        (ROWS, "ab", 6, down, ()),
        (ROWS, "ac", 6, down, ["b"]),
        (ROWS, "ac", 6, cloud, ()),
        (ROWS, "ad", 2, str(tmp_path / "empty"), ["c"]),
    )
    check(begin, 0)
    check(found, 4)
    assert all(row["saved"] == [6, -1] for row in found)
    assert all("Training goes on" in row["save_error"] for row in found)
    for row in lost:
        assert "no save of which all parameters are somewhere" in row["error"] and "could not be read" in row["error"]
    check(older, 4)
    # States are lost before the cloud has any: training begins again, and nobody removes what is left of them.
    check(anew, 0)


@pytest.mark.slow
def test_a_disk_that_is_full_stops_saving_and_not_training(tmp_path: Path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "b").write_text("no folder: every write fails")
    [found] = run_legs(tmp_path, (ROWS, "ab", 4, str(tmp_path / "cloud"), ()))
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


@pytest.mark.slow
def test_a_part_that_one_rank_cannot_read_is_taken_from_elsewhere_by_all(tmp_path: Path):
    """32 bytes a parameter; both ranks need x and y."""
    data, metadata = "b/step-000000002-g/part-000001/*.distcp", "b/step-000000002-g/part-000001/.metadata"
    ways = {
        "peer": ("ab", ["xy", "xy"], [], [data]),
        "peer, by metadata": ("ab", ["xy", "xy"], [], [metadata]),
        "cloud": ("ab", ["x", "y"], [2], [data]),
        "older": ("ab", ["x", "y"], [], [data]),
        "older, by metadata": ("ab", ["x", "y"], [], [metadata]),
        "older in the cloud": ("ab", ["x", "y"], [1], [data, "b/step-000000001-g/part-000001/*.distcp"]),
        "other part": ("bb", ["xy", "xy"], [], [data]),
        "none": ("ab", ["x", "y"], [], [data, "a/step-000000001-g/part-000000/*.distcp"]),
    }
    ranks = run("tests.dist.damaged_jobs.every_way", tmp_path, str(tmp_path / "root"), ways)
    sources = ("local", "peer", "cloud")
    from_peer = [[2, dict(zip(sources, row, strict=True)), [2.0]] for row in ((64, 0, 0), (0, 64, 0))]
    assert [rank["peer"] for rank in ranks] == [rank["peer, by metadata"] for rank in ranks] == from_peer
    for way, step, cloud in (
        ("cloud", 2, 32),
        ("older", 1, 0),
        ("older, by metadata", 1, 0),
        ("older in the cloud", 1, 32),
    ):
        found = [rank[way] for rank in ranks]
        assert [(row[0], row[2]) for row in found] == [(step, [float(step)])] * 2, (way, found)
        assert sum(row[1]["cloud"] for row in found) == cloud, (way, found)
    assert [rank["other part"] for rank in ranks] == [[2, dict(zip(sources, (64, 0, 0), strict=True)), [2.0]]] * 2
    for rank in ranks:
        assert "no save of which all parameters are somewhere" in rank["none"]
        assert "part-000001' on node b could not be read" in rank["none"]
        assert "part-000000' on node a could not be read" in rank["none"]
