"""A job's log as text and as a page: what was trained, by whom, what was read from where, and what it cost."""

import json
from pathlib import Path
from typing import Any

import pytest

from autohete_fx import cli
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.cluster.report.history import Change, facts, read_history
from autohete_fx.cluster.report.history_page import history_page
from autohete_fx.errors import ClusterError


def joined(at: float, step: int, agents: str, plan_of: int, **num_bytes: int) -> dict[str, Any]:
    stages = tuple(
        Stage(node=f"n{i}", gpu="x", tp=1, first=i, last=i if i + 1 < plan_of else 3) for i in range(plan_of)
    )
    plan = ClusterPlan(model="net", pipelines=(Pipeline(stages=stages, micro_batch=2, micro_batches=4),))
    members = [[f"n{i}", "x"] for i in range(len(agents))]
    read = {"local": 0, "peer": 0, "cloud": 0, **num_bytes}
    return {
        **{"event": "join", "time_s": at, "seconds": 2.0, "step": step, "members": members, "agents": list(agents)},
        **{"sample_tokens": 16, "plan": plan.to_json(), "bytes": read},
    }


def trained(at: float, step: int) -> dict[str, Any]:
    return {"event": "step", "time_s": at, "step": step, "loss": 4.0 - step / 10, "seconds": 1.0}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two GPUs for 98 s; one is told to leave, the other goes on for 50 s; it is replaced by two others."""
    rows = [
        joined(102.0, 0, "ab", 2),
        *(trained(103.0 + step, step) for step in range(3)),
        {"event": "save", "time_s": 105.5, "local": 2, "cloud": -1},
        {"event": "leave", "time_s": 106.0, "step": 3, "nodes": ["n1"], "peer_bytes": 2048},
        joined(200.0, 3, "a", 1, local=1024, peer=2048),
        *(trained(201.0 + step, 3 + step) for step in range(4)),
        joined(250.0, 5, "cd", 2, cloud=4096),
        trained(252.0, 5),
        {"event": "finish", "time_s": 298.0, "local": 6, "cloud": 6},
    ]
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"event": "step", "ti')
    return path


def test_a_history_counts_what_happened(log: Path):
    found = read_history(log)
    assert found.changes == [Change(told=1, vanished=0, joined=0), Change(told=0, vanished=1, joined=2)]
    assert [start.step for start in found.starts] == [0, 3, 5] and found.starts[0].handed_over == 2048
    assert len(found.steps) == 8 and found.repeated == 1
    assert found.tokens == 7 * 8 * 16, "a step that was trained again counts once"
    assert found.read == {"local": 1024, "peer": 2048, "cloud": 4096} and found.saved == {"local": 6, "cloud": 6}
    assert [found.recovery_s(index) for index in range(3)] == [None, 96.0, 48.0]
    assert found.gpu_hours() == {"x": pytest.approx((2 * 98 + 50 + 2 * 50) / 3600)}
    assert found.dollars({"x": 36.0}) == pytest.approx(3.46) and found.dollars({"y": 1.0}) is None


def test_report_draws_a_page_of_a_jobs_log(log: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["report", str(log), "--price", "x=36"]) == 0
    shown, page = capsys.readouterr().out, log.with_suffix(".html").read_text()
    assert str(log.with_suffix(".html")) in shown
    for words in (
        "2 nodes (1 told, 1 vanished); 2 joined",
        "$3.46",
        "7 in 3 min 18 s",
        "1 trained again",
        "cloud 4.00 KiB",
    ):
        assert words in shown and words in page, (words, shown)
    assert page.count('class="began"') == 2 * 2 and "1 told to leave" in page
    assert cli.main(["report", str(log)]) == 0
    assert "unknown, since x has no price" in capsys.readouterr().out


def test_a_job_is_summed_up_where_its_page_cannot_be_written(log: Path, capsys: pytest.CaptureFixture[str]):
    log.with_suffix(".html").mkdir()
    assert cli.main(["report", str(log)]) == 2
    said = capsys.readouterr()
    assert "2 nodes (1 told, 1 vanished)" in said.out
    assert said.err.startswith("autohete: the report cannot be written to") and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "nothing yet"),
        ([{"event": "save", "time_s": 103.0, "local": -1, "cloud": -1}], "nothing yet"),
        ([{"event": "save", "time_s": 103.0, "local": 8, "cloud": -1}], "step 8 on disks, none in the cloud"),
        ([{"event": "finish", "time_s": 103.0, "local": -1, "cloud": 0}], "none on disks, step 0 in the cloud"),
    ],
)
def test_a_place_without_a_save_is_told(tmp_path: Path, rows: list[dict[str, Any]], words: str):
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(map(json.dumps, [joined(102.0, 0, "ab", 2), *rows])))
    found = read_history(path)
    assert facts(found, {})["saved"] == words and words in history_page(found, {})


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([float("nan"), 4.0, float("inf"), 3.0], "2 of 4 steps are left out: their numbers are not finite."),
        ([float("nan"), float("-inf")], "No step has a finite number here."),
    ],
)
def test_losses_that_are_not_finite_are_left_out_of_the_page(tmp_path: Path, losses: list[float], words: str):
    path = tmp_path / "events.jsonl"
    rows = [trained(103.0 + step, step) | {"loss": loss} for step, loss in enumerate(losses)]
    path.write_text("\n".join(map(json.dumps, [joined(102.0, 0, "ab", 2), *rows])))
    page = history_page(read_history(path), {})
    assert page.count(words) == 1 and page.count("not finite") <= 1


def test_bytes_that_are_no_text_are_a_damaged_line(log: Path, capsys: pytest.CaptureFixture[str]):
    whole, rows = read_history(log), log.read_text().splitlines()
    log.write_bytes(b"\x80\x04\xff\n" + log.read_bytes().replace(b"\n", b"\n\xff\xfe{\n", 3))
    assert read_history(log) == whole
    log.write_bytes(bytes(range(256)))
    assert cli.main(["report", str(log)]) == 2
    assert "no line of a job that began" in capsys.readouterr().err
    lacking = next(row for row in rows if '"loss"' in row)
    log.write_bytes(
        "\n".join([*rows[:1], lacking.replace('"loss"', '"lo"'), *rows[1:]]).encode()
        + b'\n{"event": "st\xffep"}\n{"event": [], "time_s": 1}'
    )
    assert read_history(log) == whole
    with pytest.raises(ClusterError, match=r"was given: Is a directory\. Expected was a file"):
        read_history(log.parent)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (None, [], "No such file"),
        ("{}", [], "no line of a job that began"),
        ("{}", ["--price", "x=much"], "Expected was a type of GPU and dollars"),
        ("{}", ["--price", "x=nan"], "Expected was a type of GPU and dollars"),
        ("{}", ["--price", "x=inf"], "Expected was a type of GPU and dollars"),
        (
            json.dumps(joined(0.0, 0, "a", 1)),
            ["--price", "y=1"],
            "Expected was a type of GPU that the job had, of x. Correct",
        ),
    ],
)
def test_logs_and_prices_that_are_none_are_told(
    text: str | None, options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "events.jsonl"
    if text is not None:
        path.write_text(text)
    assert cli.main(["report", str(path), *options]) == 2
    assert words in capsys.readouterr().err
