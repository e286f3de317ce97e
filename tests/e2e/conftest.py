"""What the end-to-end tests share."""

from collections.abc import Iterator

import pytest

from tests.held_updates import Gate, use_lanes


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    use_lanes(monkeypatch, pace=gate)
    yield gate
    gate.opened.set()
