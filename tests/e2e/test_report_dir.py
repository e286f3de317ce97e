"""The option ``report_dir``: one run whose directory, page and figures are looked at; graphs of one model; and what comes of a
directory that refuses."""

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import autohete_fx
from autohete_fx.compiler import reporting
from autohete_fx.errors import OptionError, ReportError
from autohete_fx.ir import Lane
from autohete_fx.options import Options
from autohete_fx.report.data import ReportData
from autohete_fx.report.saved import DATA, Report
from autohete_fx.runtime.meter import device_live_bytes
from tests import training as job

EAGER = {"inner_backend": "eager", "profile": "analytic"}
STEPS = 5


@dataclass(frozen=True)
class Run:
    """A directory at four times of its run."""

    directory: Path
    compiled: Report
    traced: ReportData
    ended: ReportData
    compilation: autohete_fx.Compilation
    peaks: list[int]
    foreign_bytes: int


def steps(model: nn.Module, optimizer: autohete_fx.AdamW, count: int, peaks: list[int] | None = None) -> None:
    for step in range(count):
        with autohete_fx.MemoryMeter("cpu") as meter:
            model(job.batch("cpu", step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if peaks is not None:
            peaks.append(meter.peak_bytes)


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What is to be called when the process ends."""
    found: list[Callable[[], object]] = []
    monkeypatch.setattr(reporting, "atexit", SimpleNamespace(register=found.append, unregister=found.remove))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    gc.collect()
    directory, peaks, foreign_bytes = tmp_path_factory.mktemp("runs") / "x", [], device_live_bytes("cpu")
    endings: list[Callable[[], object]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporting, "atexit", SimpleNamespace(register=endings.append))
        model = job.make("cpu")
        optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
        options = {**EAGER, "plan": job.plan("mixed"), "report_dir": directory, "memory_budget": "64MiB"}
        model.compile(backend="autohete", options=options)
        model(job.batch("cpu", 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        compiled = Report.load(directory)
        steps(model, optimizer, STEPS - 1, peaks)
        traced = ReportData.load(directory / DATA)
        (end,) = endings
        end()
        compilation = job.training_compilation()
    yield Run(directory, compiled, traced, ReportData.load(directory / DATA), compilation, peaks, foreign_bytes)
    torch._dynamo.reset()


def test_the_directory_has_everything(run: Run):
    names = {str(path.relative_to(run.directory)) for path in run.directory.rglob("*") if path.is_file()}
    graphs = {f"graphs/{graph}.{at}.txt" for graph in ("forward", "backward") for at in ("before", "after")}
    assert names == {"report.html", "report.json", "plan.json", "metrics.jsonl", "trace.json", *graphs}
    assert autohete_fx.Plan.load(run.directory / "plan.json") == run.compilation.plan
    for graph in ("forward", "backward"):
        before, after = ((run.directory / "graphs" / f"{graph}.{at}.txt").read_text() for at in ("before", "after"))
        assert after == run.compilation.readable(graph) and "autohete." in after and "autohete." not in before
    assert "Measured is step" in (run.directory / "report.html").read_text()


def test_it_is_there_before_the_first_step_ends(run: Run):
    data = run.compiled.data
    assert data.step is None and not data.steps and data.measured_step_s is None
    assert data.levels and data.events and data.curve and data.budget_bytes == 64 << 20
    assert max(level.num_bytes for level in data.levels) > 0
    assert [point.budget_bytes for point in data.curve] == sorted(point.budget_bytes for point in data.curve)
    assert data.curve[0].step_s >= data.curve[-1].step_s


def test_metrics_have_a_line_for_each_step_that_ended(run: Run):
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS - 1)), "the last one ends with the process"
    assert all(line["predicted_step_s"] == run.compilation.plan.step_s for line in lines)
    # What the test allocates between steps, such as the next batch, comes after the user's meter has ended.
    assert all(abs(line["peak_bytes"] - peak) < 65536 for line, peak in zip(lines[1:], run.peaks, strict=False))
    assert max(line["peak_bytes"] for line in lines) - run.foreign_bytes <= 64 << 20


def test_memory_over_the_step_reaches_the_peak_of_the_step(run: Run):
    step = run.traced.step
    assert step is not None and step.number == 2 and step.memory[0].at_s == 0
    (of_step,) = (each for each in run.traced.steps if each.number == step.number)
    assert of_step.peak_bytes is not None
    assert max(record.num_bytes for record in step.memory) == of_step.peak_bytes
    assert all(0 <= record.at_s < step.step_s for record in step.memory)
    assert len({record.num_bytes for record in step.memory}) > 20


def test_the_lanes_of_the_step_are_those_that_worked(run: Run):
    step = run.ended.step
    assert step is not None
    passes = [bar.label for bar in step.bars if bar.lane is Lane.COMPUTE and bar.label in ("forward", "backward")]
    assert passes == ["forward", "backward"]
    assert {bar.lane for bar in step.bars} >= {Lane.COMPUTE, Lane.H2D, Lane.D2H}
    assert all(0 <= bar.start_s <= bar.end_s <= step.step_s + 1e-9 for bar in step.bars)


def test_when_the_process_ends_the_last_steps_are_in(run: Run):
    assert len(run.traced.steps) == 3 and len(run.ended.steps) == STEPS - 1
    assert run.ended.measured_step_s is not None


def test_a_compilation_has_its_report_without_the_option(run: Run, tmp_path: Path):
    restored = autohete_fx.Compilation.from_json(run.compilation.to_json())
    report = restored.report()
    assert report.data.levels == run.ended.levels and report.data.curve == run.ended.curve
    assert report.data.step is None, "another process measured"
    assert report.save(tmp_path / "y").read_text() == report.html
    assert "srcdoc" in restored._repr_html_()


def test_graphs_of_one_model_have_directories_of_their_own(
    tmp_path: Path, endings: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
):
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            torch._dynamo.graph_break()
            return self.two(x).sum()

    model = Broken()
    model.compile(backend="autohete", options={**EAGER, "report_dir": str(tmp_path)})
    model(torch.ones(2, 8)).backward()
    assert Report.load(tmp_path).data.training_graph == 1
    assert Report.load(tmp_path / "graph2").data.training_graph == 2
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["graph2", "graphs"]
    lines = (tmp_path / "metrics.jsonl").read_text()
    torch._dynamo.reset()
    model(torch.ones(2, 8)).backward()  # compiled again: it takes the place of what is forgotten
    assert lines == "" and not (tmp_path / "graph3").exists() and len(endings) == 2
    model(torch.ones(3, 8)).backward()
    assert Report.load(tmp_path / "graph3").data.training_graph == 3
    shutil.rmtree(tmp_path)
    for end in endings:
        end()
    assert not tmp_path.exists(), "what was removed stays so"
    monkeypatch.setenv("RANK", "3")
    assert reporting.directory_of(tmp_path, 2) == tmp_path / "rank3" / "graph2"


@pytest.mark.slow
def test_a_directory_that_refuses_later_costs_the_report_alone(
    tmp_path: Path,
    endings: list[Callable[[], object]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    model = job.make("cpu")
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
    model.compile(backend="autohete", options={**EAGER, "plan": job.plan("keep"), "report_dir": tmp_path})
    steps(model, optimizer, 1)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    steps(model, optimizer, 4)
    for end in endings:
        end()
    (warning,) = (r.getMessage() for r in caplog.records if "report" in r.getMessage())
    assert "Expected was a directory" in warning and warning.endswith("training goes on, and the report stays as it is")


@pytest.mark.slow
def test_a_directory_that_refuses_at_once_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file" / "x", "/proc/nowhere", 3, ""):
        with pytest.raises(OptionError, match="report_dir"):
            Options.from_user({"report_dir": wrong})
    assert Options.from_user({"report_dir": tmp_path / "new"}).report_dir == str(tmp_path / "new")
    model = job.make("cpu")
    autohete_fx.preview(model, job.batch("cpu", 0), options={**EAGER, "report_dir": tmp_path / "new"})
    assert Report.load(tmp_path / "new").data.step is None, "what is explained is not run"
    monkeypatch.setattr(Report, "save", lambda *_, **__: (_ for _ in ()).throw(ReportError("no room")))
    with pytest.raises(ReportError, match="no room"):
        autohete_fx.preview(model, job.batch("cpu", 0), options={**EAGER, "report_dir": tmp_path})
