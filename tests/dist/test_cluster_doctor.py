"""Ranks measure the cluster that they run on: its links in one order, and its file by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autohete_fx import cli
from autohete_fx.cluster.described import described
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


@pytest.mark.slow
def test_doctor_writes_a_cluster_that_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = str(tmp_path / "cluster.json")
    doctor = ["-m", "autohete_fx", "doctor", "--device", "cpu", "--cluster", path]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *doctor],
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
