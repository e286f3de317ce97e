"""The scripts under examples/ run as README says."""

import json
import os
import re
from pathlib import Path

import pytest

from autohete_fx.options import parse_size, resolve_bytes
from tests.processes import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


def output_of(script: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    finished = run_python([str(EXAMPLES / script), *arguments], environment)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_inspecting_shows_a_plan_at_half_the_memory():
    text = output_of("inspect_plan.py")
    assert "predicted peak" in text
    assert re.search(r"autohete\.\w+\.default\(.*# block \d+, \w+, lane (h2d|d2h), priority \d+", text)


@pytest.mark.thorough
def test_passes_compose_both_ways_with_one_loss():
    text = output_of("compose_passes.py")
    losses = re.findall(r"loss ([\d.]+)", text)
    assert len(losses) == 3 and len(set(losses)) == 1
    assert "Inductor's hook" in text and "blocks recomputed" in text


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of both demos, whose plain half the first of them runs."""
    sizes = "--device cpu --layers 2 --width 96 --plain-steps 4 --sample-bytes 20".split()
    return [*sizes, "--plain", str(tmp_path_factory.mktemp("demo") / "plain.json")]


def test_the_demo_trains_within_its_budget(tmp_path: Path, demo: list[str]):
    """It exits with an error where the measured peak is above the budget."""
    text = output_of("train_gpt.py", *demo, "--steps", "8", "--budget", "70%", "--report", str(tmp_path))
    share = re.search(r"measured peak ([\d.]+)% of it", text)
    assert share is not None and float(share[1]) <= 100
    assert "what the model writes" in text and "predicted" in text
    assert f"a page of the run: {tmp_path / 'report.html'}" in text and (tmp_path / "report.html").is_file()


def test_two_processes_train_the_demo_within_their_budgets(demo: list[str]):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(EXAMPLES / "train_gpt_sharded.py")
    finished = run_python([*command, script, *demo, "--steps", "6", "--budget", "75%"])
    assert finished.returncode == 0, finished.stderr
    shown = re.search(r"budget (\S+ \w+), measured peaks (\S+ \w+), (\S+ \w+)\n", finished.stdout)
    assert shown is not None, finished.stdout
    budget, *peaks = (resolve_bytes(parse_size(size), 0) for size in shown.groups())
    assert max(peaks) <= budget and "what the model writes" in finished.stdout


@pytest.mark.thorough
def test_the_gpu_suite_runs_dry_and_a_system_that_dies_loses_nothing_else(tmp_path: Path, caches: Path):
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "deepspeed.py").write_text("raise ModuleNotFoundError('no such package', name='deepspeed')\n")
    result = tmp_path / "gpu.json"
    selection = "--dry --no-inductor --parts compare --sizes 1b --caps full --batches 2 --clip off --steps 3".split()
    systems = ["--systems", "torchao", "zero-offload", "compile", "ours"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    files = ["--json", str(result), "--caches", str(caches)]
    text = output_of("benchmarks/gpu_suite.py", *selection, *systems, *files, environment=environment)
    rows = {row["system"]: row for row in json.loads(result.read_text())["rows"]["compare"]}
    outcomes = {name: row["outcome"] for name, row in rows.items()}
    assert outcomes == {"torchao": "failed", "zero-offload": "cannot run", "compile": "fits", "ours": "fits"}
    assert all(row["reason"] for row in rows.values() if row["outcome"] != "fits")
    levels = [(trial["level"], trial["micro batches"]) for trial in rows["compile"]["trials"]]
    assert levels == [("full", 1), ("selective", 1), ("none", 1)]
    assert rows["ours"]["loss difference"] < 1e-3 and rows["ours"]["roofline share"] > 0
    assert "over the best of the others, compile" in text
