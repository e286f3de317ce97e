"""Colours of a command's text: on terminals, and never but colours."""

import re

import pytest

from autohete_fx.report import coloured
from autohete_fx.report.coloured import show_text

TEXT = """\
gpt2: 124 M parameters in bf16, batch 8 x 1024 tokens
block         activations  parameters
------------  -----------  ----------
h.0-4 (5)     recompute    host

predicted step  41.5 ms
lanes busy      compute 41.5 ms (100%)
what more would buy
+25% device memory    41.5 ms        1.00x"""


def test_codes_of_colours_are_all_that_is_added():
    painted = coloured.coloured(TEXT)
    assert re.sub(r"\x1b\[\d+m", "", painted) == TEXT
    for words in ("predicted step", "41.5 ms", "recompute", "what more would buy", "1.00x", "100%"):
        assert re.search(rf"\x1b\[\d+m{re.escape(words)}\x1b\[0m", painted), words
    assert "h.0-4" in painted and coloured.coloured('{"step_s": 1.0}') == '{"step_s": 1.0}'


@pytest.mark.parametrize(
    ("is_terminal", "variables", "has_colours"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_terminals_have_them(
    is_terminal: bool,
    variables: dict[str, str],
    has_colours: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(coloured.sys.stdout, "isatty", lambda: is_terminal)
    show_text(TEXT)
    assert capsys.readouterr().out == (coloured.coloured(TEXT) if has_colours else TEXT) + "\n"
