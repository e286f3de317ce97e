"""Runs a function of a test's module in processes that make up a job, one a rank, on gloo or NCCL."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(
    function: str,
    folder: Path,
    *args: Any,
    num_ranks: int = 2,
    survivors: Sequence[int] | None = None,
    device: str = "cpu",
) -> list[Any]:
    """What ``function`` (``module.name``) returned on each rank, or on those that are to survive: values of JSON. Ranks meet in a file
    of the folder, and have a device each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DEVICE_OF_RANKS": device, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    commands = [
        [sys.executable, "-W", "ignore", "-m", "tests.dist.ranks", function, str(folder), str(rank), str(num_ranks)]
        for rank in range(num_ranks)
    ]
    processes = [
        subprocess.Popen([*command, json.dumps(args)], cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True)
        for command in commands
    ]
    try:
        ended = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = []
    for rank in range(num_ranks) if survivors is None else survivors:
        output, errors = ended[rank]
        assert processes[rank].returncode == 0, errors[-4000:]
        found.append(json.loads(output.splitlines()[-1]))
    return found


def run_each(functions: Sequence[Callable[[], Any]], folder: Path, num_ranks: int = 2) -> dict[str, list[Any]]:
    """By the name of each function of a module, its results on all ranks, one after the other in the same processes: to start one and
    import PyTorch takes longer than most of them."""
    found = run("tests.dist.ranks.each", folder, functions[0].__module__, [f.__name__ for f in functions], num_ranks=num_ranks)
    return {name: [of_rank[name] for of_rank in found] for name in found[0]}


def each(module: str, names: list[str]) -> dict[str, Any]:
    import torch

    found = {}
    for name in names:
        torch._dynamo.reset()
        found[name] = getattr(importlib.import_module(module), name)()
    return found


def main(function: str, folder: str, rank: str, num_ranks: str, args: str) -> None:
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if os.environ["DEVICE_OF_RANKS"] == "cuda":
        backend = "nccl"
        torch.cuda.set_device(int(rank))
    meeting = f"file://{folder}/{function}"
    dist.init_process_group(backend, init_method=meeting, rank=int(rank), world_size=int(num_ranks))
    module, _, name = function.rpartition(".")
    result = getattr(importlib.import_module(module), name)(*json.loads(args))
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
