"""Processes of the suite that compares systems on a GPU: how they end, with all that they started, and what they leave."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def gpu_process(benchmarks: Path) -> Any:
    import gpu_process  # pyright: ignore[reportMissingImports]

    return gpu_process


@pytest.fixture
def started(gpu_process: Any, tmp_path: Path) -> Callable[[str], Any]:
    """Runs a program in a session of its own."""
    log = tmp_path / "1.log"
    log.write_text("SomeError: a reason\n")

    def start(program: str) -> Any:
        process = subprocess.Popen([sys.executable, "-S", "-c", program], start_new_session=True)
        return gpu_process.Started(process, tmp_path / "1.jsonl", log)

    return start


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("pass", ""),
        ("import time; time.sleep(60)", "out of time"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "does not fit"),
        ("raise SystemExit(3)", "failed"),
    ],
)
def test_how_a_process_ended_is_told(started: Callable[[str], Any], program: str, outcome: str):
    process = started(program)
    problem = process.waited(1.0)
    process.end()
    assert process.has_ended and problem[0] == outcome
    assert problem[1] == "SomeError: a reason" or outcome != "failed"


def test_a_process_is_ended_before_the_host_runs_out_of_memory(
    gpu_process: Any, started: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_process.ram, "available_bytes", lambda: 1)
    process = started("import time; time.sleep(60)")
    assert process.waited(60.0) == ("does not fit", "host memory ran out")
    process.end()


def test_what_a_process_started_ends_with_it_wherever_it_went(started: Callable[[str], Any], tmp_path: Path):
    """Compilers that a build tool starts are in process groups of their own."""
    sleep = "import subprocess, sys, time; {}; time.sleep(60)"
    inner = "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], process_group=0)"
    noted = f"open({str(tmp_path / 'pid')!r}, 'w').write(str({inner}.pid))"
    process = started(sleep.format(noted))
    while not (path := tmp_path / "pid").exists() or not path.read_text():
        time.sleep(0.01)
    process.end()
    stat, end_s = Path(f"/proc/{path.read_text()}/stat"), time.monotonic() + 30
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < end_s, "it lives on"
        time.sleep(0.01)


def test_what_an_ended_process_may_have_spoiled_is_not_used_again(
    gpu_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import gpu_selection  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--dry"])
    processes = gpu_process.Processes(tmp_path, tmp_path, gpu_selection.parsed(None))
    folders = [Path(processes._environment[f"{name}_CACHE_DIR"]) for name in ("TORCHINDUCTOR", "TRITON")]
    kept, spoiled = ([folder / "ab" / name for folder in folders] for name in ("whole.so", "part.so"))
    lock = tmp_path / "extensions" / "cpu_adam" / "lock"
    for file in (*kept, *spoiled, lock):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    began_s = time.time()
    for file in kept:
        os.utime(file, (began_s - 60, began_s - 60))
    processes._take_back(began_s)
    assert all(file.exists() for file in kept) and not any(file.exists() for file in (*spoiled, lock))


def test_a_row_that_was_being_written_is_left_out(started: Callable[[str], Any], tmp_path: Path):
    process = started("pass")
    (tmp_path / "1.jsonl").write_text('{"outcome": "fits"}\n{"outcome": "fi')
    assert process.rows() == [{"outcome": "fits"}]
    process.end()


@pytest.mark.thorough
def test_systems_are_timed_in_turn_when_all_are_warm(benchmarks: Path, tmp_path: Path, caches: Path):
    """Of one that fails there is a reason, and the others go on."""
    path = tmp_path / "turns.json"
    words = ["--dry", "--no-inductor", "--cap", "8", "--steps", "3", "--json", str(path), "--caches", str(caches)]
    words += ["--systems", "ours", "ours-backward", "fsdp2"]
    ran = subprocess.run(
        [sys.executable, str(benchmarks / "gpu_turns.py"), *words], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(path.read_text())["rows"]
    *first, second = (row for row in rows if row["system"] != "fsdp2")
    assert [row["system"] for row in (*first, second)] == ["ours"] * 3 + ["ours-backward"]
    assert [row["first step"] for row in first] == [0, 7, 14] and all(len(row["steps s"]) == 3 for row in first)
    assert first[-1]["timed at"][1] < second["timed at"][0]
    (other,) = (row for row in rows if row["system"] == "fsdp2")
    assert "out of memory" in other["reason"]


def test_a_file_of_results_is_never_half_written(benchmarks: Path, tmp_path: Path):
    import results  # pyright: ignore[reportMissingImports]

    path = tmp_path / "gpu.json"
    results.save(path, {"compare": [1]})
    with pytest.raises(TypeError):
        results.save(path, {"compare": [object()]})
    assert json.loads(path.read_text())["rows"] == {"compare": [1]}
