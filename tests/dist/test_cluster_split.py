"""Plans of a model that is divided at marks of `torch.distributed.pipelining` train as one process does."""

from pathlib import Path

import pytest

from tests.dist.ranks import run
from tests.dist.test_cluster_job import EXACT


@pytest.mark.slow
def test_a_model_without_a_chain_equals_one_process_whatever_the_plan(tmp_path: Path):
    found = run("tests.dist.split_jobs.jobs", tmp_path, str(tmp_path / "root"), num_ranks=3)
    for case in ("three", "on", "autohete", "no plan"):
        rows = [rank[case] for rank in found]
        assert all(row["first"] == (2 if case == "on" else 0) for row in rows), case
        assert sum(row["held"] for row in rows) > 0
        for key in ("loss", "norm", "weights", "states"):
            assert max(row[key] for row in rows) < EXACT, (case, key)
    assert "unread" in found[0]["exported"] and max(found[0]["exported"].values()) < EXACT
    assert all("Expected was one GPU a stage" in row["refused"] for row in found)
