"""What tensors free stays for the next ones, and never makes the process larger than its tensors have been at once."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from autohete_fx.runtime import cpu_counter
from autohete_fx.runtime.meter import rss_anon_bytes

MIB = 2**20
cpu_counter.live_bytes()
if sys.argv[1] == "kept":
    cpu_counter.keep_freed()
torch.ones(31 * MIB // 4)  # freed: from now on glibc takes blocks of this size from its heap
before, others, most = rss_anon_bytes() - cpu_counter.kept_bytes(), cpu_counter.live_bytes(), 0
cpu_counter.reset_peak()
for _ in range(3):
    tensors = [torch.ones(3 * MIB // 4) for _ in range(40)]
    del tensors[::2]
    tensors += [torch.ones(5 * MIB // 4) for _ in range(12)]
    most = max(most, rss_anon_bytes() - before)
    del tensors
print(most, cpu_counter.peak_bytes() - others, cpu_counter.live_bytes() - others, cpu_counter.kept_bytes())
"""


def trained(how: str) -> list[int]:
    """Most bytes resident, most of tensors, those of tensors at the end, and what is kept then."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT, how]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert finished.returncode == 0, finished.stderr
    return [int(word) for word in finished.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_holes_between_tensors_go_back_to_the_system():
    resident, peak, live, kept = trained("kept")
    assert resident <= peak * 1.03
    assert live == 0 and 0 < kept <= 31 * 2**20 + peak
    resident, peak, *_ = trained("not kept")
    assert resident > peak * 1.03, "glibc's heap does no better by itself"
