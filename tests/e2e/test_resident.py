"""The meter against an outside witness: the anonymous memory that the operating system counts for the process.

What Python, kernels and compiled code take is no tensor and stays the same from step to step, so it is taken off between
two steps. A process of its own, whose allocator gives freed memory back at once.
"""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import autohete_fx
from autohete_fx.runtime import cpu_counter
from autohete_fx.runtime.meter import device_live_bytes, rss_anon_bytes
from tests.training import Sizes, batch, make

SIZES = Sizes(width=192, layers=4, batch=16, time=128)
SHARE = 0.4
"""Of plain's peak. Larger budgets are easier to keep."""


class Witness(threading.Thread):
    """Watches the process's anonymous memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            self.most_bytes = max(self.most_bytes, rss_anon_bytes())
            time.sleep(0.0005)


def peaks(optimizer_class: Any, **how: Any) -> tuple[int, int]:
    """Peak bytes of three steps after the first: as the meter has them, and as the witness does."""
    others = device_live_bytes("cpu")
    model = make("cpu", SIZES)
    optimizer = optimizer_class(model.parameters())
    model.compile(**how)

    def step(index: int) -> None:
        model(batch("cpu", index, sizes=SIZES)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    gc.collect()
    no_tensors = rss_anon_bytes() - device_live_bytes("cpu") - cpu_counter.kept_bytes() + others
    witness = Witness()
    witness.start()
    with autohete_fx.MemoryMeter("cpu") as meter:
        for index in range(1, 4):
            step(index)
    witness.done.set()
    witness.join()
    torch._dynamo.reset()
    return meter.peak_bytes - others, witness.most_bytes - no_tensors


def main() -> None:
    """Print eager code's peaks, a budget and our peaks within it."""
    plain = peaks(torch.optim.AdamW, backend="eager")
    gc.collect()
    budget = int(plain[0] * SHARE)
    options = {"memory_budget": budget, "inner_backend": "eager", "profile": "analytic"}
    print(json.dumps((*plain, budget, *peaks(autohete_fx.AdamW, backend="autohete", options=options))))


@pytest.mark.thorough
def test_the_operating_system_agrees_with_the_meter():
    given_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    root = str(Path(__file__).parents[2])
    finished = subprocess.run(
        [sys.executable, "-c", "from tests.e2e.test_resident import main; main()"],
        env=os.environ | given_back,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    metered, resident, budget, ours_metered, ours_resident = json.loads(finished.stdout.splitlines()[-1])
    assert resident == pytest.approx(metered, rel=0.05), "the witness does not see what the meter sees"
    assert ours_metered <= budget
    assert ours_resident <= budget * 1.02 + 2**21, "kernels' scratch and pages are all that no tensor accounts for"


if __name__ == "__main__":
    main()
