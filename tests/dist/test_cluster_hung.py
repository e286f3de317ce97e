"""A rank that hangs is named within a timeout."""

from pathlib import Path

import pytest

from tests.dist.ranks import run


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path):
    first, hung, other = run("tests.dist.hung_jobs.errors", tmp_path, str(tmp_path), num_ranks=3)
    assert "rank 1 on node-1 does not answer" in first and "lost another rank in step 1" in first, first
    assert not hung and "lost another rank in step 1" in other
