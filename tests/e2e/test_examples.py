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
