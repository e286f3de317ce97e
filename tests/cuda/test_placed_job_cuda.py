"""What users do with a placed model, on a GPU."""

from pathlib import Path

import pytest

from tests import training
from tests.placed_job import PlacedJob
from tests.training import Sizes


class TestOnCuda(PlacedJob):
    device = "cuda"
    sizes = Sizes(width=1024, heads=16, layers=20)
    budget_bytes = (
        512 * 2**20
    )  # the rest of the small card is for cuBLAS, and for what the caching allocator cannot use

    @pytest.mark.slow
    def test_a_model_larger_than_the_device_is_built_trained_saved_and_resumed(self, tmp_path: Path, small_card: int):
        training.warm_up(self.device)
        assert small_card < 20 * 12 * 1024**2 * 4
        super().test_a_model_larger_than_the_device_is_built_trained_saved_and_resumed(tmp_path)
