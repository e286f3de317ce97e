"""``autohete run``: programs run as ``python`` runs them. Nothing compiles."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autohete_fx import BlockDecision, Plan, cli
from autohete_fx.integrations.run import parsed_options
from autohete_fx.integrations.watching import Watched

PROGRAM = """
import pickle, sys
class Point:
    pass
def main():
    assert __name__ == "__main__" and sys.modules["__main__"].Point is Point and pickle.loads(pickle.dumps(Point))
    print(sys.argv[1:], __file__, sys.path[0])
    print("on stderr", file=sys.stderr)
    what = sys.argv[1]
    if what == "raise":
        raise ValueError("of the program")
    if what == "interrupt":
        raise KeyboardInterrupt
    if what.startswith("exit"):
        sys.exit({"exit": None, "exit3": 3, "exit text": "a text"}[what])
main()
"""


def run(*arguments: str) -> object:
    """The exit status, as `SystemExit` has it, or -2 where an interrupt goes through."""
    before = (list(sys.path), sys.argv, sys.modules["__main__"], torch.optim.AdamW.__init__, sys.excepthook)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        cli.main(["run", *arguments])
    assert before == (list(sys.path), sys.argv, sys.modules["__main__"], torch.optim.AdamW.__init__, sys.excepthook)
    return ended.value.code if isinstance(ended.value, SystemExit) else -signal.SIGINT


@pytest.fixture(autouse=True)
def pythons_own_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process groups of earlier tests leave PyTorch's, which name a rank."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "program.py"
    path.parent.mkdir()
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize(
    ("what", "status"),
    [("go", 0), ("exit", None), ("exit3", 3), ("exit text", "a text"), ("raise", 1), ("interrupt", -2)],
)
def test_a_program_ends_as_it_would_by_python(
    what: str, status: object, program: Path, capsys: pytest.CaptureFixture[str]
):
    assert run("--budget", "1GiB", str(program), what, "--budget", "-m") == status
    shown = capsys.readouterr()
    assert shown.out == f"{[what, '--budget', '-m']} {program} {program.parent}\n"
    errors, _, told = shown.err.partition("autohete run: memory_budget=1GiB\n")
    assert told == "  no optimizer was made in this process: nothing was compiled or replaced\n"
    if what in ("raise", "interrupt"):
        lines = errors.splitlines()
        assert lines[:2] == ["on stderr", "Traceback (most recent call last):"]
        assert lines[2] == f'  File "{program}", line 16, in <module>' and "autohete_fx" not in errors
        assert lines[-1] == {"raise": "ValueError: of the program", "interrupt": "KeyboardInterrupt"}[what]
    else:
        assert errors == "on stderr\n"


def test_a_module_and_a_package_are_run_by_name(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(program.parent)
    (program.parent / "package").mkdir()
    (program.parent / "package" / "__init__.py").write_text("")
    (program.parent / "package" / "__main__.py").write_text(
        PROGRAM + "from . import __name__ as of\nassert of == 'package'\n"
    )
    assert run("-m", "program", "exit3", "-m") == 3
    assert run("-m", "package", "go") == 0
    folder = program.parent
    assert capsys.readouterr().out.splitlines() == [
        f"['exit3', '-m'] {program} {folder}",
        f"['go'] {folder / 'package' / '__main__.py'} {folder}",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.py"], "cannot open 'absent.py'"),
        (["-m", "absent_module"], "no such module"),
        (["-m", ".relative"], "no such module"),
        (["-m", ""], "no such module"),
        (["--budget", "12 stones", "x.py"], "unknown unit of size"),
        (["--option", "memory_bugdet=3", "x.py"], "did you mean 'memory_budget'"),
        (["--option", "verify", "x.py"], "NAME=VALUE"),
    ],
)
def test_mistakes_are_said_before_anything_runs(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("print('ran')")
    assert cli.main(["run", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and shown.out == "" and shown.err.count("\n") == 1


def test_all_that_follows_the_program_is_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "program.py"
    path.write_text("import sys\nprint(sys.argv[1:])")
    assert run("--budget", "1GiB", str(path), "--", "a", "--", "--leave", "-m") == 0
    assert capsys.readouterr().out == "['--', 'a', '--', '--leave', '-m']\n"


def test_options_of_the_program_that_begin_as_ours_do_are_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "program.py"
    path.write_text("import sys\nprint(sys.argv[1:])")
    assert run(str(path), "--b", "8", "--op=1") == 0
    assert capsys.readouterr().out == "['--b', '8', '--op=1']\n"


def test_a_package_that_cannot_be_imported_is_told_as_by_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "__init__.py").write_text("import sys\nprint(sys.argv)\nimport no_such_library")
    (tmp_path / "lacking" / "train.py").write_text("")
    (tmp_path / "circular").mkdir()
    (tmp_path / "circular" / "__init__.py").write_text("from . import absent")
    assert run("-m", "lacking.train", "--lr") == 1
    shown = capsys.readouterr()
    assert "ModuleNotFoundError: No module named 'no_such_library'" in shown.err
    assert shown.out == "['-m', '--lr']\n"
    assert run("-m", "circular.train") == 1
    assert "cannot import name 'absent' from partially initialized module 'circular'" in capsys.readouterr().err


def test_paths_in_options_are_those_of_the_directory_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given, real = list[dict[str, object]](), Watched
    monkeypatch.setattr(
        "autohete_fx.integrations.run.Watched",
        lambda options, **_: given.append(options) or real({}, only_same_kernels=False),
    )
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "program.py"
    path.write_text(f"import os\nos.chdir({str(tmp_path.parent)!r})")
    plan = Plan(labels=("all",), decisions=(BlockDecision(),))
    plan.save("plan.json")
    assert (
        run("--option", "report_dir=20240101", "--option", "offload_dir=.", "--option", "plan=plan.json", str(path))
        == 0
    )
    assert given == [{"report_dir": str(tmp_path / "20240101"), "offload_dir": str(tmp_path), "plan": plan}]


ENDINGS = """
import atexit, pickle, sys, threading, time
class Point:
    pass
atexit.register(lambda: print("at exit", bool(pickle.dumps(Point())), sys.argv[1:], file=sys.stderr))
def late():
    time.sleep(0.2)
    import torch
    torch.optim.SGD([torch.zeros(3, requires_grad=True)])
threading.Thread(target=late).start()
sys.stdout = open(sys.argv[1], "w")
sys.stdout.close()
sys.exit(5)
"""


def process(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "autohete_fx", "run", "--budget", "1GiB", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_its_threads_and_what_it_left_for_the_exit_find_what_they_know(tmp_path: Path):
    path = tmp_path / "program.py"
    path.write_text(ENDINGS)
    ended = process(str(path), str(tmp_path / "out"))
    assert ended.returncode == 5 and "Traceback" not in ended.stderr
    assert "torch.optim.SGD of 1 parameter" in ended.stderr
    assert f"at exit True {[str(tmp_path / 'out')]}" in ended.stderr.splitlines()


@pytest.mark.slow
def test_a_program_that_is_interrupted_dies_of_the_signal_after_the_report(program: Path):
    """Or a shell's loop would go on with the next one."""
    ended = process(str(program), "interrupt")
    assert ended.returncode == -signal.SIGINT and ended.stdout.startswith("['interrupt']")
    assert ended.stderr.count("Traceback") == 1 and "autohete_fx/" not in ended.stderr
    assert ended.stderr.endswith("no optimizer was made in this process: nothing was compiled or replaced\n")


def test_a_list_may_have_one_value_and_a_size_looks_like_itself():
    found = parsed_options(["allow=recompute", "memory_budget=60%", "micro_batches=4", "verify=false"])
    assert found == {"allow": ["recompute"], "memory_budget": "60%", "micro_batches": 4, "verify": False}
    assert parsed_options(["allow=recompute,host_params"]) == {"allow": ["recompute", "host_params"]}
    assert parsed_options(["plan=7", "host_budget=1e9"]) == {"plan": "7", "host_budget": "1e9"}


@pytest.mark.parametrize("source", [b"x = (\n", b"# coding: none\n", b"x = '\xff'\n"])
def test_a_program_that_does_not_parse_is_told_as_by_python(
    source: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "broken.py"
    path.write_bytes(source)
    assert run(str(path)) == 1
    assert capsys.readouterr().err.startswith(f'  File "{path}", line ')


def test_a_program_that_trains_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "program.py"
    path.write_text(
        "import torch\nclass Two(torch.nn.ModuleList):\n    pass\nmodel = Two(torch.nn.Linear(4, 4) for _ in range(2))\n"
        "adamw = torch.optim.AdamW(model.parameters(), fused=True)\nsgd = torch.optim.SGD([torch.zeros(3, requires_grad=True)])\n"
    )
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run("--option", "inner_backend=eager", "--leave", "Tow", str(path)) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "autohete run: inner_backend=eager"
    assert told[1] == "  torch.optim.AdamW of 4 parameters"
    assert told[2] == "    optimizer: replaced by autohete_fx.AdamW, which computes by its fused kernels, bit by bit"
    assert told[3].startswith("    model: not compiled, no module that holds all of its parameters was called")
    assert told[4:7] == [
        "  torch.optim.SGD of 1 parameter",
        "    optimizer: kept, its model is not compiled",
        "    model: not compiled, no module holds all of its parameters: make one that does, and call that",
    ]
    assert told[7] == "  --leave Tow was given, but no module of that class holds all parameters of an optimizer"
