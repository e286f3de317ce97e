"""The ``autohete`` command: what it prints, and that every mistake is one line on standard error and status 2."""

import gc
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from autohete_fx import cli
from autohete_fx.commands import doctor
from autohete_fx.ir import BlockDecision, Machine, Params, Plan
from autohete_fx.machine import measure
from autohete_fx.optim.adamw import mixed_step
from autohete_fx.report import plan_table
from autohete_fx.report.why import why
from tests.planner_problems import MACHINE

PLAN = Plan(
    labels=("a", "b"), decisions=(BlockDecision(), BlockDecision(params=Params.HOST)), step_s=0.5, peak_bytes=2**30
)


def test_show_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    PLAN.save(tmp_path / "plan.json")
    assert cli.main(["show", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr()
    assert shown.out == plan_table(PLAN) + "\n" and shown.err == ""
    assert cli.main(["show", "--explain", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == f"{plan_table(PLAN)}\n\n{why(PLAN)}\n"


def test_a_plan_of_a_model_by_name_says_at_once_that_it_needs_transformers(capsys: pytest.CaptureFixture[str]):
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert cli.main(["plan", "llama-2-7b", "--device", "rtx4090"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "pip install transformers" in printed.err and printed.err.count("\n") == 1


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_plan_that_cannot_be_shown_is_one_line_that_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = json.loads(PLAN.to_json()) | {"schema_version": 99}
    for path, reason in (
        (str(tmp_path / "absent.json"), "No such file"),
        (str(tmp_path), "Is a directory"),
        (write(tmp_path, "broken.json", "{"), "not a plan file"),
        (write(tmp_path, "other.json", json.dumps(other)), "schema version 99"),
        (write(tmp_path, "damaged.json", PLAN.to_json().replace('"host"', '"moon"')), "'moon'"),
    ):
        assert cli.main(["show", path]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and reason in shown.err and path in shown.err
        assert shown.err.startswith("autohete: ") and shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["show"],
        ["dance"],
        ["doctor", "--device", "abacus"],
        ["plan", "gpt2", "--device", "h100", "--batch", "two"],
        ["plan", "gpt2", "--device", "h100", "--batch", "0"],
        ["plan", "gpt2", "--device", "h100", "--ranks", "65537"],
        *(
            ["plan", "gpt2", "--device", "h100", "--time-limit", seconds]
            for seconds in ("0", "-1", "nan", "inf", "soon")
        ),
    ],
)
def test_wrong_usage_is_explained(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    shown = capsys.readouterr()
    assert caught.value.code == 2 and shown.out == "" and "usage: autohete" in shown.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "gpt2", "--cluster", ""],
        ["plan", "gpt2", "--machine", ""],
        ["plan", "gpt2", "--device", "h100", "--save", ""],
        ["plan", "gpt2", "--device", "h100", "--sweep", "budget", "--plot", ""],
        ["doctor", "--save", ""],
        ["doctor", "--cluster", ""],
        ["doctor", "--offload-dir", ""],
        ["run", "--leave", "", "absent.py"],
    ],
)
def test_an_empty_name_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert cli.main(arguments) == 2
    shown, option = capsys.readouterr(), arguments[arguments.index("") - 1]
    assert f"{option} '' was given. Expected was a name" in shown.err and shown.err.count("\n") == 1


def test_a_plan_says_why_it_cannot_be_saved_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for path, reason in ((tmp_path, "it is a directory"), (tmp_path / "absent" / "x.json", "its directory does not")):
        assert cli.main(["plan", "gpt2", "--device", "h100", "--save", str(path)]) == 2
        shown = capsys.readouterr()
        assert f"cannot write {str(path)!r}: {reason}" in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (["report", "{}"], ("no report.json can be found", "no report.json can be found")),
        (["compare", "{}", "{}"], ("neither a plan file nor", "neither a plan file nor")),
        (["plan", "{}.py:make", "--device", "h100"], ("is no file that can be found", "is no file that can be found")),
        (
            ["plan", "gpt2", "--device", "h100", "--save", "{}"],
            ("cannot write .*: file name too long", "cannot write .*: permission denied"),
        ),
        (
            ["plan", "gpt2", "--device", "h100", "--sweep", "budget", "--plot", "{}"],
            ("cannot write .*: file name too long", "cannot write .*: permission denied"),
        ),
        (["doctor", "--save", "{}"], ("cannot write .*: file name too long", "cannot write .*: permission denied")),
        (
            ["doctor", "--device", "cpu", "--offload-dir", "{}"],
            ("no file can be made: File name too long", "no file can be made: Permission denied"),
        ),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_told_in_a_line(
    arguments: list[str],
    reasons: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    shut, stat = tmp_path / "shut", os.stat

    def searched(path: Any, **how: Any) -> os.stat_result:
        if str(path).startswith(f"{shut}/"):
            raise PermissionError(13, "Permission denied")
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", searched)
    for path, reason in zip((tmp_path / ("x" * 5000), shut / "x"), reasons, strict=True):
        assert cli.main([each.format(path) for each in arguments]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and re.search(reason, shown.err) and shown.err.count("\n") == 1


def test_a_budget_that_the_device_has_not_is_refused_before_anything_is_traced(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["plan", "gpt2", "--device", "rtx-4090", "--budget", "200GiB"]) == 2
    shown = capsys.readouterr()
    assert (
        shown.out == "" and "--budget 200GiB was given, but" in shown.err and "24.0 GiB of device memory" in shown.err
    )


def test_versions_are_those_of_the_package_and_of_pytorch(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    project = tomllib.loads((Path(cli.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"autohete {project['version']} (torch {torch.__version__.partition('+')[0]}"
    )


@pytest.mark.slow
def test_the_command_ends_without_a_traceback(tmp_path: Path):
    """As a user runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "autohete_fx", "show", str(tmp_path / "absent.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("autohete: cannot read the plan file"), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("fresh_cache")
def test_doctor_prints_what_was_measured_saves_it_and_lets_compilations_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    machine = Machine(
        device_name="Abacus",
        device_type="cpu",
        device_bytes=8 * 2**30,
        host_bytes=2**40,
        disk_bytes=0,
        device_flops_per_s=(("float32", 1.5e12),),
        device_bytes_per_s=10 * 2**30,
        h2d_bytes_per_s=2**30,
        d2h_bytes_per_s=2**29,
        disk_bytes_per_s=0.0,
        device_update_params_per_s=7e8,
        host_update_params_per_s=5e8,
        latency_s=2e-6,
        mixed_update_speed=0.5,
    )
    asked = []

    def measured(device: object, *, offload_dir: str | None, mixed_step: object, num_ranks: int) -> Machine:
        asked.append((str(device), offload_dir, mixed_step))
        assert num_ranks == 1
        return machine

    monkeypatch.setattr(doctor, "measure_machine", measured)
    there = ["--offload-dir", str(tmp_path)]
    assert cli.main(["doctor", "--device", "cpu", "--save", str(tmp_path / "machine.json"), *there]) == 0
    assert Machine.load(tmp_path / "machine.json") == machine
    out = capsys.readouterr().out
    rows = {tuple(line.split("  ")[1:2]): line.split()[-2:] for line in out.splitlines() if line.startswith("  ")}
    assert asked == [("cpu", str(tmp_path), mixed_step)] and "Abacus (cpu)" in out
    monkeypatch.setattr(measure, "measure_machine", lambda *args, **kwargs: replace(machine, mixed_update_speed=0.0))
    monkeypatch.setattr("torch.get_num_threads", lambda: 17)  # those of a job by torchrun are others
    assert measure.load_or_measure_machine(torch.device("cpu")).mixed_update_speed == 0.5
    assert rows["device memory",] == ["8.00", "GiB"] and rows["host memory",] == ["1.00", "TiB"]
    assert rows["matmul, float32",] == ["1.50", "TFLOP/s"]
    assert rows["copy to device, bandwidth",] == ["1.00", "GiB/s"]
    assert rows["copy to host, bandwidth",] == ["512", "MiB/s"]
    assert rows["AdamW on the host",] == ["M", "parameters/s"] and "500 M" in out
    assert rows["AdamW on the host, 16 bits",] == ["M", "parameters/s"] and "250 M" in out
    assert rows["latency of a transfer",] == ["2.00", "us"]
    assert "disk" not in out  # there is none below a CPU device's
    assert "both ways at once           not applicable" in out
    assert cli.main(["doctor", "--offload-dir", str(tmp_path / "nowhere")]) == 2
    assert "offload_dir" in capsys.readouterr().err
    asked.clear()
    assert cli.main(["doctor", "--save", str(tmp_path)]) == 2
    assert "it is a directory; give --save a file" in capsys.readouterr().err
    assert cli.main(["doctor", "--save", str(tmp_path / "absent" / "machine.json")]) == 2
    assert "its directory does not exist" in capsys.readouterr().err and not asked, "said before anything is measured"


@pytest.mark.usefixtures("fresh_cache")
def test_doctor_of_ranks_lists_updates_beside_copies_as_the_first_one_timed_them_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    alone = replace(MACHINE, contention=(("update", "h2d", 0.51), ("h2d", "update", 0.92), ("h2d", "d2h", 0.81)))
    first = SimpleNamespace(number=0, exchange=lambda value: [value])
    asked: list[Any] = []

    def measured(device: torch.device, **how: Any) -> Machine:
        asked.append(how["num_ranks"])
        return alone

    monkeypatch.setattr(doctor, "ranks_of_job", lambda device_type: first)
    monkeypatch.setattr(doctor, "ranks_sharing_cores", lambda: 8)
    monkeypatch.setattr(doctor.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(doctor, "measure_machine", measured)
    monkeypatch.setattr(doctor, "link_of", lambda device: None)
    monkeypatch.setattr(doctor, "measure_net", lambda ranks, device, exchange: (1e9, 1e-5))
    monkeypatch.setattr(doctor, "measure_net_contention", lambda ranks, device, exchange: (("h2d", "d2h", 0.73),))
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines() if " beside " in line]
    assert [(*words[:3:2], words[3]) for words in listed] == [
        ("update", "h2d", "51%"),
        ("h2d", "update", "92%"),
        ("h2d", "d2h", "73%"),
    ]
    assert asked == [8], "a machine has the rate of all of its ranks' updates together"


def test_doctor_needs_the_device_that_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["doctor", "--device", "cuda"]) == 2
    assert "PyTorch finds no CUDA device; leave it out" in capsys.readouterr().err


def test_a_process_of_a_plan_collects_no_garbage_and_others_do(monkeypatch: pytest.MonkeyPatch):
    collects: list[bool] = []
    ended: list[int] = []
    monkeypatch.setattr(cli, "main", lambda **_: collects.append(gc.isenabled()) or 3)
    monkeypatch.setattr(os, "_exit", ended.append)
    try:
        for subcommand in ("plan", "run", "doctor"):
            monkeypatch.setattr(sys, "argv", ["autohete", subcommand])
            assert cli.command() == 3
            gc.enable()
    finally:
        gc.enable()
    assert collects == [False, True, True] and ended == [3]


def answered(*arguments: str, size: int = 2**20, closed: int | None = None, **streams: Any) -> tuple[int, str, str]:
    """The status, output and errors of a command in a process of its own, whose answer is so long. ``closed``: a descriptor."""
    code = (
        "import sys; from autohete_fx import cli; size = int(sys.argv.pop());"
        " cli._plan = cli._show = lambda parsed: 'x' * size; sys.exit(cli.command())"
    )
    shell = '"$@"' if closed is None else f'"$@" {closed}>&-'
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", code, *arguments, str(size)]
    ended = subprocess.run(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **streams})
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("arguments", [("plan", "gpt2", "--device", "h100"), ("show", "x")])
def test_a_command_whose_reader_has_gone_ends_without_a_traceback(arguments: tuple[str, ...]):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        status, _, errors = answered(*arguments, stdout=writing)
    finally:
        os.close(writing)
    assert (status, errors) == (1, "")


@pytest.mark.parametrize("size", [9, 2**20])
def test_a_command_whose_output_is_full_says_so_in_a_line(size: int):
    with open("/dev/full", "w") as full:
        status, _, errors = answered("show", "x", size=size, stdout=full)
    assert status == 1 and errors.startswith("autohete: cannot write the answer: No space") and errors.count("\n") == 1


def test_a_command_says_nothing_to_what_is_closed():
    assert answered("show", "x", closed=1) == (0, "", "")
    assert answered("plan", "gpt2", "--device", "h100", "--save", "", closed=2) == (2, "", "")
