"""What the benchmark of predictions on a GPU says: how much of the copies is hidden under kernels, and its table."""

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autohete_fx

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])), max_size=8)


@pytest.fixture(scope="module")
def benchmark_module(benchmarks: Path) -> Any:
    import cuda_truth  # pyright: ignore[reportMissingImports]

    return cuda_truth


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


def test_every_pair_has_a_line_and_counts(
    benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    plain = {"peak bytes": 100 * 2**20}
    ours = {
        "step s": 0.5,
        "peak bytes": 50 * 2**20,
        "compiling peak bytes": 49 * 2**20,
        "reserved bytes": 60 * 2**20,
        "hidden": {"h2d": 0.75},
    }
    ours |= {"predicted step s": 0.45, "predicted peak bytes": 51 * 2**20, "profile s": 3.0}
    monkeypatch.setattr(
        benchmark_module, "in_process", lambda caches, *words: ours if "--budget-bytes" in words else plain
    )
    asked = argparse.Namespace(models=["fp32"], budgets=["70%", "50%"], steps=1, dry=False, json=None)
    rows = benchmark_module.table(asked, "")
    assert [row["budget bytes"] for row in rows] == [70 * 2**20, 50 * 2**20]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fp32")]
    assert len(lines) == 2 and all(
        line.split()[3:] == "500.0 0.90 51.0 50.0 1.020 3.0 60 h2d 75%".split() for line in lines
    )
    assert benchmark_module.summary(rows)["step time: largest error"] == "10.0%"
    rows[1]["compiling peak bytes"] = 51 * 2**20
    assert [benchmark_module.keeps_budget(row) for row in rows] == [True, False]
    assert list(benchmark_module.judged(rows).values()) == ["1 of 2", "2 of 2", "2 of 2"]


def test_a_pair_that_fails_costs_no_other_and_what_ran_is_in_the_file(
    benchmark_module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    found = {"step s": 0.5, "peak bytes": 2**20, "compiling peak bytes": 0, "reserved bytes": 0, "hidden": {}}
    found |= {"predicted step s": 0.5, "predicted peak bytes": 2**20, "profile s": 0.0}
    path = tmp_path / "truth.json"

    def run(caches: str, *words: str) -> Any:
        if "fp32" in words and "--budget-bytes" in words:
            return {"failed": "Traceback\nno plan fits"}
        if "bf16" in words and "--budget-bytes" in words:
            assert [row["failed"] for row in json.loads(path.read_text())["rows"]] == ["Traceback\nno plan fits"]
        return found

    monkeypatch.setattr(benchmark_module, "in_process", run)
    monkeypatch.setattr(sys, "argv", ["cuda_truth.py", "--dry", "--budgets", "100%", "--json", str(path)])
    with pytest.raises(SystemExit, match=r"^fp32 at 100% failed$"):
        benchmark_module.main()
    out = capsys.readouterr().out
    assert "failed: no plan fits" in out and "1 of 1" in out
    assert ["failed" in row for row in json.loads(path.read_text())["rows"]] == [True, False]


@pytest.mark.slow
def test_what_a_process_pays_once_is_gone_before_others_memory_is_counted(benchmark_module: Any):
    """Garbage of the warm-up that went under way would be missing from every peak."""
    with autohete_fx.MemoryMeter("cpu"):
        gc.collect()
    benchmark_module.warm_up("cpu")
    gc.disable()
    try:
        benchmark_module.warm_up("cpu")
        with autohete_fx.MemoryMeter("cpu") as meter:
            before = meter.start_bytes
        gc.collect()
        with autohete_fx.MemoryMeter("cpu") as meter:
            assert meter.start_bytes == before
    finally:
        gc.enable()
