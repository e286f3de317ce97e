"""The suite that compares systems on a GPU, with processes that are told how to end: what it runs, keeps, repeats and reports."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

Row = dict[str, Any]
FLAGS = ["--dry", "--sizes", "1b", "2b", "3b", "--caps", "full", "--batches", "4", "--clip", "off"]


@pytest.fixture(scope="module")
def suite_module(benchmarks: Path) -> Any:
    """`gpu_suite`, which is a script beside its modules."""
    import gpu_suite  # pyright: ignore[reportMissingImports]

    return gpu_suite


def level(case: Any, name: str, step_s: float = 1.0) -> Row:
    shares = {
        "optimizer": 0.0,
        "streamed": 0.0,
        "params": 0.0,
        "fetched_once": 0.0,
        "activation_bytes": 0,
        "recompute": 0.0,
    }
    figures = {"step s": step_s, "tokens/s": 128 / step_s, "peak bytes": 2**20, "losses": [2.0, 1.0], "first step": 0}
    return {"outcome": "fits", "level": name, "micro batches": case.micro_batches, "shares": shares, **figures}


class Processes:
    """Calls ``run(case, limit_s)`` in the place of a process, and notes what was asked."""

    def __init__(self, folder: Path, run: Callable[[Any, float], Any]) -> None:
        self.caches = folder
        self.asked: list[Any] = []
        self._run = run

    def run(self, case: Any, limit_s: float) -> tuple[list[Row], tuple[str, str]]:
        self.asked.append(case)
        return ([], ("failed", "no doctor here")) if case == "machine" else self._run(case, limit_s)


def all_levels(case: Any, limit_s: float) -> tuple[list[Row], tuple[str, str]]:
    return [level(case, name) for name in case.levels], ("", "")


@pytest.fixture
def new_suite(suite_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    def made(*words: str, run: Callable[[Any, float], Any] = all_levels) -> Any:
        monkeypatch.setattr(sys, "argv", ["gpu_suite.py", *FLAGS, "--json", str(tmp_path / "gpu.json"), *words])
        arguments: argparse.Namespace = suite_module.parsed(None)
        return suite_module.Suite(arguments, Processes(tmp_path, run))

    return made


def kept(tmp_path: Path) -> Row:
    return json.loads((tmp_path / "gpu.json").read_text())["rows"]


def test_an_error_in_a_part_costs_that_part_alone_and_is_kept(
    new_suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def run(case: Any, limit_s: float) -> Any:
        if case.batch == 1:
            raise ZeroDivisionError("a bug of the suite's")
        return all_levels(case, limit_s)

    suite = new_suite("--parts", "compare", "largest", "--systems", "ours", "compile", run=run)
    suite.run()
    suite.finish()
    rows = kept(tmp_path)
    assert [broken["part"] for broken in rows["broken"]] == ["largest"]
    assert "a bug of the suite's" in rows["broken"][0]["error"]
    assert len(rows["compare"]) == 6 and rows["machine"][0]["reason"] == "no doctor here"


def test_what_the_end_of_time_cut_short_is_no_result_and_comes_again(new_suite: Any, tmp_path: Path):
    def late(case: Any, limit_s: float) -> Any:
        """The first system has all its levels; the second one of them, the third none."""
        if case.system == "ours":
            return all_levels(case, limit_s)
        return ([level(case, "full")] if case.system == "compile" else []), ("out of time", "not done")

    words = ["--parts", "compare", "--sizes", "1b", "--systems", "ours", "compile", "fsdp2"]
    suite = new_suite(*words, "--minutes", "1", "--case-minutes", "2", run=late)
    suite.run()
    suite.finish()
    rows = kept(tmp_path)
    assert [(row["name"], bool(row.get("is unfinished"))) for row in rows["compare"]] == [
        ("ours", False),
        ("compile", True),
    ]
    assert len(rows["left out"]) == 2
    again = new_suite(*words, "--resume")
    again.run()
    again.finish()
    assert {case.system for case in again.processes.asked if case != "machine"} == {"compile", "fsdp2"}
    assert {row["name"] for row in kept(tmp_path)["compare"]} == {"ours", "compile", "fsdp2"}
    assert not any(row.get("is unfinished") for row in kept(tmp_path)["compare"]) and not kept(tmp_path)["left out"]


def test_a_process_that_took_all_its_own_time_has_failed(new_suite: Any, tmp_path: Path):
    words = ["--parts", "compare", "--sizes", "1b", "--systems", "ours"]
    suite = new_suite(*words, run=lambda case, limit_s: ([], ("out of time", f"not done after {limit_s:.0f} s")))
    suite.run()
    suite.finish()
    (row,) = kept(tmp_path)["compare"]
    assert (row["outcome"], row["reason"]) == ("out of time", "not done after 240 s") and not row.get("is unfinished")


def test_rows_of_a_system_may_be_taken_again(new_suite: Any, tmp_path: Path):
    words = ["--parts", "compare", "--sizes", "1b", "--systems", "ours", "compile"]
    new_suite(*words).run()
    suite = new_suite(*words, "--resume", "--again", "ours")
    suite.run()
    assert [case.system for case in suite.processes.asked if case != "machine"] == ["ours"]
    assert [row["name"] for row in kept(tmp_path)["compare"]] == ["ours", "compile"]


def test_what_does_not_fit_is_tried_with_more_micro_batches_but_not_where_states_alone_are_too_much(new_suite: Any):
    def run(case: Any, limit_s: float) -> Any:
        fits = [level(case, name) for name in case.levels[: case.micro_batches]]
        return fits, ("", "") if len(fits) == len(case.levels) else ("does not fit", "out of memory")

    suite = new_suite("--parts", "compare", "--sizes", "1b", "--systems", "fsdp2", "compile", "--caps", "6", run=run)
    suite.run()
    asked = [(case.system, case.micro_batches, case.levels) for case in suite.processes.asked if case != "machine"]
    assert asked == [("fsdp2", 1, ("full", "selective", "none")), ("fsdp2", 2, ("selective", "none"))]
    rows = {row["name"]: row for row in suite.rows["compare"]}
    assert rows["compile"]["outcome"] == "does not fit" and "states alone take" in rows["compile"]["reason"]


def leaving_plans(case: Any, limit_s: float) -> tuple[list[Row], tuple[str, str]]:
    """As a process of ours does."""
    for kind in (
        ("planned", "three-integers") if case.system.startswith("ours") and case.folder and not case.plan else ()
    ):
        sys.modules["systems.base"].file_of(case, kind).touch()
    return all_levels(case, limit_s)


def test_schedules_that_one_compilation_serves_share_a_process(new_suite: Any, tmp_path: Path):
    """The second schedule of a replay does not come to its end."""

    def run(case: Any, limit_s: float) -> Any:
        if not case.plan and case.micro_batches < 2:
            return [], ("does not fit", "out of memory")
        found, problem = leaving_plans(case, limit_s)
        return (found[:1], ("failed", "it died")) if case.plan and len(found) > 1 else (found, problem)

    suite = new_suite("--parts", "compare", "ablation", "--sizes", "1b", "--systems", "ours-backward", "ours", run=run)
    suite.run()
    asked = [case for case in suite.processes.asked if case != "machine"]
    assert [len(case.levels) for case in asked] == [1, 1, 3, 3, 1, 2, 1, 1]
    assert all(case.micro_batches == 2 for case in asked[4:])
    assert {Path(case.plan).name.split("_")[0] for case in asked[4:]} == {"ours"}, "one plan under all schedules"
    outcomes = {row["name"]: row["outcome"] for row in suite.rows["ablation"]}
    assert len(outcomes) == 8 and [name for name, what in outcomes.items() if what == "failed"] == [
        "three-integers, next forward, as gradients came"
    ]


def test_the_ablation_alone_trains_ours_first_and_no_plan_under_another_clipping(new_suite: Any):
    suite = new_suite("--parts", "ablation", "--sizes", "1b", "--clip", "off", "on", run=leaving_plans)
    suite.run()
    asked = [(case.clip, bool(case.plan)) for case in suite.processes.asked]
    assert asked == [*[(False, False)], *[(False, True)] * 4, (True, False), (True, True)]
    rows = {(row["clip"], row["name"]): row for row in suite.rows["ablation"]}
    assert len(rows) == 16 and rows[True, "from backward on, by priority"]["outcome"] == "cannot run"
    assert rows[True, "three-integers, next forward, by priority"]["outcome"] == "fits"


def test_nine_minutes_of_the_default_selection_have_a_comparison_and_the_ablation(
    new_suite: Any, suite_module: Any, monkeypatch: pytest.MonkeyPatch
):
    """By the time that processes of the first setting take with real graphs and kernels where no kernel is launched, on one core,
    and steps of a second. Nothing of it was measured on a GPU."""
    now, began = [0.0], {"machine": 20.0, "ours": 60.0, "fsdp2": 40.0}

    def run(case: Any, limit_s: float) -> Any:
        steps = len(case.levels) * (case.warm_up + case.steps)
        seconds = began.get(case.system, 50.0) + steps
        now[0] += min(seconds, limit_s)
        return leaving_plans(case, limit_s) if seconds <= limit_s else ([], ("out of time", "not done"))

    monkeypatch.setattr(
        sys.modules["systems.base"].importlib.util, "find_spec", lambda name: None if name == "deepspeed" else name
    )
    suite = new_suite(run=run)
    suite.arguments.__dict__.update(sizes=None, caps=None, batches=None, clip=None, dry=False)
    suite.clock = suite_module.Clock(minutes=8.5, case_minutes=4, now_s=lambda: now[0])
    suite.run()
    compared = [(row["size"], row["name"]) for row in suite.rows["compare"] if row["outcome"] == "fits"]
    assert compared[:2] == [("1b", "ours"), ("1b", "fsdp2")] and len(compared) > 2
    replayed = {row["name"] for row in suite.rows["ablation"] if row["outcome"] == "fits"}
    assert replayed >= {*suite_module.SCHEDULES} - {"from backward on, as gradients came"}
    assert replayed >= {"three-integers, next forward, by priority", "three-integers, next forward, as gradients came"}
    assert now[0] <= 510


@pytest.mark.parametrize(("fitting", "largest"), [(("1b", "2b"), "2b"), ((), None), (("1b", "2b", "3b"), "3b")])
def test_the_largest_model_is_bisected(new_suite: Any, fitting: tuple[str, ...], largest: str | None):
    def run(case: Any, limit_s: float) -> Any:
        return all_levels(case, limit_s) if case.size in fitting else ([], ("does not fit", "out of memory"))

    words = ["--parts", "largest", "--systems", "ours", "--caps", "6"]
    late = new_suite(*words, "--minutes", "1", "--case-minutes", "2", run=lambda *_: ([], ("out of time", "not done")))
    late.run()
    assert not late.rows["largest"] and late.left_out, "what is found in time only is no bound"
    suite = new_suite(*words, run=run)
    suite.run()
    (row,) = suite.rows["largest"]
    assert row["largest"] == largest and len(row["probes"]) == 2
    assert (row["states over cap"] is None) == (largest is None)


def test_no_part_takes_the_time_of_those_after_it(new_suite: Any, suite_module: Any):
    """A clock that every process puts forward by a hundred seconds, of twenty minutes, which comparisons alone would take."""
    now = [0.0]

    def run(case: Any, limit_s: float) -> Any:
        now[0] += min(100.0, limit_s)
        return all_levels(case, limit_s) if limit_s >= 100 else ([], ("out of time", "not done"))

    suite = new_suite("--parts", "compare", "largest", "--systems", "ours", "fsdp2", "--caps", "6", "12", run=run)
    suite.clock = suite_module.Clock(minutes=20, case_minutes=3, now_s=lambda: now[0])
    suite.run()
    parts = ["largest" if case.batch == 1 else case.size for case in suite.processes.asked if case != "machine"]
    assert parts[0] == "1b" and parts.index("largest") == 8, parts
    assert suite.rows["largest"], "two fifths of what the first comparison left were for others"
    assert now[0] == 1200 and suite.left_out, "no process began that had no time to end"


@pytest.mark.parametrize("clip", ["off", "on"])
def test_what_is_known_to_be_impossible_starts_no_process(
    new_suite: Any, suite_module: Any, monkeypatch: pytest.MonkeyPatch, clip: str
):
    monkeypatch.setattr(sys.modules["systems.base"].importlib.util, "find_spec", lambda name: None)
    names = ["ours", "ours-backward", "torchao", "zero-3"]
    suite = new_suite("--parts", "compare", "--sizes", "1b", "--systems", *names, "--clip", clip)
    suite.run()
    trained = {case.system for case in suite.processes.asked if case != "machine"}
    assert trained == {"ours", "ours-backward"} if clip == "off" else {"ours"}
    reasons = {row["name"]: row["reason"] for row in suite.rows["compare"] if row["outcome"] == "cannot run"}
    assert reasons.keys() == set(names) - trained and "deepspeed is not installed" in reasons["zero-3"]


def test_streamed_states_are_copied_both_ways_and_not_updated_by_the_cpu(suite_module: Any):
    """A tenth of a second each way, where the link carries 12 bytes of all parameters in one."""
    case = sys.modules["systems"].Case(system="ours", size="1b", dry=True)
    rate = 12 * case.num_params
    machine = SimpleNamespace(flops_per_s=lambda _: 1e30, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
    trial = level(case, "next forward, by priority")
    trial["shares"]["streamed"] = 0.1
    lanes = sys.modules["gpu_report"].roofline(case, trial, machine, 1e30)
    assert lanes["h2d"] == lanes["d2h"] == pytest.approx(0.1) and lanes["update"] == 0


def test_goals_are_told_beside_what_was_reached(suite_module: Any):
    case = sys.modules["systems"].Case(system="ours", size="1b", cap_gb=12.0)
    machine = SimpleNamespace(
        flops_per_s=lambda _: 1e14, h2d_bytes_per_s=1e12, d2h_bytes_per_s=1e12, device_bytes=80 * 10**9
    )
    report = sys.modules["gpu_report"]
    fitting = dataclasses.replace(case, cap_gb=None)

    def rows(case: Any, ours_s: float, theirs_s: float) -> list[Row]:
        found = []
        for name, step_s in (("ours", ours_s), ("fsdp2", theirs_s)):
            row = {"system": name, "name": name, "best": level(case, "full", step_s)}
            report.add_roofline(row, case, machine, 1e12)
            found.append(row)
        return found

    least_s = rows(case, 1.0, 1.0)[0]["roofline s"]["compute"]
    assert report.goals(rows(case, least_s / 0.95, 2 * least_s)) == "1.9x reached, 90% of the roofline reached"
    assert report.goals(rows(case, least_s / 0.8, 2 * least_s)) == "1.9x missed, 90% of the roofline missed"
    assert report.goals(rows(fitting, least_s / 0.8, 2 * least_s)) == "1x reached, 90% of the roofline missed"
    assert report.goals(rows(case, 1.0, 1.0)[1:]) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", "ours-backward"])
def test_ours_collects_gradients_of_all_micro_batches_but_the_last(suite_module: Any, name: str):
    """Else updates that start in backward would start in the first one's."""
    systems, seen = sys.modules["systems"], []
    kind = systems.system_class(name)
    system = kind(systems.Case(system=name, size="1b", micro_batches=3, levels=kind.levels, dry=True))

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(system.optimizer._is_accumulating)
        return next(system.model.parameters()).sum()

    system.loss_of = loss_of
    system.train(*torch.zeros(2, 6, 32, dtype=torch.int64))
    assert seen == [True, True, False]


def test_the_last_part_that_is_asked_for_has_all_the_time_that_is_left(new_suite: Any, suite_module: Any):
    limits: list[float] = []

    def run(case: Any, limit_s: float) -> Any:
        limits.append(limit_s)
        return all_levels(case, limit_s)

    suite = new_suite("--parts", "machine", "compare", "--sizes", "1b", "--systems", "ours", run=run)
    suite.clock = suite_module.Clock(minutes=4, case_minutes=4, now_s=lambda: 0.0)
    suite.run()
    assert limits == [240]


def test_no_process_begins_in_less_time_than_any_took(suite_module: Any):
    now = [0.0]
    clock = suite_module.Clock(minutes=10, case_minutes=4, now_s=lambda: now[0])
    clock.note(90)
    clock.note(120)
    now[0] = 520
    assert clock.is_over and not suite_module.Clock(minutes=10, case_minutes=1, now_s=lambda: now[0]).is_over
    clock.note(70)
    assert not clock.is_over


def test_the_summary_has_a_line_for_each_setting(new_suite: Any, capsys: pytest.CaptureFixture[str]):
    def run(case: Any, limit_s: float) -> Any:
        return [level(case, name, 0.5 if case.system == "ours" else 1.0) for name in case.levels], ("", "")

    suite = new_suite("--parts", "compare", "--sizes", "1b", "2b", "--systems", "ours", "compile", run=run)
    suite.run()
    capsys.readouterr()
    suite.finish()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "whole device" in line]
    assert len(lines) == 2 and all("2.00x" in line and "2" in line[-3:] for line in lines)


def test_what_was_predicted_of_ours_stands_beside_what_was_measured(new_suite: Any, capsys: pytest.CaptureFixture[str]):
    figures = {"predicted step s": 0.5, "predicted peak bytes": 2**20, "pinning s": 0.1, "waiting for homes s": 0.0}

    def run(case: Any, limit_s: float) -> Any:
        first, *others = (level(case, name) for name in case.levels)
        return [{**first, **figures, "lanes": "h2d idles"}, *({**other, "lanes": "-"} for other in others)], ("", "")

    new_suite("--parts", "compare", "--sizes", "1b", "--systems", "ours", run=run).run()
    text = capsys.readouterr().out
    assert "ours, next forward, by priority: step 1.00 s, predicted 500 ms; peak 1.00 MiB" in text
    assert "h2d idles\nnext forward, as gradients came: step 1.00 s\ninside step(): step 1.00 s\n" in text
