"""What users do with a placed model, on a CPU device that is taken for one with memory of its own."""

import pytest

from tests.held_updates import use_lanes
from tests.placed_job import PlacedJob


class TestOnCpu(PlacedJob):
    device = "cpu"

    @pytest.fixture(autouse=True)
    def two_memories(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_lanes(monkeypatch, is_host=False)
