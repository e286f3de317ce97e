"""A run that is killed in the middle of its updates goes on from its last checkpoint as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import functools, json, os, sys
import torch
import autohete_fx
from autohete_fx import BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.runtime import session
from autohete_fx.runtime.lanes.lanes import Lanes
from tests import training

folder, steps, states = sys.argv[1], int(sys.argv[2]), Optimizer(sys.argv[3])
# Updates take their time, in the background: whenever the signal comes, some are under way.
session.Lanes = functools.partial(Lanes, in_background=True, pace=lambda ticket: 0.01)
checkpoint = os.path.join(folder, "checkpoint.pt")
model = training.make("cpu")
optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
first = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
plan = Plan(
    labels=training.LABELS,
    decisions=(BlockDecision(params=Params.HOST, optimizer=states),) * 5,
    schedule=Schedule(overlap=Overlap.STEP),
)
model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan})
for step in range(first, steps):
    torch.manual_seed(step)
    loss = model(training.batch("cpu", step))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    print(json.dumps([step, loss.item()]), flush=True)
    if step % 3 == 2:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)
print(json.dumps(["sum", sum(p.double().sum().item() for p in model.parameters())]), flush=True)
"""


def started(folder: Path, steps: int, states: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), str(steps), states],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def finished(folder: Path, steps: int, states: str) -> dict[str, float]:
    """What every step printed."""
    process = started(folder, steps, states)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-3000:]
    assert not errors.strip(), errors[-3000:]
    return {str(key): value for key, value in map(json.loads, output.splitlines())}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Of a run that nobody kills. Where states are makes no difference to what is trained."""
    return finished(tmp_path_factory.mktemp("whole"), 10, "host")


@pytest.mark.slow
@pytest.mark.xdist_group("resume")  # together, for the run that nobody kills
@pytest.mark.parametrize("states", ["host", "disk"])
def test_a_run_killed_in_mid_update_goes_on_bit_by_bit(states: str, expected: dict[str, float], tmp_path: Path):
    with started(tmp_path / "killed", 10, states) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)[0] == 6:  # behind the checkpoint of step 5; its updates take another tenth of a second
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    resumed = finished(tmp_path / "killed", 10, states)
    assert min(int(step) for step in resumed if step != "sum") == 6
    assert resumed == {step: expected[step] for step in resumed}
