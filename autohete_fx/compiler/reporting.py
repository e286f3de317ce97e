"""Reports of runs: the option ``report_dir`` at work.

In: a compilation with a clock, and a directory. Out: files. They are written when the graph is compiled, with what is
predicted, and when steps 3 and 22 begin, with what was measured. They are written again when the process ends. Each step that
ends adds a line to ``metrics.jsonl``. A directory that refuses files fails the compilation; later it costs the report, with a
warning, and never the training.
"""

import atexit
import dataclasses
import logging
import os
from collections.abc import Hashable
from pathlib import Path

import torch

from autohete_fx.compiler.compilation import Compilation
from autohete_fx.errors import ReportError
from autohete_fx.ir import StepRecord
from autohete_fx.ir.files import is_directory
from autohete_fx.report.saved import METRICS, SNAPSHOT, cannot_write, metrics_line
from autohete_fx.runtime.recorder import StepRecorder

log = logging.getLogger(__name__)

_writers_of: "dict[Path, dict[Hashable, _Writer]]" = {}
"""By the directory that was given, the latest writer of each training graph of this process, in the order in which they came."""


def reported(compilation: Compilation, report_dir: str | None, device: torch.device, graph: Hashable) -> Compilation:
    """The compilation, whose steps are recorded and reported from now on; as it is where no directory is given, or nothing is
    trained.

    Args:
        graph: the same for two compilations of one graph. The later one, such as a new plan for it, takes the place of the
            earlier.

    Raises:
        ReportError: the directory refuses.
    """
    if report_dir is None or not compilation.training:
        return compilation
    root = Path(report_dir)
    writers = _writers_of.setdefault(root, {})
    earlier = writers.get(graph)
    number = len(writers) + 1 if earlier is None else earlier.compilation.number
    if earlier is not None:
        earlier.give_way()
    compilation = dataclasses.replace(compilation, number=number)
    writer = writers[graph] = _Writer(compilation, directory_of(root, number))
    if compilation.clock is not None:
        compilation.clock.recorder = StepRecorder(device, writer.note_step, writer.write_again)
        atexit.register(writer.end)
    return compilation


def directory_of(root: Path, number: int) -> Path:
    """The directory of a process's training graph: that of the first one is the user's. Other ranks of a job have their own."""
    rank = os.environ.get("RANK", "0")
    mine = root if rank == "0" else root / f"rank{rank}"
    return mine if number == 1 else mine / f"graph{number}"


class _Writer:
    """Writes the files of one compilation."""

    def __init__(self, compilation: Compilation, directory: Path) -> None:
        self.compilation, self.directory = compilation, directory
        self._is_stale = False
        self._is_over = False
        try:
            for name in (METRICS, SNAPSHOT):  # of an earlier run
                (directory / name).unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(directory, error) from error
        compilation.report().save(directory)

    def note_step(self, step: StepRecord) -> None:
        """Append a step to the metrics."""
        self._is_stale = True
        if self._is_over:
            return
        try:
            with open(self.directory / METRICS, "a", encoding="utf-8") as file:
                file.write(metrics_line(step, self.compilation.plan, self.compilation.device_budget_bytes))
        except OSError as error:
            self._give_up(cannot_write(self.directory, error))

    def write_again(self) -> None:
        """All files but the metrics, as of now."""
        if self._is_over:
            return
        try:
            self.compilation.report().save(self.directory, keeps_metrics=True)
            clock = self.compilation.clock
            if clock is not None and clock.recorder is not None:
                clock.recorder.save_snapshot(self.directory / SNAPSHOT)
        except OSError as error:
            self._give_up(cannot_write(self.directory, error))
        except ReportError as error:
            self._give_up(error)
        self._is_stale = False

    def end(self) -> None:
        """The process ends. A directory that was removed meanwhile stays so."""
        clock = self.compilation.clock
        if clock is not None and clock.recorder is not None:
            clock.recorder.close()
        if self._is_stale and is_directory(self.directory):
            self.write_again()

    def give_way(self) -> None:
        """Another writer has the directory from now on."""
        self._is_over = True
        atexit.unregister(self.end)
        if (clock := self.compilation.clock) is not None and clock.recorder is not None:
            clock.recorder.close()
            clock.recorder = None

    def _give_up(self, error: ReportError) -> None:
        self._is_over = True
        log.warning("%s; training goes on, and the report stays as it is", error)
