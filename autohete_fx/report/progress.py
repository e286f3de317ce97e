"""A training run as a progress bar: step, loss, tokens/s, and the measured peak beside the budget.

On a terminal it is one live bar. Where output is not a terminal (a file, a CI log) it is a plain line every few steps.
"""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autohete_fx.ir.sizes import format_bytes

__all__ = ["TrainingProgress"]

_PLAIN_INTERVAL_S = 10.0


class TrainingProgress:
    """Context manager around a training loop; call ``update`` once a step.

    Args:
        total_steps: steps of the run, at least 1.
        budget_bytes: shown beside the measured peak; None where there is no budget.
        console: where to draw; standard output by default.
        plain_every: on something that is no terminal, also print a line every so many steps, whatever the time.
    """

    def __init__(
        self,
        total_steps: int,
        budget_bytes: int | None = None,
        console: Console | None = None,
        plain_every: int | None = None,
    ) -> None:
        assert total_steps >= 1
        self.total_steps = total_steps
        self.budget_bytes = budget_bytes
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.peak_bytes: int | None = None
        self._plain_every = plain_every or max(total_steps // 10, 1)
        self._printed_at_s = time.monotonic()
        self._step_at_s = time.monotonic()
        self._tokens_per_s: float | None = None
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        self._step_at_s = time.monotonic()
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._progress.start()
            self._task = self._progress.add_task("train", total=self.total_steps, figures="compiling")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, step: int, *, loss: float, tokens: int, peak_bytes: int | None = None) -> None:
        """Report one finished step.

        Args:
            step: 1-based number of the step.
            loss: its loss.
            tokens: trained on in this step; the rate is smoothed and leaves out step 1, which compiles.
            peak_bytes: measured in this step; the largest so far is shown. None where it was not measured.
        """
        now_s = time.monotonic()
        if step > 1 and now_s > self._step_at_s:
            rate = tokens / (now_s - self._step_at_s)
            self._tokens_per_s = rate if self._tokens_per_s is None else 0.8 * self._tokens_per_s + 0.2 * rate
        self._step_at_s = now_s
        if peak_bytes is not None:
            self.peak_bytes = max(peak_bytes, self.peak_bytes or 0)
        figures = self._figures(loss)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, figures=escape(figures))
        elif (
            step in (1, self.total_steps)
            or step % self._plain_every == 0
            or now_s - self._printed_at_s > _PLAIN_INTERVAL_S
        ):
            self._printed_at_s = now_s
            self.console.print(f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  {figures}", markup=False)

    def print(self, text: str) -> None:
        """Print text above the bar."""
        self.console.print(text, markup=False)

    def _figures(self, loss: float) -> str:
        rate = "-" if self._tokens_per_s is None else f"{self._tokens_per_s:,.0f}"
        figures = f"loss {loss:.3f}  {rate} tokens/s"
        if self.peak_bytes is not None:
            figures += f"  peak {format_bytes(self.peak_bytes)}"
            figures += "" if self.budget_bytes is None else f" of {format_bytes(self.budget_bytes)}"
        return figures
