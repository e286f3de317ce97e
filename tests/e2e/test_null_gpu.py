"""The code that is compiled for a GPU, checked on machines without one: PyTorch is shown a card that computes nothing.

What a step computes there is no number at all. What the compiler made of our graphs is what it would make on a card, and which
tensors live when, too.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.null_gpu.wrapper import copies_of_graph, read

ROOT = Path(__file__).parents[2]
PACKAGES = Path(torch.__file__).parents[1]
HEADERS = (PACKAGES / "nvidia/cu13/include", PACKAGES / "triton/backends/nvidia/include")
COMPILER = shutil.which("cc")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.cuda.is_available()
        or COMPILER is None
        or sys.platform != "linux"
        or importlib.util.find_spec("triton") is None
        or not str(torch.version.cuda).startswith("13.0")
        or not all(header.is_dir() for header in HEADERS),
        reason="needs PyTorch for CUDA 13.0 with its headers, a C compiler, and no GPU",
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the job reports."""
    folder = tmp_path_factory.mktemp("null_gpu")
    library = folder / "libcuda.so.1"
    source = ROOT / "tests" / "null_gpu" / "null_gpu.c"
    includes = [f"-I{header}" for header in HEADERS]
    subprocess.run(
        [str(COMPILER), "-shared", "-fPIC", "-w", "-O1", *includes, str(source), "-o", str(library)], check=True
    )
    environment = os.environ | {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "inductor" / "triton"),
        "CUBLAS_WORKSPACE_CONFIG": ":0:0",  # what a budget does not count
        "AUTOHETE_CACHE_DIR": str(folder / "autohete"),  # of the machine's figures: they would be another's
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.null_gpu.job"]
    finished = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def test_the_compiler_keeps_copies_between_the_products_where_they_stand(found: dict[str, Any]):
    for wrapper, graph in zip(found["wrappers"][:2], found["graphs"][:2], strict=True):
        wanted = copies_of_graph(graph)
        assert {"prefetch", "offload", "wait"} <= {op for _, op in wanted} and wanted[-1][0] > 10
        assert sorted(read(wrapper).copies) == sorted(wanted)


def test_copies_begin_before_the_device_waits_for_what_the_next_block_reads(found: dict[str, Any]):
    for number, (wrapper, graph) in enumerate(zip(found["wrappers"], found["graphs"], strict=True)):
        reading, is_forward = read(wrapper), number % 2 == 0
        assert reading.late == []
        # In backward a product whose result nothing of its block reads may come behind the copies of the next.
        compiled, wanted = (
            [(products * is_forward, op) for products, op in copies if op not in ("wait", "wait_update")]
            for copies in (reading.copies, copies_of_graph(graph))
        )
        assert compiled == wanted


def test_nothing_is_written_over_what_a_copy_reads(found: dict[str, Any]):
    forward, backward, *others = map(read, found["wrappers"])
    assert [reading.faults for reading in (forward, backward, *others)] == [[]] * 4
    assert {op for _, op in backward.copies} >= {"reload", "start_update"}
    assert backward.returned_homes == sum(op == "start_update" for _, op in backward.copies)


def test_a_write_over_what_a_copy_reads_would_be_found(found: dict[str, Any]):
    backward = found["wrappers"][1]
    issued = re.search(r"^( +)\w+ = torch\.ops\.autohete\.offload\.default\((\w+),.*\n", backward, re.MULTILINE)
    assert issued is not None
    written = f"{issued[1]}extern_kernels.mm({issued[2]}, {issued[2]}, out={issued[2]})\n"
    (fault,) = read(backward.replace(issued[0], issued[0] + written)).faults
    assert "extern_kernels.mm writes" in fault


def test_the_allocator_counts_what_the_plan_predicts(found: dict[str, Any]):
    first, *others = found["peaks"]
    assert first <= found["predicted"]
    assert max(others) == pytest.approx(found["predicted"] - found["tuning"], rel=0.01)


def test_attention_takes_the_scratch_that_is_counted_for_it(found: dict[str, Any]):
    for counted, told in found["scratch"]:
        assert told == pytest.approx(counted, rel=0.1)  # the allocator hands out pieces up to 1 MiB too large


def test_updates_read_and_write_whole_vectors(found: dict[str, Any]):
    whole, others = found["accesses"]
    assert any(".v4." in access for access in whole) and not any(access.endswith(".b16") for access in whole), whole
    assert any(access.endswith(".b16") for access in others), others  # or the first would tell nothing
