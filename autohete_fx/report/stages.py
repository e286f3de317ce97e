"""The stages of work that takes its time, such as a first step: one line each, with its seconds.

Enter the name of each stage when it begins, and a few words on its result when it ends. Lines go to standard error where that
is a terminal; there a stage is shown from when it begins. Elsewhere each is a record of level INFO, for whoever sets up
`logging`. ``AUTOHETE_PROGRESS=0`` turns the lines on terminals off, as does a level above INFO of the logger ``autohete_fx`` or
of this module's. ``AUTOHETE_PROGRESS=1`` prints them wherever standard error leads. Only the first of several ranks speaks.
"""

import logging
import os
import sys
import time
from types import TracebackType
from typing import Self, TextIO

from autohete_fx.ir import BlockGraph, BlockKind, Plan
from autohete_fx.ir.sizes import format_bytes, format_seconds

__all__ = ["Stages", "blocks_words", "plan_words"]

log = logging.getLogger(__name__)

VARIABLE = "AUTOHETE_PROGRESS"
_CLEAR = "\r\x1b[2K"
"""To the beginning of a terminal's line, which is emptied: a progress bar of somebody else's may stand there."""
_WIDTH = 11


class Stages:
    """A context around the work. Where it is left by an exception, the stage that was under way is not told.

    Args:
        began_s: of the first stage, by `time.perf_counter`; None: when it is entered.
    """

    def __init__(self, began_s: float | None = None) -> None:
        self._began_s = time.perf_counter() if began_s is None else began_s
        self._stage = ""
        self._terminal: TextIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        elif self._stage:
            self._stage = ""
            self._write(_CLEAR)

    def begin(self, stage: str, *, began_s: float | None = None) -> None:
        """A stage begins, if it is not under way; another one that is has ended without words."""
        if stage == self._stage:
            return
        self.end()
        self._stage = stage
        self._began_s = time.perf_counter() if began_s is None else began_s
        self._terminal = _terminal()
        self._write(f"{_CLEAR}autohete: {stage} …")

    def end(self, words: str = "") -> None:
        """The stage that is under way has ended; no stage under way is none to tell of."""
        if not self._stage:
            return
        seconds = format_seconds(time.perf_counter() - self._began_s)
        line, self._stage = f"{self._stage:{_WIDTH}} {seconds:>9}  {words}".rstrip(), ""
        self._tell(line)

    def say(self, line: str) -> None:
        """One line that is no stage."""
        self._terminal = _terminal()
        self._tell(line)

    def _tell(self, line: str) -> None:
        if self._terminal is not None:
            self._write(f"{_CLEAR}autohete: {line}\n")
        elif _speaks():
            if os.environ.get(VARIABLE) == "1":
                print(f"autohete: {line}", file=sys.stderr, flush=True)
            else:
                log.info("%s", line)

    def _write(self, text: str) -> None:
        if self._terminal is not None:
            self._terminal.write(text)
            self._terminal.flush()


def _speaks() -> bool:
    """Whether this process does, of all ranks of its job."""
    return os.environ.get("RANK", "0") == "0"


def _terminal() -> TextIO | None:
    """Where lines are drawn; None where they are not: no terminal, another rank, turned off, or records that logging shows."""
    stream = sys.stderr
    is_off = os.environ.get(VARIABLE, "") == "0" or not _speaks()
    if is_off or stream is None or not stream.isatty() or log.isEnabledFor(logging.INFO):
        return None
    levels = (logging.getLogger(name).level for name in (__name__, "autohete_fx"))
    return None if any(level > logging.INFO for level in levels) else stream


def blocks_words(graph: BlockGraph) -> str:
    """The layers that tracing found, in words."""
    digests = [block.digest for block in graph.blocks if block.kind is BlockKind.LAYER]
    if not digests:
        return "no layers found"
    return f"{len(digests)} layer{'s' * (len(digests) > 1)} of {len(set(digests))} kind{'s' * (len(set(digests)) > 1)}"


def plan_words(plan: Plan, budget_bytes: int | None) -> str:
    """The predictions of a plan, in words."""
    of = "" if budget_bytes is None else f" of {format_bytes(budget_bytes)}"
    return f"predicts steps of {format_seconds(plan.step_s)}, a peak of {format_bytes(plan.peak_bytes)}{of}"
