"""What a card should run first: the commands exist, say what is meant, and fit into ten minutes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autohete_fx import cli
from autohete_fx.commands import doctor
from autohete_fx.errors import OptionError

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "tests" / "cuda" / "FIRST_TEN_MINUTES.md").read_text()
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in GUIDE.splitlines()
    if re.match(r"\| \d+:\d\d \|", line)
]
COMMANDS = [shlex.split(next(cell for cell in row if cell.startswith("`")).strip("`")) for row in ROWS]


def seconds(text: str) -> int:
    minutes, rest = text.split(":")
    return 60 * int(minutes) + int(rest)


def test_each_begins_when_the_last_one_ended_and_all_end_within_ten_minutes():
    timed = [(seconds(row[0]), seconds(row[1])) for row in ROWS if len(row) == 4]
    assert timed and timed[0][0] == 0
    ends = [begin + takes for begin, takes in timed]
    assert [begin for begin, _ in timed[1:]] == ends[:-1] and ends[-1] <= 600


def test_every_command_is_one_that_is_checked_here():
    kinds = {Path(next(word for word in command if not word.startswith("-"))).name for command in COMMANDS}
    assert kinds == {"pytest", "autohete", "python", "compute-sanitizer"} and len(COMMANDS) > 8


def test_benchmarks_understand_their_arguments(benchmarks: Path, monkeypatch: pytest.MonkeyPatch):
    import cuda_truth  # pyright: ignore[reportMissingImports]
    import gpu_selection  # pyright: ignore[reportMissingImports]

    parsers: dict[str, Any] = {
        "gpu_suite.py": lambda: gpu_selection.parsed(None),
        "cuda_truth.py": cuda_truth.parsed,
    }
    asked = [command[1:] for command in COMMANDS if command[0] == "python"]
    for path, *words in asked:
        monkeypatch.setattr(sys, "argv", [path, *words])
        arguments = parsers[Path(path).name]()
        assert (ROOT / path).is_file() and (ROOT / arguments.json).parent.is_dir()
    assert {Path(path).name for path, *_ in asked} == parsers.keys()


def test_the_doctor_saves_where_there_is_a_directory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (words,) = [command[1:] for command in COMMANDS if command[0] == "autohete"]

    def measured(*_: object, **__: object) -> None:
        raise OptionError("here it would measure")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(doctor, "measure_machine", measured)
    assert cli.main(words) == 2 and "here it would measure" in capsys.readouterr().err


_NEXT = "the selection "
_COLLECT = f"""
import contextlib, io, shlex, sys, pytest
for words in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *shlex.split(words)])
    print(f"{_NEXT}{{words}}", f"status {{int(status)}}", printed.getvalue(), sep="\\n")
"""
"""One process for all: its imports take most of the time."""


@pytest.mark.slow
def test_every_selection_of_tests_has_some():
    selections = {tuple(c[c.index("pytest") + 1 :]) for c in COMMANDS if "pytest" in c}
    assert len(selections) == 5
    collected = subprocess.run(
        [sys.executable, "-c", _COLLECT, *map(shlex.join, selections)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for words, status, *lines in (each.splitlines() for each in collected.stdout.split(_NEXT)[1:]):
        assert status == "status 0", (words, lines)
        names = [line for line in lines if line.startswith("tests/cuda/")]
        if "-k" in words:
            assert names == [
                "tests/cuda/test_main_job_cuda.py::TestOnCuda::test_hand_made_plans_are_bitwise_exact[mixed]"
            ]
        if "--deselect" in words:
            files = [name.split("::")[0].split("test_")[1] for name in names]
            order = ["races", "optim", "main_job", "overlap", "placed_job", "budget", "ranks"]
            assert list(dict.fromkeys(files)) == [f"{name}_cuda.py" for name in order]
