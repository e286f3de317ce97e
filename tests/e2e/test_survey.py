"""A row of the survey of families."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_row_says_that_training_was_exact_and_within_budget(monkeypatch: pytest.MonkeyPatch, fresh_plans: Path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import survey_child  # pyright: ignore[reportMissingImports]

    row = survey_child.row_of("llama", "eager", 0.6)
    for name in ("survey_child", "families", "family_sizes"):
        del sys.modules[name]
    assert row["result"] == "trained" and row["bitwise"] and row["exact"]
    assert row["peak bytes"] <= row["budget bytes"] < 0.61 * row["plain peak bytes"]
    assert (row["graphs"], row["breaks"], len(row["layers found"])) == (1, [], 3)
