"""What importing this package brings: next to nothing, until a name is asked for."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import autohete_fx

INIT = Path(autohete_fx.__file__)
HEAVY = (
    "matplotlib",
    "networkx",
    "ortools",
    "pandas",
    "rich",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
)


def modules_after(statements: str, *names: str) -> list[str]:
    """Those of the names that a fresh process has imported after the statements."""
    code = f"{statements}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=INIT.parents[1])
    return done.stdout.split()


def test_importing_it_imports_next_to_nothing():
    torchs = modules_after("import torch", *HEAVY)
    assert modules_after("import torch, autohete_fx", *HEAVY) == torchs
    assert (
        modules_after("import autohete_fx; autohete_fx.errors, autohete_fx.OptionError, autohete_fx.Plan", "torch")
        == []
    )


def test_the_command_has_no_need_of_pytorch_before_its_first_word():
    light = "import sys; from autohete_fx import cli; sys.stderr = sys.stdout; assert cli.main({}) == 2; sys.stdout.write(chr(10))"
    for mistake in (["plan", "meta-llama/Llama-2-7b-hf", "--device", "h100"], ["plan", "gpt2", "--device", "h10"]):
        told = modules_after(light.format(mistake), "torch", "numpy", "ortools", "transformers")
        assert told[:2] == ["autohete:", "unknown"] and "torch" not in told


def test_every_public_name_is_there_where_it_is_said_to_be():
    (block,) = [node for node in ast.parse(INIT.read_text()).body if isinstance(node, ast.If)]
    said = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert said.keys() == set(autohete_fx.__all__) <= set(dir(autohete_fx))
    for name, module in said.items():
        assert getattr(autohete_fx, name) is getattr(importlib.import_module(module or ""), name)


def test_modules_are_found_as_attributes_and_other_names_are_not():
    assert autohete_fx.options.Options and autohete_fx.internals
    for name in ("moon", "__moon__"):
        try:
            getattr(autohete_fx, name)
        except AttributeError as error:
            assert str(error) == f"module 'autohete_fx' has no attribute {name!r}"
        else:
            raise AssertionError(name)
