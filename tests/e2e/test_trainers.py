"""The scripts under examples/trainers train the same with us, without us, and without a change under ``autohete run``."""

import dataclasses
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

import autohete_fx
from autohete_fx import BlockDecision, Params, cli
from autohete_fx.integrations import accelerate
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]
TRAINERS = ROOT / "examples" / "trainers"
SCRIPTS = sorted(path.stem for path in TRAINERS.glob("*.py") if path.stem != "setting")
REPEATING = ("accelerate_loop", "peft_lora", "trl_sft")
"""``hf_trainer`` has Accelerate and the class that TRL extends, ``plain_loop`` the loop of LoRA."""
pytestmark = pytest.mark.filterwarnings("ignore")  # the trainers' own


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where scripts may write, with the scripts importable and no trainer's state of an earlier run."""
    level, known = transformers.logging.get_verbosity(), set(sys.modules)
    transformers.logging.set_verbosity_error()
    monkeypatch.syspath_prepend(str(TRAINERS))
    forget()
    yield tmp_path
    accelerate.disable()
    forget()
    transformers.logging.set_verbosity(level)
    for name in {"setting", *SCRIPTS} & (set(sys.modules) - known):
        del sys.modules[name]


def forget() -> None:
    """A process has one state of Accelerate, which remembers the backend."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch._dynamo.reset()


def trained(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    forget()
    script = importlib.import_module(name)
    return dataclasses.asdict(script.main([*arguments, "--folder", str(folder)]))


def assert_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert given["losses"] == expected["losses"] and len(given["losses"]) == 3
    assert given["parameters"].keys() == expected["parameters"].keys()
    assert all(torch.equal(given["parameters"][name], value) for name, value in expected["parameters"].items())


def decisions() -> set[BlockDecision]:
    return set(next(c for c in reversed(autohete_fx.compilations()) if c.training).plan.decisions)


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_a_trainer_trains_the_same_under_inductor(scripts: Path):
    plain = trained("hf_trainer", scripts, "--plain", "inductor")
    assert_same(trained("hf_trainer", scripts, "--inner", "inductor"), plain)
    assert len(decisions() - {BlockDecision()}) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [thorough(name) if name in REPEATING else name for name in SCRIPTS])
def test_a_trainer_trains_the_same_with_us_without_us_and_under_run(
    name: str, scripts: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """All three run the same kernels: graphs node by node."""
    plain = trained(name, scripts, "--plain", "aot_eager")
    within = ["--budget", "4MiB"] if name == "trl_sft" else []  # its loss takes more: the fourth step would be refused
    ours = trained(name, scripts, "--inner", "eager", *within)
    assert_same(ours, plain)
    assert len(decisions() - {BlockDecision()}) > 0
    if name == "peft_lora":
        assert any(decision.params is Params.HOST for decision in decisions())
    accelerate.disable()
    forget()
    budget = "2900KiB" if name == "peft_lora" else "4MiB"
    how = [
        "--budget",
        budget,
        "--option",
        "inner_backend=eager",
        "--option",
        "profile=analytic",
        str(TRAINERS / f"{name}.py"),
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", *how, "--plain", "--save", str(scripts / "run.pt"), "--folder", str(scripts)])
    told = capsys.readouterr().err
    assert ended.value.code == 0, told
    assert "optimizer: replaced by autohete_fx.AdamW, which computes by its fused kernels, bit by bit" in told
    assert re.search(r"model: compiled \S*(Llama|Peft)\w*ForCausalLM", told) and "measured" in told
    assert_same(torch.load(scripts / "run.pt"), plain)
    assert "planned again" not in caplog.text or name in ("lightning_module", "trl_sft")


def test_snippets_of_the_page_are_lines_of_the_scripts():
    page = (ROOT / "docs" / "trainers.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    files = [path.read_text().splitlines() for path in sorted(TRAINERS.glob("*.py"))]
    assert len(blocks) >= len(SCRIPTS)
    for block in blocks:
        lines = block.splitlines()
        windows = (text[at : at + len(lines)] for text in files for at in range(len(text)))
        assert any(textwrap.dedent("\n".join(window)).splitlines() == lines for window in windows), block
    assert all(f"examples/trainers/{name}.py" in page for name in SCRIPTS)
