"""``autohete plan`` as tests of it call it."""

from pathlib import Path
from typing import Any
from unittest import mock

from autohete_fx import cli
from autohete_fx.whatif.blueprint import Blueprint
from autohete_fx.whatif.depth import TracedStep
from autohete_fx.whatif.trace import trace_model

_traced: dict[Any, TracedStep] = {}


def plan(*arguments: str) -> int:
    """The status of the command, for two sequences of 64 tokens. A configuration is traced once for all that ask for it."""
    with mock.patch("autohete_fx.commands.planning.trace_model", _traced_once):
        return cli.main(["plan", "--batch", "2", "--seq", "64", "--time-limit", "1", *arguments])


def _traced_once(blueprint: Blueprint, *how: Any) -> TracedStep:
    if not blueprint.name.endswith(".json"):
        return trace_model(blueprint, *how)
    key = (Path(blueprint.name).read_text(), *how)
    if key not in _traced:
        _traced[key] = trace_model(blueprint, *how)
    return _traced[key]
