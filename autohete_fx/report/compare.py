"""Two plans or runs side by side: what was decided otherwise, and what that cost.

In: two paths, each of a plan file or of a directory that a report was written to. Out: text. Blocks are told to be the same by
their labels; prefetch distances are compared too, since they change time and memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from autohete_fx.errors import ReportError
from autohete_fx.ir import BlockDecision, Lane, Plan
from autohete_fx.ir.files import expanded, is_file
from autohete_fx.ir.labels import label_pattern, run_label
from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.report.data import ReportData
from autohete_fx.report.saved import DATA, METRICS, PLAN, Report
from autohete_fx.report.tables import aligned
from autohete_fx.report.why import decision_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One side.

    Attributes:
        name: as it was given.
        plan: its decisions.
        data: of its run; None where only a plan is there.
    """

    name: str
    plan: Plan
    data: ReportData | None = None


def read_side(path: str | Path) -> Compared:
    """A plan file, or the directory of a run.

    Raises:
        PlanError: the file is no plan.
        ReportError: there is neither, or the report is damaged.
    """
    found = expanded(path)
    if is_file(found) and found.name not in (DATA, METRICS):
        return Compared(name=str(path), plan=Plan.load(found))
    if is_file(found / DATA):
        data = Report.load(found).data
        return Compared(name=str(path), plan=data.plan, data=data)
    if is_file(found / PLAN):
        return Compared(name=str(path), plan=Plan.load(found / PLAN))
    raise ReportError(
        f"{str(path)!r} was given, where neither a plan file nor a directory with {DATA} or {PLAN} can be found. Expected was one"
        " of these. Give a file that Plan.save wrote, or a directory that the option 'report_dir' wrote"
    )


def comparison(one: Compared, two: Compared) -> str:
    """Figures of both, and the blocks that are decided otherwise."""
    return "\n".join([f"A  {one.name}", f"B  {two.name}", "", _figures(one, two), "", *_decisions(one.plan, two.plan)])


def _figures(one: Compared, two: Compared) -> str:
    rows: list[list[str]] = []

    def row(name: str, shown: Callable[[float], str], value_of: Callable[[Compared], float | None]) -> None:
        first, second = value_of(one), value_of(two)
        if first is None and second is None:
            return
        cells = ["-" if value is None else shown(value) for value in (first, second)]
        rows.append([name, *cells, f"{second / first:.2f}x" if first and second is not None else "-"])

    row("step time, predicted", format_seconds, lambda side: side.plan.step_s)
    row("step time, measured", format_seconds, lambda side: side.data and side.data.measured_step_s)
    row("peak memory, predicted", format_bytes, lambda side: side.plan.peak_bytes)
    row("peak memory, measured", format_bytes, lambda side: side.data and side.data.measured_peak_bytes)
    row("budget", format_bytes, lambda side: side.data and side.data.budget_bytes)
    row("host memory", format_bytes, lambda side: side.plan.host_bytes)
    row("disk", format_bytes, lambda side: side.plan.disk_bytes or None)
    for lane in Lane:
        row(f"{lane.value} lane, predicted", format_seconds, lambda side, lane=lane: _busy_s(side.plan, lane))
    return aligned(["", "A", "B", "B / A"], rows, right_from=1)


def _busy_s(plan: Plan, lane: Lane) -> float | None:
    return sum(time.busy_s for time in plan.busy_s if time.lane is lane) or None


def _decisions(one: Plan, two: Plan) -> list[str]:
    first, second = (dict(zip(plan.labels, plan.decisions, strict=True)) for plan in (one, two))
    labels = [label for label in one.labels if label in second]
    changed = [label for label in labels if first[label] != second[label]]
    lines = [f"{label}: {side} only" for side, label in _alone(one.labels, two.labels)]
    if one.schedule != two.schedule:
        lines.append(
            f"updates on the host overlap: {one.schedule.overlap.value} in A, {two.schedule.overlap.value} in B"
        )
    if not labels:
        return [*lines, "no block is in both: these are plans of different models, or of different layers of one"]
    if not changed:
        return [*lines, f"all {len(labels)} blocks that both have are decided alike"]
    lines.append(f"{len(changed)} of {len(labels)} blocks that both have are decided otherwise")

    def alike(numbered: tuple[int, str]) -> tuple[object, ...]:
        number, label = numbered
        return labels.index(label) - number, label_pattern(label), first[label], second[label]  # the first: in a row

    rows = []
    for _, run in groupby(enumerate(changed), alike):
        group = [label for _, label in run]
        rows.append([run_label(group), *_words(first[group[0]], second[group[0]])])
    return [*lines, aligned(["block", "A", "B"], rows, right_from=3)]


def _alone(one: Sequence[str], two: Sequence[str]) -> list[tuple[str, str]]:
    return [("A", label) for label in one if label not in two] + [("B", label) for label in two if label not in one]


def _words(*decisions: BlockDecision) -> list[str]:
    """Each in words; with the distance where they differ in nothing else that is said."""
    said = [decision_words(decision) for decision in decisions]
    if len(set(said)) > 1:
        return said
    return [f"{words}, {d.prefetch_distance} ahead" for words, d in zip(said, decisions, strict=True)]
