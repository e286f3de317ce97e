"""Each mistake of docs/mistakes.md is made, and says what the page says that it does."""

import dataclasses
import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from autohete_fx import cli
from autohete_fx.errors import AutoHeteError
from autohete_fx.options import Options

PAGE = (Path(__file__).parents[2] / "docs" / "mistakes.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = re.split(r"^### ", PAGE, flags=re.MULTILINE)
(SETUP,) = [text for kind, text in BLOCK.findall(SECTIONS[0]) if kind == "python"]
MISTAKES = {section.partition("\n")[0]: BLOCK.findall(section) for section in SECTIONS[1:]}
NEWEST = {
    section.partition("\n")[0]: re.findall(r"^A warning, up to PyTorch ([\d.]+)\.$", section, re.MULTILINE)
    for section in SECTIONS
}
"""The version of PyTorch up to which there is a mistake, where the page says one."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run node by node and are not timed, which no message is about."""
    read = Options.from_user

    def from_user(given: Mapping[str, object] | None, mode: str | None = None) -> Options:
        return dataclasses.replace(read(given, mode), inner_backend="eager", profile="analytic")

    monkeypatch.setattr(Options, "from_user", from_user)


def told(kind: str, code: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> str:
    """The error or the one warning of a mistake, or what a command says."""
    if kind == "console":
        assert cli.main(shlex.split(code.removeprefix("$ autohete "))) == 2
        return capsys.readouterr().err
    names: dict[str, Any] = {"__name__": "mistake"}
    exec(SETUP, names)
    with caplog.at_level(logging.WARNING, logger="autohete_fx"):
        try:
            exec(code, names)
        except AutoHeteError as error:
            return f"{type(error).__name__}: {error}"
    (record,) = {record.getMessage() for record in caplog.records}
    return record


def words(text: str) -> str:
    """Without line breaks, and without what Dynamo adds."""
    return " ".join(text.partition("\n\nSet TORCHDYNAMO_VERBOSE")[0].split())


def test_there_are_twenty_at_least():
    assert len(MISTAKES) >= 20
    assert all(
        [kind for kind, _ in blocks] in (["python", "text"], ["console", "text"]) for blocks in MISTAKES.values()
    )


@pytest.mark.parametrize("title", MISTAKES)
def test_a_mistake_says_what_the_page_says(
    title: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.chdir(tmp_path)
    for newest in NEWEST[title]:
        if TorchVersion(torch.__version__) >= f"{newest}.99":
            pytest.skip(f"is none after PyTorch {newest}")
    (kind, code), (_, message) = MISTAKES[title]
    said = words(told(kind, code, caplog, capsys))
    assert re.fullmatch(".*".join(map(re.escape, words(message).split("…"))), said), said
