"""What is told of a link beside its two copy rates."""

from typing import Any

import pytest
import torch

from autohete_fx.commands import doctor
from autohete_fx.machine import link
from autohete_fx.machine.described import link_text
from autohete_fx.runtime.tiers.host import host_view, open_tier


def test_a_cpu_device_has_no_link_and_says_so():
    assert doctor.link_of(torch.device("cpu")) is None
    lines = link_text(None).splitlines()
    assert len(lines) == 3 and all("not applicable" in line for line in lines)


def test_both_ways_are_copied_on_streams_of_their_own_and_kernels_work_on_homes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    """On a CPU device, which is told to be none."""
    order: list[str] = []

    class Stream:
        def __init__(self, device: object) -> None:
            self.number = len(order)
            order.append("made")

        def __enter__(self) -> None:
            order.append(f"enter {self.number}")

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(link, "_BYTES", 2**12)
    tier, homes = open_tier("cpu", str(tmp_path)), []

    def make_home(count: int) -> torch.Tensor:
        homes.append(tier.empty_strided((count,), (1,), torch.uint8))
        return homes[-1]

    found = link._timed(torch.device("cpu"), make_home, host_view)
    assert order[:4] == ["made", "made", "enter 0", "enter 1"]
    assert bool((homes[1] == 1).all()), "from the device"
    one = torch.ones(4, dtype=torch.uint8).view(torch.float32)
    assert bool((homes[0].view(torch.float32) == one + 1 + 1).all()), "read by a kernel, written by another"
    assert found.kernel_reads_bytes_per_s > 0 and found.kernel_writes_bytes_per_s > 0
    words = link_text(link.Link(both_ways_bytes_per_s=2**30, kernel_reads_bytes_per_s=1, kernel_writes_bytes_per_s=1))
    assert "both ways at once           1.00 GiB/s" in words
