"""Reports in directories: what is written, read again, compared, and what the command says of it."""

import dataclasses
import json
import math
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from autohete_fx import cli
from autohete_fx.errors import AutoHeteError, ReportError
from autohete_fx.ir import BlockDecision, Optimizer, Plan, StepRecord
from autohete_fx.report.compare import comparison, read_side
from autohete_fx.report.saved import DATA, METRICS, PAGE, PLAN, TRACE, Report, metrics_line
from autohete_fx.report.trace import Trace
from tests.report_data import report_data

DONE = report_data(6)
TRACED = Trace(planned=DONE.events, records=(), steps_s=())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    texts = {"forward.before.txt": "before\n", "forward.after.txt": "after\n"}
    Report(data=DONE, graphs=texts, trace=TRACED).save(tmp_path / "runs" / "x")
    return tmp_path / "runs" / "x"


def test_all_files_are_there_and_are_what_they_say(run: Path):
    assert names_in(run) == {DATA, METRICS, PAGE, PLAN, TRACE, "graphs/forward.after.txt", "graphs/forward.before.txt"}
    assert Plan.load(run / PLAN) == DONE.plan
    assert (run / PAGE).read_text() == Report(data=DONE).html
    assert (run / "graphs" / "forward.after.txt").read_text() == "after\n"
    assert len(json.loads((run / TRACE).read_text())["traceEvents"]) > len(DONE.events)
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [step.number for step in DONE.steps]
    assert lines[3] == {
        "step": 3,
        "step_s": DONE.steps[3].step_s,
        "predicted_step_s": DONE.plan.step_s,
        "peak_bytes": DONE.steps[3].peak_bytes,
        "predicted_peak_bytes": DONE.plan.peak_bytes,
        "budget_bytes": DONE.budget_bytes,
    }


def names_in(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


def test_it_is_read_back_with_the_steps_that_came_after(run: Path):
    assert Report.load(run).data == DONE
    late = StepRecord(number=99, step_s=1.0)
    with open(run / METRICS, "a") as file:
        file.write(metrics_line(late, DONE.plan, None))
    assert Report.load(run).data.steps == (*DONE.steps, late)


def test_metrics_stay_where_the_run_writes_them(run: Path):
    (run / METRICS).write_text("")
    Report(data=DONE).save(run, keeps_metrics=True)
    assert (run / METRICS).read_text() == ""
    Report(data=DONE).save(run)
    assert (run / METRICS).read_text().count("\n") == len(DONE.steps)


def test_a_notebook_gets_a_frame_that_is_apart_from_its_own_style():
    shown = Report(data=DONE)._repr_html_()
    assert shown.startswith('<iframe srcdoc="&lt;!doctype html&gt;') and shown.count('"') == 6


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda run: (run / DATA).unlink(), "where no report.json can be found. Expected was"),
        (lambda run: (run / DATA).write_text("{"), "not a report file"),
        (
            lambda run: (run / METRICS).write_text('{"step": 1}\n'),
            "metrics.jsonl' cannot be read: it lacks 'step_s'. Expected was",
        ),
        (
            lambda run: (run / METRICS).write_text('{"step": 9, "step_s": "x", "peak_bytes": null}\n'),
            "line 1 of .* step_s is 'x'; expected int or float. Expected was",
        ),
        (lambda run: (run / METRICS).write_text("\nhalf a li\n"), "line 2 of .*Remove the lines that are damaged"),
        (lambda run: (run / METRICS).write_text("[" * 100_000 + "\n"), "line 1 of .*recursion.*Remove the lines"),
        (
            lambda run: (run / METRICS).write_text("[1]\n"),
            r"read: \[1\] stands where an object with 'step' was expected",
        ),
        (lambda run: (run / METRICS).write_text(line(step=True)), "step is True; expected int"),
        (lambda run: (run / METRICS).write_text(line(step=-3)), "step is -3; expected a number of at least 0"),
        (lambda run: (run / METRICS).write_text(line(step_s=10**400)), "step_s is 10{19}; expected a number of"),
        (lambda run: (run / METRICS).write_text(line(step_s=math.nan)), "step_s is nan; expected a number of"),
        (lambda run: (run / METRICS).write_text(line(step_s=math.inf)), "step_s is inf; expected a number of"),
        (lambda run: (run / METRICS).write_text(line(peak_bytes=-1)), "peak_bytes is -1; expected a number of"),
        (lambda run: change(run, "plan", "step_s", math.nan), "damaged: step_s is nan; expected a number of at least"),
        (lambda run: change(run, "plan", "step_s", 0.0), "damaged: step_s of plan is 0; expected seconds above 0"),
        (lambda run: change(run, "plan", "busy_s", 0, "busy_s", -1.0), "damaged: busy_s is -1.0; expected a number"),
        (lambda run: change(run, "measured_step_s", math.inf), "damaged: measured_step_s is inf; expected a number"),
        (lambda run: change(run, "measured_step_s", 0.0), "damaged: measured_step_s is 0; expected seconds above 0"),
        (lambda run: change(run, "step", "step_s", 0.0), "damaged: step_s of step is 0; expected seconds above 0"),
        (lambda run: change(run, "levels", 0, "block", 99), "damaged: block is 99; expected one of the plan's 6"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_path(
    run: Path, break_it, reason: str, capsys: pytest.CaptureFixture[str]
):
    break_it(run)
    with pytest.raises(ReportError, match=reason) as caught:
        Report.load(run)
    assert str(run) in str(caught.value)
    assert cli.main(["report", str(run)]) == 2
    assert capsys.readouterr().err.startswith("autohete: ")


def line(**changed: object) -> str:
    return json.dumps({"step": 9, "step_s": 1.0, "peak_bytes": 5} | changed) + "\n"


def change(run: Path, *path: Any) -> None:
    """Set the entry of the data that all but the last lead to."""
    *places, last, value = path
    raw = inside = json.loads((run / DATA).read_text())
    for place in places:
        inside = inside[place]
    inside[last] = value
    (run / DATA).write_text(json.dumps(raw))


def test_metrics_that_may_not_be_read_are_not_called_damaged(run: Path, monkeypatch: pytest.MonkeyPatch):
    read = Path.read_text

    def refusing(path: Path, **how: Any) -> str:
        if path.name == METRICS:
            raise PermissionError(13, "Permission denied")
        return read(path, **how)

    monkeypatch.setattr(Path, "read_text", refusing)
    with pytest.raises(ReportError, match=r"jsonl' cannot be read: Permission denied\. Expected was a file") as caught:
        Report.load(run)
    assert "damaged" not in str(caught.value)


def test_a_last_line_that_was_cut_off_costs_its_step_alone(run: Path):
    lines = (run / METRICS).read_text()
    (run / METRICS).write_text(lines + '{"step": 90, "step_s": 1.0, "peak_bytes": null}\n{"step": 91, "step_')
    assert Report.load(run).data.steps[-1].number == 90
    (run / METRICS).write_text(lines)


def test_a_directory_that_refuses_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot be written to .*Expected was a directory .*Give another one"):
        Report(data=DONE).save(tmp_path / "file")


def test_the_command_draws_the_page_again_and_sums_it_up(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (run / PAGE).unlink()
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert cli.main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("The peak is predicted") and said.splitlines()[-1] == str(run.resolve() / PAGE)
    assert (run / PAGE).read_text() == Report(data=DONE).html and not opened
    assert cli.main(["report", "--open", str(run)]) == 0
    assert opened == [(run.resolve() / PAGE).as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert cli.main(["report", "--open", str(run)]) == 2
    assert "no browser could be started" in capsys.readouterr().err


def test_a_run_is_summed_up_where_its_page_cannot_be_written(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / PAGE).unlink()
    (run / PAGE).mkdir()
    assert cli.main(["report", str(run)]) == 2
    said = capsys.readouterr()
    assert said.out == Report(data=DONE).summary + "\n"
    assert said.err.startswith("autohete: the report cannot be written to") and said.err.count("\n") == 1


# -- two of them -----------------------------------------------------------------------------------------------------

SLOWER = dataclasses.replace(
    DONE.plan,
    decisions=(BlockDecision(), *(dataclasses.replace(d, prefetch_distance=3) for d in DONE.plan.decisions[1:])),
    step_s=2 * DONE.plan.step_s,
)


def test_runs_and_plans_are_compared_by_block(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    SLOWER.save(tmp_path / "plan.json")
    assert cli.main(["compare", str(run), str(tmp_path / "plan.json")]) == 0
    said = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    assert lines["step time, predicted"][-1] == "2.00x"
    assert lines["step time, measured"][-2:] == ["-", "-"], "a plan has none"
    assert "6 of 6 blocks that both have are decided otherwise" in said
    (first,) = (line for line in said.splitlines() if line.startswith("layers.0 "))
    assert "offload, parameters host, optimizer host" in first and first.endswith("keep")
    (last,) = (line for line in said.splitlines() if line.startswith("layers.5 "))
    assert "1 ahead" in last and last.endswith("3 ahead")


def test_blocks_that_are_alike_are_one_row_only_in_a_row():
    host = dataclasses.replace(DONE.plan, decisions=(BlockDecision(optimizer=Optimizer.HOST),) * 6)
    some = tuple(BlockDecision() if i in (0, 1, 3) else host.decisions[i] for i in range(6))
    said = comparison(side("a", host), side("b", dataclasses.replace(host, decisions=some)))
    rows = [line.split("  ")[0] for line in said.splitlines() if line.startswith("layers")]
    assert rows == ["layers.0-1 (2)", "layers.3"]


def side(name: str, plan: Plan):
    from autohete_fx.report.compare import Compared

    return Compared(name=name, plan=plan)


def test_blocks_of_one_side_and_equal_plans_are_told():
    plan = dataclasses.replace(DONE.plan, reasons=None)
    fewer = dataclasses.replace(plan, labels=plan.labels[:5], decisions=plan.decisions[:5])
    said = comparison(side("a", plan), side("b", fewer))
    assert "layers.5: A only" in said and "all 5 blocks that both have are decided alike" in said
    other = dataclasses.replace(fewer, labels=("graph",), decisions=fewer.decisions[:1])
    assert "no block is in both: these are plans of different models" in comparison(side("a", plan), side("b", other))


def test_the_directory_of_a_plan_alone_will_do(tmp_path: Path):
    DONE.plan.save(tmp_path / PLAN)
    assert read_side(tmp_path).plan == DONE.plan and read_side(tmp_path).data is None


@pytest.mark.parametrize("given", ["nowhere", ".", "notes.txt", DATA])
def test_what_is_neither_a_plan_nor_a_run_is_told(tmp_path: Path, given: str, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(AutoHeteError):
        read_side(tmp_path / given)
    assert cli.main(["compare", str(tmp_path / given), str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and str(tmp_path / given) in told.err and "xpected" in told.err
