"""RAM: how much there is, and how much can be had.

A container may use less than the machine has, and the kernel's answer to more is to kill a process. Both figures are therefore
the least of the machine's and of the control group's (either version).
"""

import os
from pathlib import Path

from autohete_fx.errors import HostMemoryError

_ROOT = Path("/")
_GROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""For each version of control groups: its limit, what is in use, and what of that is a cache of files that the kernel gives up."""


def capacity_bytes(root: Path = _ROOT) -> int:
    """The physical RAM, or what a container may use of it. Files are read below ``root``."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in _limits(root))])


def available_bytes(root: Path = _ROOT) -> int:
    """RAM that can be had without swapping. Files are read below ``root``. Raises HostMemoryError where Linux does not tell."""
    available = _field(root / "proc/meminfo", "MemAvailable:")
    if available is None:
        raise HostMemoryError(
            "/proc/meminfo has no MemAvailable line; a Linux kernel of version 3.14 or later is needed"
        )
    return min([available * 1024, *(max(0, limit - used) for limit, used in _limits(root))])


def _limits(root: Path) -> list[tuple[int, int]]:
    """Bytes that this process's container may use and does use; empty where there is no limit."""
    found = []
    for limit_file, used_file, cache in _GROUPS:
        limit = _number(root / limit_file)
        if limit is not None:
            used = _number(root / used_file) or 0
            found.append((limit, used - (_field((root / used_file).with_name("memory.stat"), cache) or 0)))
    return found


def _number(path: Path) -> int | None:
    """What a file of one number says; None where it says something else, such as ``max``, or is not there."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int | None:
    """The number after a name that begins a line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(words[1]) for line in lines if (words := line.split()) and words[0] == name), None)
