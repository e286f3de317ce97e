"""Ranks measure the cluster that they run on: its links in one order, and its file by torchrun."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from autohete_fx import cli
from autohete_fx.cluster.commands import doctor
from autohete_fx.cluster.inputs.described import described
from autohete_fx.errors import ClusterError
from autohete_fx.internals.versions import timeout_of
from tests.dist.ranks import run


@pytest.mark.slow
def test_all_ranks_measure_one_cluster_and_the_next_ones_read_it(tmp_path: Path):
    members = [["a", "x"], ["b", "x"], ["a", "x"], ["c", "y"]]
    found = run("tests.dist.automatic_jobs.clusters", tmp_path, members, str(tmp_path), num_ranks=4)
    assert all(row["first"] == found[0]["first"] == row["again"] for row in found)
    assert found[0]["nodes"] == [["a", 2], ["b", 1], ["c", 1]]
    assert all(rate > 0 for rate in found[0]["rates"])
    assert found[0]["links"] == ["within x", "x to x", "x to y", "y to x"]
    assert found[0]["memory"] == [1000, 1000] and [row["timed"] for row in found] == [1, 1, 1, 1]


def unmeasured(path: str) -> dict[str, Any]:
    """Of a cluster whose first rank cannot measure what it runs on: the error, seconds until then, and of those a group waits."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    no_memory, began = mock.Mock(side_effect=MemoryError("no room")), time.monotonic()
    with mock.patch.object(doctor, "measure_machine", no_memory), pytest.raises(ClusterError) as caught:
        doctor.measure_cluster(path, "cpu")
    group_s = timeout_of(dist.group.WORLD, "cpu").total_seconds()
    return {"error": str(caught.value), "seconds": time.monotonic() - began, "group_s": group_s}


@pytest.mark.slow
def test_a_rank_that_cannot_measure_is_named_at_once(tmp_path: Path):
    path = tmp_path / "cluster.json"
    for found in run("tests.dist.test_cluster_doctor.unmeasured", tmp_path, str(path)):
        assert "could not be measured. rank 0: MemoryError: no room." in found["error"]
        assert found["seconds"] < 60 < found["group_s"] / 10
    assert not path.exists()


@pytest.mark.slow
def test_doctor_writes_a_cluster_that_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(tmp_path / "cluster.json")
    command = ["-m", "autohete_fx", "doctor", "--device", "cpu", "--cluster", path]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        capture_output=True,
        text=True,
        timeout=600,  # on a busy machine
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("memory for plans") == done.stdout.count("pairs at once") == 1
    found = described(path)
    assert [(node.gpu, node.gpus) for node in found.cluster.nodes] == [("cpu", 2)]
    assert found.cluster.gpu("cpu").memory_bytes > 0 and found.specs["cpu"].peaks.fp32 > 0
    asked = ["--batch", "4", "--seq", "32", "--dtype", "fp32", "--max-tp", "1"]
    assert cli.main(["plan", "gpt2", "--cluster", path, *asked]) == 0
    shown = capsys.readouterr().out
    assert "2 x cpu" in shown and "GB/s from each GPU to other nodes" not in shown
