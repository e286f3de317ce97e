"""Lines on the stages of a first step: on terminals, as records elsewhere, of one rank, and of none where they are turned off."""

import io
import logging
import types

import pytest

from autohete_fx.ir import Block, BlockGraph, BlockKind, Plan
from autohete_fx.report import stages
from autohete_fx.report.stages import Stages, blocks_words, plan_words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What is left to see, without seconds."""
        shown = [line.rpartition("\x1b[2K")[2] for line in self.getvalue().split("\n")]
        return [" ".join(word for word in line.split() if not word[0].isdecimal()) for line in shown]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setattr(stages, "sys", types.SimpleNamespace(stderr=made))  # pytest sets the real one again
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(stages.VARIABLE, raising=False)
    return made


def work() -> None:
    with Stages() as told:
        told.say("a model")
        told.begin("tracing")
        told.end("two layers")
        told.begin("planning")
        told.begin("planning")
        told.begin("compiling")


LINES = ["autohete: a model", "autohete: tracing s two layers", "autohete: planning s", "autohete: compiling s", ""]


def without_units(lines: list[str]) -> list[str]:
    return [line.replace(" us", " s").replace(" ms", " s").replace(" ns", " s") for line in lines]


def test_a_terminal_shows_a_stage_when_it_begins_and_its_seconds_when_it_ends(terminal: Terminal):
    work()
    assert without_units(terminal.lines()) == LINES
    written = terminal.getvalue()
    assert written.index("autohete: tracing …") < written.index("two layers")
    assert all(line.startswith("\r\x1b[2K") for line in written.split("\n")[:-1]), "over whatever bar stands there"


def test_a_stage_that_fails_leaves_an_empty_line(terminal: Terminal):
    with pytest.raises(KeyError), Stages() as told:
        told.begin("tracing")
        raise KeyError
    assert terminal.getvalue().endswith("tracing …\r\x1b[2K")


def test_elsewhere_they_are_records(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(Terminal, "isatty", lambda self: False)
    work()
    assert not terminal.getvalue() and not caplog.records
    with caplog.at_level(logging.INFO, logger="autohete_fx"):
        work()
    told = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in told] == ["a", "tracing", "planning", "compiling"] and not terminal.getvalue()
    monkeypatch.setenv(stages.VARIABLE, "1")
    work()
    assert without_units(terminal.lines()) == LINES


def test_whoever_reads_the_records_does_not_get_the_lines_too(terminal: Terminal, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        work()
    assert len(caplog.records) == 4 and not terminal.getvalue()


@pytest.mark.parametrize("how", ["rank", "variable", "package", "module"])
def test_they_can_be_turned_off(how: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    if how == "rank":
        monkeypatch.setenv("RANK", "3")
    elif how == "variable":
        monkeypatch.setenv(stages.VARIABLE, "0")
    else:
        log = logging.getLogger("autohete_fx" if how == "package" else stages.__name__)
        monkeypatch.setattr(log, "level", logging.WARNING)
    work()
    assert not terminal.getvalue()


def test_words_on_what_was_found():
    def graph(*digests: str) -> BlockGraph:
        blocks = (
            Block(index=i, kind=BlockKind.LAYER, module_fqn="", forward_nodes=(), backward_nodes=(), digest=digest)
            for i, digest in enumerate(digests)
        )
        return BlockGraph(blocks=tuple(blocks), edges=(), digest="")

    assert blocks_words(graph()) == "no layers found"
    assert blocks_words(graph("a")) == "1 layer of 1 kind"
    assert blocks_words(graph("a", "b", "a")) == "3 layers of 2 kinds"
    plan = Plan(labels=(), decisions=(), step_s=0.25, peak_bytes=2**30)
    assert plan_words(plan, None) == "predicts steps of 250 ms, a peak of 1.00 GiB"
    assert plan_words(plan, 2**31) == "predicts steps of 250 ms, a peak of 1.00 GiB of 2.00 GiB"
