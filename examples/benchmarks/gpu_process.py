"""The processes of `gpu_suite.py`: one a case, limited in time, and ended before the host runs out of memory.

In: a `Case`. Out: the rows that its process reported, and what ended it where that was not its own will. All processes share
one folder with PyTorch's and our caches, so that the machine is measured once and equal kernels are compiled once.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_child import DOES_NOT_FIT, FAILED
from systems import Case

_POLL_S = 0.2
_HOST_RESERVE = 0.04
"""Of host memory: a process is ended before less than this is available, because the system would end any other one."""

Problem = tuple[str, str]
"""An outcome and its reason."""
ENDED_WELL: Problem = ("", "")


class Processes:
    """Starts them one after another.

    Args:
        folder: for results, plans and caches.
        arguments: of the command line; the flags that a process needs are passed on.
    """

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder = folder
        self._flags = ["--dry"] if arguments.dry else []
        self._count = 0
        self._environment = os.environ | {
            "AUTOHETE_CACHE_DIR": str(folder / "autohete"),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._new_caches()

    def run(self, case: Case | str, limit_s: float) -> tuple[list[dict[str, Any]], Problem]:
        """Rows in the order of the levels, whatever became of the process afterwards."""
        self._count += 1
        result, log = (self.folder / f"{self._count}.{end}" for end in ("jsonl", "log"))
        what = case if isinstance(case, str) else json.dumps(dataclasses.asdict(case))
        script = Path(__file__).with_name("gpu_suite.py")
        command = [sys.executable, str(script), "--child", what, "--result", str(result), *self._flags]
        with log.open("w") as output:
            process = subprocess.Popen(command, env=self._environment, stdout=output, stderr=output, process_group=0)
            try:
                problem = _waited(process, limit_s)
            finally:
                _end(process)
        if problem != ENDED_WELL:
            self._new_caches()
        lines = result.read_text().splitlines(keepends=True) if result.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last may have been cut
        return rows, (FAILED, _last_words(log)) if problem is None else problem

    def _new_caches(self) -> None:
        """Of compiled code: a process that is ended while it writes a library, or holds a lock, spoils them for all others."""
        for name in ("inductor", "triton", "extensions"):
            (self.folder / f"{name}-{self._count}").mkdir(exist_ok=True)
        self._environment |= {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / f"inductor-{self._count}"),
            "TRITON_CACHE_DIR": str(self.folder / f"triton-{self._count}"),
            "TORCH_EXTENSIONS_DIR": str(self.folder / f"extensions-{self._count}"),
        }


def _waited(process: "subprocess.Popen[bytes]", limit_s: float) -> Problem | None:
    """How a process ended; None where it failed by itself, which its log tells more of."""
    end_s = time.monotonic() + limit_s
    while process.poll() is None:
        if time.monotonic() > end_s:
            return FAILED, f"not done after {limit_s:.0f} s"
        if _host_share() < _HOST_RESERVE:
            return DOES_NOT_FIT, "host memory ran out"
        time.sleep(_POLL_S)
    if process.returncode == -signal.SIGKILL:
        return DOES_NOT_FIT, "the system ended the process, which it does when host memory runs out"
    return None if process.returncode else ENDED_WELL


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The process and all that it started: compile workers outlive the one that is killed."""
    with contextlib.suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _host_share() -> float:
    """Of host memory, what is available; 1 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 1.0
    values = {line.split(":")[0]: int(line.split()[1]) for line in lines if ":" in line}
    return values["MemAvailable"] / values["MemTotal"]


def _last_words(log: Path) -> str:
    """The end of a log, from its last error on."""
    text = log.read_text(errors="replace").replace("[rank0]: ", "")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if "Error" in line.split(" ")[0]]
    return "\n".join(lines[errors[-1] :][:6] if errors else lines[-4:]) or "ended without a word"
