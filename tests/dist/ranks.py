"""Runs a function of a test's module in processes that make up a job, one a rank, on gloo or NCCL.

Ranks on the CPU are forked from processes that have imported PyTorch.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.processes import ROOT, TIMEOUT_S, run_together

SHOWN_AFTER_S = 200
"""After each of which a rank writes where its threads are, beside what it fails with: groups of jobs give up after 300 seconds."""


def run(
    function: str,
    folder: Path,
    *args: Any,
    num_ranks: int = 2,
    survivors: Sequence[int] | None = None,
    device: str = "cpu",
) -> list[Any]:
    """What ``function`` (``module.name``) returned on each rank, or on those that are to survive: values of JSON. Ranks meet
    in a file of the folder. Each has a device, or all have the one that there is."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DEVICE_OF_RANKS": device}
    commands = [
        ["-W", "ignore", "-m", "tests.dist.ranks", function, str(folder), str(rank), str(num_ranks), json.dumps(args)]
        for rank in range(num_ranks)
    ]
    ended = run_together(commands, environment) if device == "cpu" else _started(commands, environment)
    expected = list(range(num_ranks) if survivors is None else survivors)
    failed = [rank for rank in expected if ended[rank].returncode]
    # The first to time out may not be the one that was missing.
    texts = [f"rank {rank} ended with {ended[rank].returncode}: {ended[rank].stderr[-20000:]}" for rank in failed]
    assert not failed, "\n".join(texts)
    return [json.loads(ended[rank].stdout.splitlines()[-1]) for rank in expected]


def _started(
    commands: Sequence[Sequence[str]], environment: dict[str, str]
) -> "list[subprocess.CompletedProcess[str]]":
    """As ``run_together``, by processes that are no forks: those of a GPU. NCCL refuses two ranks of one host on one GPU: they
    are told to be on hosts of their own, which meet through the loopback."""
    import torch

    environment = {**environment, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    share_one = torch.cuda.device_count() < len(commands)
    with tempfile.TemporaryDirectory() as folder:
        written = [[Path(folder, f"{rank}.{kind}") for kind in ("out", "err")] for rank in range(len(commands))]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, (command, (out, err)) in enumerate(zip(commands, written, strict=True)):
                own = {**environment, "NCCL_HOSTID": str(rank)} if share_one else environment
                with out.open("w") as output, err.open("w") as errors:
                    processes.append(
                        subprocess.Popen([sys.executable, *command], cwd=ROOT, env=own, stdout=output, stderr=errors)
                    )
            ends_at = time.monotonic() + TIMEOUT_S
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, ends_at - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            subprocess.CompletedProcess(process.args, process.returncode, out.read_text(), err.read_text())
            for process, (out, err) in zip(processes, written, strict=True)
        ]


def run_each(functions: Sequence[Callable[[], Any]], folder: Path, num_ranks: int = 2) -> dict[str, list[Any]]:
    """By the name of each function of a module, its results on all ranks, one after the other in the same processes: to start
    one and import PyTorch takes longer than most of them."""
    found = run(
        "tests.dist.ranks.each", folder, functions[0].__module__, [f.__name__ for f in functions], num_ranks=num_ranks
    )
    return {name: [of_rank[name] for of_rank in found] for name in found[0]}


def each(module: str, names: list[str]) -> dict[str, Any]:
    import torch

    found = {}
    for name in names:
        torch._dynamo.reset()
        gc.collect()  # what is freed later would count against what is measured
        found[name] = getattr(importlib.import_module(module), name)()
    return found


def main(function: str, folder: str, rank: str, num_ranks: str, args: str) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(SHOWN_AFTER_S, repeat=True)
    backend = "gloo"
    if os.environ["DEVICE_OF_RANKS"] == "cuda":
        backend = "nccl"
        torch.cuda.set_device(int(rank) % torch.cuda.device_count())
    meeting = f"file://{folder}/{function}"
    dist.init_process_group(backend, init_method=meeting, rank=int(rank), world_size=int(num_ranks))
    module, _, name = function.rpartition(".")
    result = getattr(importlib.import_module(module), name)(*json.loads(args))
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception:
        # Groups whose collectives are under way would keep an interpreter that ends, and with it the other ranks, until a timeout.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # As an interpreter ends, but for freeing all that was imported, which takes a third of a second.
    threading._shutdown()  # ends pools and joins threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)
