"""What every benchmark prints and saves besides its figures: the command, the machine and the versions."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch


def environment() -> dict[str, object]:
    """Where and of what a figure was measured. Absolute paths are of no use elsewhere: of those the command has the last part."""
    ranks = os.environ["WORLD_SIZE"] if "TORCHELASTIC_RUN_ID" in os.environ else None
    launcher = f"torchrun --nproc-per-node {ranks}" if ranks else "python"
    return {
        "command": " ".join([launcher, *(Path(word).name if Path(word).is_absolute() else word for word in sys.argv)]),
        "commit": _commit(),
        "machine": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of packages that need not be there, and of CUDA."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "CUDA": str(torch.version.cuda)}


def print_figures(figures: Mapping[str, object]) -> None:
    """One line a figure, and an empty one."""
    for key, value in figures.items():
        print(f"  {key:<52}{value:.4g}" if isinstance(value, float) else f"  {key:<52}{value}")
    print(flush=True)


def save(path: Path | None, rows: object, **besides: object) -> None:
    """Write ``rows`` with their environment, and what is known ``besides``, as JSON, if there is a path. An interrupt leaves the
    file as it was before, or new."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps({"environment": {**environment(), **besides}, "rows": rows}, indent=1) + "\n")
        unfinished.replace(path)


def cpu_name() -> str:
    """The processor's model, where the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _commit() -> str:
    """The checked-out commit; ``+`` where files differ from it, ``unknown`` outside of a checkout."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")
