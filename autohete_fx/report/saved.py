"""A report and the directory that it is saved to.

In: a `ReportData`, the texts of graphs, a trace. Out: files. ``report.html`` is the page and ``report.json`` its data, from
which `load` makes the page again. ``metrics.jsonl`` has a line a step and may be longer than the data, if the process was
killed.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from types import NoneType
from typing import Any

from autohete_fx.errors import ReportError
from autohete_fx.ir import Plan, StepRecord
from autohete_fx.ir.files import check_numbers, checked, expanded, is_file, write_text
from autohete_fx.report.data import ReportData
from autohete_fx.report.trace import Trace

PAGE, DATA, PLAN, METRICS, TRACE, SNAPSHOT = (
    "report.html",
    "report.json",
    "plan.json",
    "metrics.jsonl",
    "trace.json",
    "memory_snapshot.pickle",
)
GRAPHS = "graphs"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Predictions and measurements of a training graph, to be looked at.

    A notebook shows it as it is; ``save`` writes the page with everything beside it.

    Attributes:
        data: every figure.
        graphs: texts by the name of their file, such as ``backward.after.txt``.
        trace: of the lanes; None where the report was read from a file.
    """

    data: ReportData
    graphs: Mapping[str, str] = field(default_factory=dict)
    trace: Trace | None = None

    @property
    def html(self) -> str:
        """The page: one file, which loads nothing."""
        from autohete_fx.report.page import page_of

        return page_of(self.data)

    @property
    def summary(self) -> str:
        """The sentences that the page's parts begin with."""
        from autohete_fx.report.page import sentences_of

        return "\n".join(sentences_of(self.data))

    def _repr_html_(self) -> str:
        page = escape(self.html, quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:900px;border:0" title="autohete report"></iframe>'

    def save(self, directory: str | Path, *, keeps_metrics: bool = False) -> Path:
        """Write all files, making the directory where it is missing; returns the path of the page.

        Args:
            directory: may have an earlier report, which is replaced.
            keeps_metrics: whether ``metrics.jsonl`` stays as it is, because the run itself writes it.

        Raises:
            ReportError: the directory refuses.
        """
        into = expanded(directory)
        try:
            (into / GRAPHS).mkdir(parents=True, exist_ok=True)
            self.data.plan.save(into / PLAN)
            for name, text in self.graphs.items():
                write_text(into / GRAPHS / name, text)
            if self.trace is not None:
                self.trace.save(into / TRACE)
            if not keeps_metrics:
                lines = (metrics_line(step, self.data.plan, self.data.budget_bytes) for step in self.data.steps)
                write_text(into / METRICS, "".join(lines))
            write_text(into / DATA, self.data.to_json())
            return self.rewrite_page(into)
        except OSError as error:
            raise cannot_write(into, error) from error

    def rewrite_page(self, directory: str | Path) -> Path:
        """Write the page alone again. Raises ReportError where the directory refuses."""
        page = expanded(directory) / PAGE
        try:
            write_text(page, self.html)
        except OSError as error:
            raise cannot_write(page.parent, error) from error
        return page

    @staticmethod
    def load(directory: str | Path) -> "Report":
        """The report of a directory that ``save`` wrote, with the steps of its metrics. Raises ReportError."""
        found = expanded(directory)
        if not is_file(found / DATA):
            raise ReportError(
                f"{str(directory)!r} was given, where no {DATA} can be found. Expected was one that the option 'report_dir'"
                " or Report.save wrote. Give that directory, or train with report_dir first"
            )
        data = ReportData.load(found / DATA)
        if is_file(found / METRICS):
            data = replace(data, steps=_merged(data.steps, _steps(found / METRICS)))
        return Report(data=data)


def metrics_line(step: StepRecord, plan: Plan, budget_bytes: int | None) -> str:
    """One line of ``metrics.jsonl``: a step as predicted and as measured; null for what was not measured."""
    figures = {
        "step": step.number,
        "step_s": step.step_s,
        "predicted_step_s": plan.step_s,
        "peak_bytes": step.peak_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "budget_bytes": budget_bytes,
    }
    return json.dumps(figures) + "\n"


def cannot_write(directory: Path, error: OSError) -> ReportError:
    """The error for a directory that refuses files."""
    return ReportError(
        f"the report cannot be written to {str(directory)!r}: {error.strerror or error}. Expected was a directory where files can"
        " be made. Give another one, or make room there"
    )


def _steps(path: Path) -> list[StepRecord]:
    """Those of the lines of a file; its last line may have been cut off."""
    found: list[StepRecord] = []
    place = repr(str(path))
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            place = f"line {number} of {str(path)!r}"
            if line.strip() and line.endswith("\n"):
                found.append(_step(json.loads(line)))
    except OSError as error:
        raise ReportError(
            f"{place} cannot be read: {error.strerror}. Expected was a file that this user may read. Change its mode"
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ReportError(
            f"{place} cannot be read: {what}. Expected was a line of JSON for each step, as a run writes them. Remove the"
            " lines that are damaged"
        ) from error
    return found


def _step(raw: Any) -> StepRecord:
    """The step of a line. Raises KeyError for an entry that is missing, TypeError or ValueError for a wrong one."""
    figures = {
        "step": checked(raw, "step", int),
        "step_s": checked(raw, "step_s", int, float),
        "peak_bytes": checked(raw, "peak_bytes", int, NoneType),
    }
    check_numbers("", figures)
    return StepRecord(number=figures["step"], step_s=figures["step_s"], peak_bytes=figures["peak_bytes"])


def _merged(known: Iterable[StepRecord], later: Iterable[StepRecord]) -> tuple[StepRecord, ...]:
    steps = {step.number: step for step in (*later, *known)}
    return tuple(steps[number] for number in sorted(steps))
