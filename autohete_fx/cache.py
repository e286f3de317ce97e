"""Results that are worth keeping between processes: machine figures, block timings, plans. One directory a user.

Enter a kind, a key and text; the same text leaves in a later process. The directory is ``AUTOHETE_CACHE_DIR``, else
``autohete_fx`` under the user's cache directory, else, where that cannot be written, under the temporary directory.
Files are replaced atomically and carry a version; a damaged one counts as absent and is written again. PyTorch is imported only
where a key asks it.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from autohete_fx.errors import MachineError
from autohete_fx.ir import Machine
from autohete_fx.ir.files import write_text

if TYPE_CHECKING:
    import torch

CACHE_VERSION = 9
"""Raised when what files contain changes meaning: older files then count as absent."""


def cache_dir() -> Path:
    """The directory that is used, made where it is missing."""
    candidates: list[Path] = []
    with contextlib.suppress(RuntimeError):  # nobody knows a home
        named = os.environ.get("AUTOHETE_CACHE_DIR")
        candidates.append(Path(named) if named else _user_cache_dir() / "autohete_fx")
    owner = str(os.getuid()) if hasattr(os, "getuid") else "user"
    candidates.append(Path(tempfile.gettempdir()) / f"autohete_fx-{owner}")
    for candidate in candidates[:-1]:
        try:
            candidate.mkdir(parents=True, exist_ok=True)
        except OSError:  # a read-only home: the temporary directory is the documented fall-back
            continue
        if os.access(candidate, os.W_OK):
            return candidate
    candidates[-1].mkdir(parents=True, exist_ok=True)
    return candidates[-1]


def _user_cache_dir() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if sys.platform == "win32":
        named = os.environ.get("LOCALAPPDATA")
        return Path(named) if named else Path.home() / "AppData" / "Local"
    named = os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else Path.home() / ".cache"


def _path(kind: str, key: str, directory: str | Path | None) -> Path:
    if not re.fullmatch(r"[a-z_]+", kind):
        raise AssertionError(f"a kind is a plain word, not {kind!r}")
    return (
        (cache_dir() if directory is None else Path(directory))
        / kind
        / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    )


def store_text(kind: str, key: str, text: str, directory: str | Path | None = None) -> None:
    """Keep a text under (kind, key), replacing what was there. Where the directory refuses, nothing is kept.

    ``directory``: instead of `cache_dir`.
    """
    try:
        path = _path(kind, key, directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"version": CACHE_VERSION, "key": key, "text": text}))
    except OSError:  # a cache that cannot be written costs the next process time, never correctness
        return


def load_text(kind: str, key: str, directory: str | Path | None = None) -> str | None:
    """The text kept under (kind, key); None where there is none, or none that can be read."""
    try:
        raw = json.loads(_path(kind, key, directory).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict) or raw.get("version") != CACHE_VERSION or raw.get("key") != key:
        return None
    text = raw.get("text")
    return text if isinstance(text, str) else None


def store_machine(key: str, machine: Machine) -> None:
    """Keep a machine's figures."""
    store_text("machine", key, machine.to_json())


def load_machine(key: str) -> Machine | None:
    """A machine's figures, or None."""
    text = load_text("machine", key)
    if text is None:
        return None
    try:
        return Machine.from_json(text)
    except MachineError:  # of another version of this package: measured again
        return None


@functools.cache
def sources_digest() -> str:
    """A digest of this package's own code: another version of it must not find the old one's plans and compiled code.

    The files are read once in a process: it runs the code that it has imported, whatever is edited later.
    """
    digest, package = hashlib.sha256(), Path(__file__).resolve().parent
    for path in sorted([*package.rglob("*.py"), *(package / "passes").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def machine_key(device: "torch.device", offload_dir: str | None = None) -> str:
    """Everything that the figures depend on: device, cores, threads, torch, and the file system of ``offload_dir``."""
    import torch

    directory = offload_dir or tempfile.gettempdir()
    return "|".join([hardware_key(device), str(torch.get_num_threads()), str(os.stat(directory).st_dev)])


def hardware_key(device: "torch.device") -> str:
    """Device, cores and torch, which are the same in all processes."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return "|".join([device_name(device.type, device.index), device.type, str(cores), torch.__version__])


@functools.cache
def device_name(device_type: str, index: int | None) -> str:
    """The GPU's name, or the CPU's model."""
    if device_type == "cuda":
        import torch

        return torch.cuda.get_device_name(index)
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
