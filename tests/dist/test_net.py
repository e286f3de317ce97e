"""The link between ranks: its figures explain what was timed, and all ranks have the same ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autohete_fx.compiler.agreement import Agreement
from autohete_fx.ir import Machine
from autohete_fx.machine import net
from autohete_fx.machine.net import figures_of
from autohete_fx.runtime.shard import shard
from tests import planner_problems
from tests.dist import ranks
from tests.dist.sharded import mesh
from tests.layers import Layers


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_figures_are_those_that_made_the_seconds(num_ranks: int):
    sizes = (2**16, 2**22)
    seconds = [(num_ranks - 1) * (2e-5 + size / (num_ranks * 5e9)) for size in sizes]
    assert figures_of(sizes, seconds, num_ranks) == pytest.approx((5e9, 2e-5))


def test_a_large_whole_that_is_no_slower_gives_finite_figures():
    rate, latency_s = figures_of((2**16, 2**22), (1e-3, 1e-3), 2)
    assert 0 < rate < 1e11 and 0 <= latency_s <= 1e-3


def measured(folder: str) -> list[Any]:
    """Figures of a rank, twice, and how often they were timed; the second rank's machine is another one."""
    os.environ["AUTOHETE_CACHE_DIR"] = folder
    calls, timed = [], net.measure_net

    def counted(*args: Any) -> tuple[float, float]:
        calls.append(1)
        return timed(*args)

    net.measure_net = counted
    agreement = Agreement(shard(Layers(), mesh()).parameters())
    found = [agreement.machine(planner_problems.MACHINE, torch.device("cpu")) for _ in range(2)]
    return [*([each.net_bytes_per_s, each.net_latency_s] for each in found), len(calls)]


def test_ranks_measure_together_and_once(tmp_path: Path):
    first, second = ranks.run("tests.dist.test_net.measured", tmp_path, str(tmp_path))
    assert first == second
    (rate, latency_s), again, calls = first
    assert again == [rate, latency_s] and calls == 1
    assert 1e6 < rate < 1e12 and 0 <= latency_s < 1


def test_a_process_alone_has_no_net():
    agreement = Agreement([torch.nn.Parameter(torch.ones(2))])
    assert agreement.machine(planner_problems.MACHINE, torch.device("cpu")) is planner_problems.MACHINE
    assert net.ranks_of_job("cpu") is None


@pytest.mark.slow
def test_doctor_under_torchrun_prints_and_saves_it_once(tmp_path: Path):
    doctor = ["-m", "autohete_fx.cli", "doctor", "--device", "cpu", "--save", str(tmp_path / "machine.json")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *doctor],
        capture_output=True,
        text=True,
        timeout=600,  # on a busy machine
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("link to other ranks") == done.stdout.count("latency between ranks") == 1
    saved = Machine.load(tmp_path / "machine.json")
    assert saved.net_bytes_per_s > 0 and json.loads((tmp_path / "machine.json").read_text())["net_latency_s"] >= 0
