"""Processes of the suite that compares systems on a GPU: how they end, with all that they started, and what they leave."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def gpu_process(benchmarks: Path) -> Any:
    import gpu_process  # pyright: ignore[reportMissingImports]

    return gpu_process


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("pass", ""),
        ("import time; time.sleep(60)", "out of time"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "does not fit"),
        ("raise SystemExit(3)", None),
    ],
)
def test_how_a_process_ended_is_told(gpu_process: Any, program: str, outcome: str | None):
    process = subprocess.Popen([sys.executable, "-S", "-c", program], start_new_session=True)
    problem = gpu_process._waited(process, 1.0)
    gpu_process._end(process)
    assert process.returncode is not None and (problem is None if outcome is None else problem[0] == outcome)


def test_a_process_is_ended_before_the_host_runs_out_of_memory(gpu_process: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_process.ram, "available_bytes", lambda: 1)
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert gpu_process._waited(process, 60.0) == ("does not fit", "host memory ran out")
    gpu_process._end(process)


def test_what_a_process_started_ends_with_it_wherever_it_went(gpu_process: Any, tmp_path: Path):
    """Compilers that a build tool starts are in process groups of their own."""
    sleep = "import subprocess, sys, time; {}; time.sleep(60)"
    inner = "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'], process_group=0)"
    noted = f"open({str(tmp_path / 'pid')!r}, 'w').write(str({inner}.pid))"
    process = subprocess.Popen([sys.executable, "-S", "-c", sleep.format(noted)], start_new_session=True)
    while not (path := tmp_path / "pid").exists() or not path.read_text():
        time.sleep(0.01)
    gpu_process._end(process)
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
    result = tmp_path / "1.jsonl"
    result.write_text('{"outcome": "fits"}\n{"outcome": "fi')
    assert gpu_process._rows(result) == [{"outcome": "fits"}]


def test_a_file_of_results_is_never_half_written(benchmarks: Path, tmp_path: Path):
    import results  # pyright: ignore[reportMissingImports]

    path = tmp_path / "gpu.json"
    results.save(path, {"compare": [1]})
    with pytest.raises(TypeError):
        results.save(path, {"compare": [object()]})
    assert json.loads(path.read_text())["rows"] == {"compare": [1]}
