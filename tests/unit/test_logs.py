"""Names of ours in PyTorch's logging: by name, by level, and not at all."""

import logging
from collections.abc import Iterator

import pytest
import torch

from autohete_fx.internals import logs

log = logging.getLogger("autohete_fx.somewhere")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    logs.register()
    yield
    torch._logging.set_logs()
    logs.follow()


def told(capsys: pytest.CaptureFixture[str], **asked: object) -> list[str]:
    """The ends of the lines that PyTorch's handlers write, where these names are asked for."""
    torch._logging.set_logs(modules=asked)
    logs.follow()
    for artifact in logs.ARTIFACTS:
        logs.show(artifact, lambda artifact=artifact: f"a {artifact}")
    log.debug("a detail")
    log.info("a fact")
    log.warning("a warning")
    return [line.rpartition("] ")[2] for line in capsys.readouterr().err.splitlines()]


def test_an_artifact_is_shown_where_it_is_named(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    assert told(capsys, autohete_plan=True, autohete_memory=True) == ["a plan", "a memory"]
    assert [record.getMessage() for record in caplog.records] == ["a warning"], "an ordinary record"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (logging.DEBUG, ["a plan", "a graph", "a schedule", "a memory", "a detail", "a fact", "a warning"]),
        (logging.INFO, ["a fact", "a warning"]),
        (logging.ERROR, []),
    ],
)
def test_a_level_is_that_of_all_records(level: int, expected: list[str], capsys: pytest.CaptureFixture[str]):
    assert told(capsys, autohete=level) == expected


def test_nobody_asks_and_nothing_is_made_of_it(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    assert told(capsys) == []
    with caplog.at_level(logging.DEBUG):
        assert told(capsys) == [], "levels of the program's own handlers show no artifacts"
    assert "a detail" in caplog.text and "a plan" not in caplog.text
    logs.show("plan", lambda: pytest.fail("made though nobody listens"))
