"""A run that is killed in the middle of its updates goes on from its last checkpoint as if nothing had happened."""

import json
import signal
from pathlib import Path

import pytest

from tests.processes import Ended, run_python
from tests.thorough import thorough

SCRIPT = """
import functools, json, os, signal, sys
import torch
import autohete_fx
from autohete_fx import BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.runtime import session
from autohete_fx.runtime.lanes.lanes import Lanes
from tests import training

folder, steps, states, killed_at = sys.argv[1], int(sys.argv[2]), Optimizer(sys.argv[3]), int(sys.argv[4])
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
    if step == killed_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 3 == 2:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)
print(json.dumps(["sum", sum(p.double().sum().item() for p in model.parameters())]), flush=True)
"""


def run(folder: Path, states: str, killed_at: int = -1) -> Ended:
    folder.mkdir(exist_ok=True)
    return run_python(["-W", "ignore", "-c", SCRIPT, str(folder), "10", states, str(killed_at)])


def finished(folder: Path, states: str) -> dict[str, float]:
    """What every step printed."""
    ended = run(folder, states)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not ended.stderr.strip(), ended.stderr[-3000:]
    return {str(key): value for key, value in map(json.loads, ended.stdout.splitlines())}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Of a run that nobody kills. Where states are makes no difference to what is trained."""
    return finished(tmp_path_factory.mktemp("whole"), "host")


@pytest.mark.slow
@pytest.mark.parametrize("states", ["host", thorough("disk")])
def test_a_run_killed_in_mid_update_goes_on_bit_by_bit(states: str, expected: dict[str, float], tmp_path: Path):
    killed = run(tmp_path / "killed", states, killed_at=6)  # behind the checkpoint of step 5
    assert killed.returncode == -signal.SIGKILL
    resumed = finished(tmp_path / "killed", states)
    assert min(int(step) for step in resumed if step != "sum") == 6
    assert resumed == {step: expected[step] for step in resumed}
