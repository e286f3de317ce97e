"""RAM, of a machine and of a container, from files as Linux writes them."""

from pathlib import Path

import pytest
import torch

from autohete_fx.errors import HostMemoryError
from autohete_fx.machine.budgets import host_budget_bytes
from autohete_fx.options import Options
from autohete_fx.runtime.tiers.ram import available_bytes, capacity_bytes

GIB = 2**30


def machine(root: Path, **files: str) -> Path:
    """A root directory with 8 GiB available, and files of a control group."""
    contents = {"proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n"}
    for name, text in (contents | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_not_all_of_it_is_pinned_unless_somebody_says_so() -> None:
    cuda, all_of_it = torch.device("cuda"), capacity_bytes()
    assert host_budget_bytes(cuda, Options()) == all_of_it - all_of_it // 8
    assert host_budget_bytes(cuda, Options(host_budget=all_of_it)) == all_of_it


def test_without_a_container_it_is_the_machines(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path)) == 8 * GIB
    assert capacity_bytes(tmp_path) == capacity_bytes(tmp_path / "nowhere") > 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_has_less_and_gets_back_what_it_caches(version: int, tmp_path: Path) -> None:
    folder, limit, used, cache = {
        1: ("sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
        2: ("sys/fs/cgroup", "max", "current", "inactive_file"),
    }[version]
    files = {"memory." + limit: f"{6 * 2**20}\n", "memory." + used: f"{5 * 2**20}\n"}
    files["memory.stat"] = f"anon 1\n{cache} {2 * 2**20}\n"
    machine(tmp_path, **{f"{folder}/{name}": text for name, text in files.items()})
    assert capacity_bytes(tmp_path) == 6 * 2**20 and available_bytes(tmp_path) == 3 * 2**20
    (tmp_path / folder / f"memory.{limit}").write_text("max\n")
    assert available_bytes(tmp_path) == 8 * GIB


def test_a_kernel_that_does_not_tell_is_an_error(tmp_path: Path) -> None:
    (machine(tmp_path) / "proc/meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(HostMemoryError, match="MemAvailable"):
        available_bytes(tmp_path)
