"""The scripts under examples/ run as README says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


def output_of(script: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_inspecting_shows_a_plan_at_half_the_memory():
    text = output_of("inspect_plan.py")
    assert "predicted peak" in text
    assert re.search(r"autohete\.\w+\.default\(.*# block \d+, \w+, lane (h2d|d2h), priority \d+", text)


def test_passes_compose_both_ways_with_one_loss():
    text = output_of("compose_passes.py")
    losses = re.findall(r"loss ([\d.]+)", text)
    assert len(losses) == 3 and len(set(losses)) == 1
    assert "Inductor's hook" in text and "blocks recomputed" in text


def test_the_demo_trains_within_its_budget():
    """It exits with an error where the measured peak is above the budget."""
    sizes = [
        "--layers",
        "3",
        "--width",
        "96",
        "--steps",
        "8",
        "--plain-steps",
        "4",
        "--sample-bytes",
        "20",
        "--budget",
        "70%",
    ]
    text = output_of("train_gpt.py", "--device", "cpu", *sizes)
    share = re.search(r"measured peak ([\d.]+)% of it", text)
    assert share is not None and float(share[1]) <= 100
    assert "what the model writes" in text and "predicted" in text
