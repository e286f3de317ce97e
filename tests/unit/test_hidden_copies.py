"""How much of the copies a benchmark says is hidden under kernels."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])), max_size=8)


@pytest.fixture(scope="module")
def benchmark_module() -> Any:
    folder = str(Path(__file__).parents[2] / "examples" / "benchmarks")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import cuda_truth

        yield cuda_truth
    for name in ("cuda_truth", "prediction_truth", "results", "gpt"):
        sys.modules.pop(name, None)


@settings(deadline=None)
@given(kernels=SPANS, copies=SPANS)
def test_shares_are_those_of_counting_every_moment(benchmark_module: Any, kernels: Any, copies: Any):
    found = benchmark_module.hidden_shares(kernels, {"h2d": copies, "d2h": []})

    def moments(spans: Any) -> set[int]:
        return {at for begin, end in spans for at in range(begin, end)}

    if not copies:
        assert found == {}
    else:
        under = moments(copies) & moments(kernels)
        assert found == {"h2d": pytest.approx(len(under) / len(moments(copies)))}
