"""A job of torchrun agents, of which two vanish at one moment and one joins, ends with the weights of an undisturbed run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_nodes_that_vanish_and_join_change_nothing(tmp_path: Path):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"points": [[0, 4], [60, 2], [120, 3]]}))
    script, found = ROOT / "examples" / "benchmarks" / "cluster_chaos.py", tmp_path / "found.json"
    options = ["--trace", trace, "--events", "2", "--together", "--every", "1", "--cloud-every", "1"]
    options += ["--seed", "3", "--steps", "24", "--pause", "1.0", "--json", found]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads(found.read_text())
    killed, joined = report["recovery_s"]
    assert (killed["event"], len(killed["node"].split()), killed["nodes"]) == ("kill", 2, 2)
    assert (joined["event"], joined["nodes"]) == ("join", 3)
    assert min(killed["step"], joined["step"]) > 0, "they go on with what was saved"
    assert report["names_equal"] and report["max_weight_difference"] < 1e-11
    assert report["lost_saved_steps"] == 0
    assert report["cloud_bytes_read"] == report["cloud_bytes_needed"]
    assert report["leaks"]["processes"] == 0 and report["leaks"]["files"] == []
    assert report["steps"] == 24 and report["steps_trained"] >= 24
