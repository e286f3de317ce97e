"""``autohete run``: programs run as ``python`` runs them, optimizers become ours only where that is exact. Nothing compiles."""

import io
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import BlockDecision, Plan, cli
from autohete_fx.integrations.replacing import Kept, replace
from autohete_fx.integrations.run import parsed_options
from autohete_fx.integrations.watching import Trained, Watched
from autohete_fx.optim import optimizer_of

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
    """The exit status, as `SystemExit` has it."""
    before = (list(sys.path), sys.argv, sys.modules["__main__"], torch.optim.AdamW.__init__, sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *arguments])
    assert before == (list(sys.path), sys.argv, sys.modules["__main__"], torch.optim.AdamW.__init__, sys.excepthook)
    return ended.value.code


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
    [("go", 0), ("exit", None), ("exit3", 3), ("exit text", "a text"), ("raise", 1), ("interrupt", 130)],
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


def test_paths_in_options_are_those_of_the_directory_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[dict[str, object]] = []
    monkeypatch.setattr("autohete_fx.integrations.run.Watched", lambda options, **_: given.append(options) or watched())
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


@pytest.mark.slow
def test_its_threads_and_what_it_left_for_the_exit_find_what_they_know(tmp_path: Path):
    path = tmp_path / "program.py"
    path.write_text(ENDINGS)
    command = [sys.executable, "-m", "autohete_fx", "run", "--budget", "1GiB", str(path), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 5 and "Traceback" not in ended.stderr
    assert "torch.optim.SGD of 1 parameter" in ended.stderr
    assert ended.stderr.splitlines()[-1] == f"at exit True {[str(tmp_path / 'out')]}"


def test_a_class_that_is_to_be_left_is_left():
    with watched(left=["Layers"]) as run_of:
        model = Layers()
        torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(1, 4))
    assert run_of.trained[0].uncompiled == "--leave Layers was given" and model._compiled_call_impl is None
    assert run_of.trained[0].kept == "its model is not compiled"


def test_a_list_may_have_one_value_and_a_size_looks_like_itself():
    found = parsed_options(["allow=recompute", "memory_budget=60%", "micro_batches=4", "verify=false"])
    assert found == {"allow": ["recompute"], "memory_budget": "60%", "micro_batches": 4, "verify": False}
    assert parsed_options(["allow=recompute,host_params"]) == {"allow": ["recompute", "host_params"]}
    assert parsed_options(["plan=7", "host_budget=1e9"]) == {"plan": "7", "host_budget": "1e9"}


def test_a_program_that_does_not_parse_is_told_as_by_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "broken.py"
    path.write_text("x = (\n")
    assert run(str(path)) == 1
    assert f'File "{path}", line 1' in capsys.readouterr().err


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def watched(options: Any = None, **how: Any) -> Watched:
    return Watched(options or {"inner_backend": "eager"}, **{"only_same_kernels": False, **how})


def steps(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for step in range(4):
        torch.manual_seed(step)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        schedule.step()
    return [p.detach().clone() for p in params]


MAKERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    lambda params: torch.optim.AdamW(
        [{"params": params[:2], "lr": 1e-1}, {"params": params[2:]}], betas=(0.8, 0.9), fused=True
    ),
    lambda params: torch.optim.Adam(params, weight_decay=0.1, eps=1e-3, fused=True),
    lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    lambda params: torch.optim.SGD(params, lr=torch.tensor(1e-2), weight_decay=0.1, maximize=True, fused=True),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_replaced_optimizer_updates_bit_by_bit(make: Callable[[Any], torch.optim.Optimizer]):
    plain, model = Layers(), Layers()
    expected = steps(make(list(plain.parameters())), list(plain.parameters()))
    with watched() as run_of, torch.no_grad():  # under which no call decides which module is compiled
        optimizer = make(list(model.parameters()))
        assert type(optimizer).__module__.startswith("autohete_fx.")
        model(torch.ones(1, 4))
    given = steps(optimizer, list(model.parameters()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(given, expected, strict=True))
    assert "bit by bit" in run_of.trained[0].replaced and "no module that holds all" in run_of.trained[0].uncompiled
    assert type(make(list(Layers().parameters()))).__module__.startswith("torch.optim")
    assert not hasattr(optimizer, "_step_supports_amp_scaling")  # or a gradient scaler would leave gradients scaled


def test_names_of_parameters_and_states_are_those_of_pytorch():
    plain, model = Layers(), Layers()
    expected = torch.optim.AdamW(plain.named_parameters(), fused=True)
    with watched():
        optimizer = torch.optim.AdamW(model.named_parameters(), fused=True)
    steps(expected, list(plain.parameters()))
    steps(optimizer, list(model.parameters()))
    given, wanted = optimizer.state_dict(), expected.state_dict()
    assert given["param_groups"] == wanted["param_groups"] and given["state"].keys() == wanted["state"].keys()
    assert all(
        torch.equal(given["state"][i][name], state[name]) for i, state in wanted["state"].items() for name in state
    )


class Own(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "amsgrad=True"),
        (lambda params: torch.optim.AdamW(params, foreach=True), "foreach=True"),
        (lambda params: torch.optim.AdamW(params, capturable=True), "capturable=True"),
        (lambda params: torch.optim.AdamW(params, fused=False), "fused=False"),
        (lambda params: torch.optim.SGD(params, differentiable=True), "differentiable=True"),
        (lambda params: Own(params), "subclass of torch.optim.AdamW"),
        (lambda params: torch.optim.LBFGS(params), "no optimizer of ours"),
        (lambda params: torch.optim.NAdam(params), "no optimizer of ours"),
        (lambda params: autohete_fx.AdamW(params), "ours already"),
    ],
)
def test_any_other_optimizer_stays_and_the_report_says_why(make: Callable[[Any], torch.optim.Optimizer], reason: str):
    model = Layers()
    plain = type(make(list(model.parameters())))
    with watched() as run_of:
        optimizer = make(list(model.parameters()))
    assert type(optimizer) is plain and reason in run_of.trained[0].kept and not run_of.trained[0].replaced


def test_what_pytorch_would_round_otherwise_is_said_and_can_be_refused():
    model = Layers()
    with watched() as run_of:
        torch.optim.AdamW(model.parameters())
    assert "last bits" in run_of.trained[0].replaced
    with watched(only_same_kernels=True) as run_of:
        optimizer = torch.optim.AdamW(model.parameters())
    assert type(optimizer) is torch.optim.AdamW and "fused=True" in run_of.trained[0].kept


def test_16_bit_parameters_stay_also_where_they_become_so_later():
    model = Layers().bfloat16()
    with watched() as run_of:
        torch.optim.AdamW(model.parameters(), fused=True)
        late = Layers()
        optimizer = torch.optim.AdamW(late.parameters(), fused=True)
    assert "fp32 master" in run_of.trained[0].kept
    steps(optimizer, list(late.parameters()))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]})
    with pytest.raises(autohete_fx.OptimizerStateError, match="Cast the model before"):
        optimizer.step()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).sum()


def test_an_optimizer_of_sparse_gradients_stays():
    model = Sparse()
    with watched() as run_of, torch.no_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    assert type(optimizer) is torch.optim.SGD and "sparse=True" in run_of.trained[0].kept
    assert type(dense) is autohete_fx.SGD


def test_an_optimizer_that_ours_refuses_is_as_it_was():
    first, second = Layers().layers
    groups = [{"params": list(first.parameters())}, {"params": list(second.parameters()), "lr": float("nan")}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    before = dict(vars(optimizer))
    with pytest.raises(Kept, match="lr is nan"):
        replace(optimizer, only_same_kernels=False)
    assert type(optimizer) is torch.optim.AdamW and vars(optimizer) == before
    assert not any(map(optimizer_of, (*first.parameters(), *second.parameters()))), "a plan would ask it"


def test_constructors_of_pytorch_raise_what_they_raise():
    with watched() as run_of, pytest.raises(ValueError, match="learning rate"):
        torch.optim.AdamW(Layers().parameters(), lr=-1.0)
    assert run_of.trained == []


def only(run_of: Watched) -> Trained:
    (note,) = run_of.trained
    return note


def test_layers_that_a_loop_calls_one_by_one_are_not_compiled():
    model = Layers()
    with watched() as run_of:
        torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.ones(1, 4)
        for layer in model.layers:
            x = layer(x)
        x.sum().backward()
    assert "no module that holds all" in only(run_of).uncompiled and model._compiled_call_impl is None


def test_parameters_of_two_modules_are_left_alone():
    model, head = Layers(), nn.Linear(4, 1)
    with watched() as run_of:
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], fused=True)
        head(model(torch.ones(1, 4))).sum().backward()
    assert "no module holds all" in only(run_of).uncompiled and only(run_of).kept == "its model is not compiled"
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["in place", "wrapped", "a layer"])
def test_a_model_that_the_script_compiles_is_left_alone(how: str, when: str):
    def compile_it(model: Layers) -> nn.Module:
        if how == "wrapped":
            return torch.compile(model, backend="eager")  # type: ignore[return-value]
        (model if how == "in place" else model.layers[0]).compile(backend="eager")
        return model

    model = Layers()
    called = compile_it(model) if when == "before" else model
    with watched() as run_of:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        called = compile_it(model) if when == "after" else called
        called(torch.ones(1, 4)).sum().backward()
        called(torch.ones(1, 4)).sum().backward()
    note = only(run_of)
    assert not note.compiled and "compile" in note.uncompiled, note
    assert when == "after" or type(optimizer) is torch.optim.AdamW
    called(torch.ones(1, 4)).sum().backward()


def test_a_run_leaves_nothing_behind():
    model = Layers()
    with watched():
        torch.optim.AdamW(model.parameters(), fused=True)
        assert model._compiled_call_impl is not None
    assert model._compiled_call_impl is None and "Watched" not in str(vars(torch.optim.Optimizer.__init__))


def test_a_program_that_trains_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    stub = types.ModuleType("layers_of_test")
    vars(stub).update(Layers=Layers)
    monkeypatch.setitem(sys.modules, "layers_of_test", stub)
    path = tmp_path / "program.py"
    path.write_text(
        "import torch\nfrom layers_of_test import Layers\nmodel = Layers()\n"
        "adamw = torch.optim.AdamW(model.parameters(), fused=True)\nsgd = torch.optim.SGD([torch.zeros(3, requires_grad=True)])\n"
    )
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run("--option", "inner_backend=eager", str(path)) == 0
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
