"""Answers of `autohete plan` that are kept: the same question has the words of the first time, any other one is asked."""

import argparse
import json
from pathlib import Path

import pytest

from autohete_fx import cli
from autohete_fx.cluster.commands import plan as command
from autohete_fx.cluster.commands.plan import Request
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.commands import answers, planning
from autohete_fx.commands.answers import Answer
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Plan
from autohete_fx.machine.devices import find_device, machine_of_spec

PLAN = Plan(labels=("a",), decisions=(BlockDecision(),), step_s=0.5, peak_bytes=2**30)
ASKED = ("plan", "gpt2", "--device", "h100")


@pytest.fixture
def solved(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """The questions that were answered by planning, each in other words."""
    asked: list[argparse.Namespace] = []

    def answer(parsed: argparse.Namespace, *_: object) -> Answer:
        asked.append(parsed)
        return Answer(text=f"solved in {len(asked)} s\n  ✓ as table", plan=PLAN.to_json())

    monkeypatch.setattr(planning, "answer", answer)
    return asked


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def test_the_same_question_is_answered_by_the_same_bytes(
    solved: list[argparse.Namespace],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("AUTOHETE_PROGRESS", "1")
    first = tmp_path / "first.json"
    assert cli.main([*ASKED, "--save", str(first)]) == 0
    shown = capsys.readouterr()
    told = [line.split()[:2] for line in shown.err.splitlines()]
    assert told[0] == ["autohete:", "gpt2"] and ["autohete:", "importing"] in told
    assert cli.main([*ASKED, "--save", str(tmp_path / "second.json")]) == 0
    again = capsys.readouterr()
    assert again.out == shown.out == "solved in 1 s\n  ✓ as table\n" and len(solved) == 1
    assert "answered from the cache" in again.err and "importing" not in again.err
    assert (tmp_path / "second.json").read_bytes() == first.read_bytes() and Plan.load(first) == PLAN
    assert out(capsys, *ASKED, "--no-cache") != shown.out and out(capsys, *ASKED) == shown.out


def test_everything_that_decides_is_in_the_key(
    solved: list[argparse.Namespace],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    config, machine = tmp_path / "config.json", tmp_path / "machine.json"
    config.write_text('{"model_type": "gpt2"}')
    h100 = machine_of_spec(find_device("h100"))
    h100.save(machine)
    base = ("plan", str(config), "--machine", str(machine))
    for arguments in (
        ASKED,
        (*ASKED, "--batch", "9"),
        (*ASKED, "--seq", "512"),
        (*ASKED, "--json"),
        (*ASKED, "--explain"),
        (*ASKED, "--clip"),
        (*ASKED, "--budget", "50%"),
        (*ASKED, "--time-limit", "3"),
        ("plan", "gpt2", "--device", "a100-40g"),
        ("plan", "gpt2-medium", "--device", "h100"),
        base,
    ):
        before = len(solved)
        assert out(capsys, *arguments) == out(capsys, *arguments)
        assert len(solved) == before + 1, arguments
    changes = (
        lambda: config.write_text('{"model_type": "gpt2", "n_layer": 3}'),
        lambda: machine_of_spec(find_device("a100-40g")).save(machine),
        lambda: monkeypatch.setattr(answers, "sources_digest", lambda: "other code"),
        lambda: monkeypatch.setattr(answers.importlib.metadata, "version", lambda name: "99"),
        lambda: monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1"),
    )
    for change in changes:
        before = len(solved)
        change()
        out(capsys, *base)
        assert len(solved) == before + 1


def test_answers_on_clusters_are_kept(
    fresh_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Until an option, the cluster's file or a measurement changes; the plan that is saved is the first one's."""
    asked: list[Request] = []
    stage = Stage(node="l40s-48g-1", gpu="l40s-48g", tp=1, first=0, last=13)
    pipeline = Pipeline(stages=(stage,), micro_batch=1, micro_batches=8)
    made = ClusterPlan(model="gpt2", pipelines=(pipeline,), planner="a test", iteration_s=2.0)

    def answer(request: Request) -> tuple[str, ClusterPlan]:
        asked.append(request)
        return f"planned {len(asked)}", made

    monkeypatch.setattr(command, "plan_for_cluster", answer)
    file, costs = tmp_path / "cluster.json", tmp_path / "costs"
    nodes = [{"gpu": "l40s", "gpus": 2}]
    file.write_text(json.dumps({"schema_version": 1, "nodes": nodes}))
    costs.mkdir()
    (costs / "layers.json").write_text("{}")
    base = ("plan", "gpt2", "--cluster", str(file))
    saved = tmp_path / "plan.json"
    questions = (
        base,
        ("plan", "gpt2", "--cluster", "2xL40S"),
        (*base, "--objective", "cost"),
        (*base, "--solver", "scip"),
        (*base, "--costs", str(costs)),
    )
    for number, arguments in enumerate(questions, 1):
        assert out(capsys, *arguments) == out(capsys, *arguments, "--save", str(saved)) == f"planned {number}\n"
        assert ClusterPlan.load(saved) == made
    file.write_text(json.dumps({"schema_version": 1, "nodes": [*nodes, {"gpu": "h20", "gpus": 1}]}))
    assert out(capsys, *base) == "planned 6\n"
    (costs / "layers.json").write_text("[]")
    assert out(capsys, *questions[-1]) == "planned 7\n"
    assert out(capsys, *base, "--plot", str(tmp_path / "x.svg")) != out(
        capsys, *base, "--plot", str(tmp_path / "x.svg")
    )


def test_a_damaged_answer_is_none(
    solved: list[argparse.Namespace], fresh_cache: Path, capsys: pytest.CaptureFixture[str]
):
    out(capsys, *ASKED)
    (file,) = (fresh_cache / "answer").iterdir()
    good = file.read_text()
    for bad in (good.replace("solved in", "sowed in"), good[:-20], "", json.dumps({**json.loads(good), "version": 0})):
        file.write_text(bad)
        before = len(solved)
        assert out(capsys, *ASKED).startswith("solved in ") and len(solved) == before + 1
        assert out(capsys, *ASKED) and len(solved) == before + 1, "it was written again"


def test_what_cannot_be_told_from_the_question_is_not_kept(
    solved: list[argparse.Namespace],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    factory = ("plan", f"{tmp_path / 'models.py'}:make", "--device", "h100")
    plotted = (*ASKED, "--sweep", "budget", "--plot", str(tmp_path / "x.png"))
    for arguments in (factory, plotted):
        before = len(solved)
        assert out(capsys, *arguments) != out(capsys, *arguments)
        assert len(solved) == before + 2

    def refuse(*_: object) -> Answer:
        raise InfeasiblePlanError("no plan fits", smallest_budget_bytes=None)

    with monkeypatch.context() as patch:
        patch.setattr(planning, "answer", refuse)
        assert cli.main(ASKED) == cli.main(ASKED) == 2
    assert out(capsys, *ASKED).startswith("solved in ")
