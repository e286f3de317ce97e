"""The processes of `gpu_suite.py`: one a case, limited in time, and ended before the host runs out of memory.

In: a `Case`. Out: the rows that its process reported, and what ended it where that was not its own will. All processes share
one folder with PyTorch's and our caches, so that the machine is measured once and equal kernels are compiled once; it may be
one that stays, for the next run.
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

from gpu_child import DOES_NOT_FIT, FAILED, OUT_OF_TIME
from systems import Case

from autohete_fx.runtime.tiers import ram

_SUITE = Path(__file__).with_name("gpu_suite.py")
_POLL_S = 0.2
_HOST_RESERVE = 0.04
"""Of host memory: a process is ended before less than this is available, because the system would end any other one."""
_OF_KERNELS = ("torchinductor", "triton")
_CLOCKS_DIFFER_S = 0.1
"""Files are dated by a clock that may be so much behind."""

Problem = tuple[str, str]
"""An outcome and its reason."""
ENDED_WELL: Problem = ("", "")


class Processes:
    """Starts them. What `run` starts is waited for, ended in time, and before the host runs out of memory.

    Args:
        folder: for results.
        caches: for compiled code, the machine's figures, and plans.
        arguments: of the command line; the flags that a process needs are passed on.
        script: whose ``--child`` a process runs.
    """

    def __init__(self, folder: Path, caches: Path, arguments: argparse.Namespace, script: Path = _SUITE) -> None:
        self.folder = folder
        self.caches = caches
        self._script = script
        self._flags = ["--dry"] if arguments.dry else []
        self._count = 0
        self._environment = os.environ | {
            "AUTOHETE_CACHE_DIR": str(caches / "autohete"),
            "TORCH_EXTENSIONS_DIR": str(caches / "extensions"),
            **{f"{name.upper()}_CACHE_DIR": str(caches / name) for name in _OF_KERNELS},
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def start(self, case: Case | str) -> "Started":
        """A process of its own for a case, or for a word that the script knows."""
        self._count += 1
        result, log = (self.folder / f"{self._count}.{end}" for end in ("jsonl", "log"))
        what = case if isinstance(case, str) else json.dumps(dataclasses.asdict(case))
        command = [sys.executable, str(self._script), "--child", what, "--result", str(result), *self._flags]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )
        return Started(process, result, log)

    def run(self, case: Case | str, limit_s: float) -> tuple[list[dict[str, Any]], Problem]:
        """Rows in the order of the levels, whatever became of the process afterwards."""
        began_s = time.time()
        started = self.start(case)
        try:
            problem = started.waited(limit_s)
        finally:
            started.end()
        if problem[0] not in (ENDED_WELL[0], FAILED):
            self._take_back(began_s)
        return started.rows(), problem

    def _take_back(self, began_s: float) -> None:
        """Of the caches, what a process wrote that began then and was ended: a library of which there is a part, or a lock that it
        held, spoils them for all others."""
        written = (file for name in _OF_KERNELS for file in (self.caches / name).glob("**/*") if file.is_file())
        locks = (self.caches / "extensions").glob("**/lock")  # ninja itself goes on where it was ended
        for file in [*(file for file in written if file.stat().st_mtime > began_s - _CLOCKS_DIFFER_S), *locks]:
            file.unlink()


@dataclasses.dataclass(frozen=True)
class Started:
    """A process that runs a case.

    Attributes:
        process: leads a session of its own.
        result: what it reports, a line of JSON each.
        log: what it prints.
    """

    process: "subprocess.Popen[bytes]"
    result: Path
    log: Path

    @property
    def has_ended(self) -> bool:
        """By itself or not."""
        return self.process.poll() is not None

    def rows(self) -> list[dict[str, Any]]:
        """What it has reported. Of its last line there may be a part."""
        lines = self.result.read_text().splitlines(keepends=True) if self.result.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def waited(self, limit_s: float) -> Problem:
        """How it ended, or that it did not in time."""
        end_s = time.monotonic() + limit_s
        while not self.has_ended:
            if time.monotonic() > end_s:
                return OUT_OF_TIME, f"not done after {limit_s:.0f} s"
            if _host_share() < _HOST_RESERVE:
                return DOES_NOT_FIT, "host memory ran out"
            time.sleep(_POLL_S)
        if self.process.returncode == -signal.SIGKILL:
            return DOES_NOT_FIT, "the system ended the process, which it does when host memory runs out"
        return (FAILED, _last_words(self.log)) if self.process.returncode else ENDED_WELL

    def end(self) -> None:
        """The process and all of its session."""
        _end(self.process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The process and all of its session: compile workers outlive the one that is killed, and a build tool's compilers are in
    process groups of their own, where they would slow down what is measured next."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            session = stat.read_text().rpartition(")")[2].split()[3]
            if int(session) == process.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # where there is no such folder
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _host_share() -> float:
    """Of host memory, what is available."""
    return ram.available_bytes() / ram.capacity_bytes()


def _last_words(log: Path) -> str:
    """The end of a log, from its last error on."""
    text = log.read_text(errors="replace").replace("[rank0]: ", "")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if "Error" in line.split(" ")[0]]
    return "\n".join(lines[errors[-1] :][:6] if errors else lines[-4:]) or "ended without a word"
