"""A rank that hangs is named within a timeout; one that vanishes or cannot begin is noticed at once by all."""

from pathlib import Path

import pytest

from tests.dist.ranks import run
from tests.thorough import thorough


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path):
    first, hung, other = run("tests.dist.hung_jobs.errors", tmp_path, str(tmp_path), num_ranks=3)
    assert "rank 1 on node-1 does not answer" in first and "lost another rank in step 1" in first, first
    assert not hung and "lost another rank in step 1" in other


@pytest.mark.thorough
def test_a_first_rank_that_hangs_is_named_by_the_others(tmp_path: Path):
    _, *others = run("tests.dist.hung_jobs.errors", tmp_path, str(tmp_path), 0, num_ranks=3)
    assert any("rank 0 on node-0 does not answer" in error for error in others), others


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [1, thorough(2)])
def test_a_rank_that_vanishes_is_noticed_by_all_though_the_timeout_is_long(tmp_path: Path, num_shards: int):
    found = run("tests.dist.hung_jobs.vanished", tmp_path, num_shards, num_ranks=4, survivors=(0, 1, 2))
    assert all("lost another rank in step 1" in error and "does not answer" not in error for error in found), found


@pytest.mark.slow
def test_a_rank_that_cannot_begin_is_named_though_the_timeout_is_long(tmp_path: Path):
    first, unable, other = run("tests.dist.hung_jobs.unable", tmp_path, num_ranks=3)
    assert unable == ["FileNotFoundError: part-2.safetensors", "ValueError: Invalid learning rate: -1.0"]
    assert first == other
    for told, own in zip(first, unable, strict=True):
        assert told.startswith("ClusterError: rank 1, on node node-0, could not begin its part of the job."), told
        assert told.endswith(own)
