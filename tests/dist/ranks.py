"""Runs a function of a test's module in processes that make up a job, one a rank, on gloo or NCCL.

Ranks on the CPU are forked from processes that have imported PyTorch and our package: to do so takes longer than most of their work.
These are two, as neighbours must agree though they hash with other seeds. They start with the first ranks, and end with the session.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
IMPORTED = """
    torch.distributed.checkpoint.state_dict torch.distributed.fsdp torch.distributed.tensor.parallel
    torch.distributed.tensor.experimental torch._dynamo.backends.inductor torch._inductor.compile_fx torch._inductor.compiler_bisector
    torch.utils.cpp_extension autohete_fx.backend autohete_fx.cluster autohete_fx.runtime.place autohete_fx.runtime.shard
""".split()
"""What ranks are forked with. Nothing here may compute: neither autograd nor OpenMP goes on in a fork."""
_servers: list["subprocess.Popen[str]"] = []


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
    ranks = [[function, str(folder), str(rank), str(num_ranks), json.dumps(args)] for rank in range(num_ranks)]
    ended = forked(ranks, environment) if device == "cpu" else started(ranks, environment)
    found = []
    for rank in range(num_ranks) if survivors is None else survivors:
        status, output, errors = ended[rank]
        assert status == 0, f"rank {rank} ended with {status}: {errors[-4000:]}"
        found.append(json.loads(output.splitlines()[-1]))
    return found


Ended = list[tuple[int, str, str]]
"""The exit status, output and errors of each rank."""


def started(ranks: list[list[str]], environment: dict[str, str]) -> Ended:
    """Ranks as processes of their own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.dist.ranks"]
    processes = [
        subprocess.Popen([*command, *rank], cwd=ROOT, env=environment, stdout=-1, stderr=-1, text=True) for rank in ranks
    ]
    try:
        ended = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


def forked(ranks: list[list[str]], environment: dict[str, str]) -> Ended:
    """Ranks as forks of the processes that have imported everything. Variables which imports read are those of the first call."""
    parts = [part for part in (ranks[0::2], ranks[1::2]) if part]
    ended: dict[str, tuple[int, str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for at, part in enumerate(parts):
                ask = server(at, environment).stdin
                print(json.dumps({"ranks": part, "environment": environment, "folder": folder}), file=ask, flush=True)
            for at, part in enumerate(parts):
                answer = server(at, environment).stdout
                assert answer is not None
                for (_, _, rank, *_), status in zip(part, json.loads(answer.readline()), strict=True):
                    output, errors = (Path(folder, f"{rank}.{kind}").read_text() for kind in ("out", "err"))
                    ended[rank] = status, output, errors
        except BaseException:  # a timeout of pytest's, among others
            end_servers()
            raise
    return [ended[rank] for _, _, rank, *_ in ranks]


def server(at: int, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """One of two processes that fork ranks."""
    if at == len(_servers):
        command = [sys.executable, "-W", "ignore", "-m", "tests.dist.ranks", "serve"]
        _servers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdin=-1, stdout=-1, text=True))
    return _servers[at]


@atexit.register
def end_servers() -> None:
    """They end their ranks, too."""
    while _servers:
        ended = _servers.pop()
        assert ended.stdin is not None and ended.stdout is not None
        ended.stdin.close()
        ended.wait()
        ended.stdout.close()


def serve() -> None:
    """Fork the ranks of each line of the input, wait for them, and print their statuses. A fork returns as a rank that has ended."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        pids = []
        for arguments in asked["ranks"]:
            pids.append(os.fork())
            if not pids[-1]:
                become_rank(f"{asked['folder']}/{arguments[2]}", asked["environment"])
                main(*arguments)
                return
        print(json.dumps(statuses_of(pids)), flush=True)


def become_rank(path: str, environment: dict[str, str]) -> None:
    """What a process of its own would have."""
    for descriptor, file in ((0, os.devnull), (1, f"{path}.out"), (2, f"{path}.err")):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    import torch.compiler.config

    torch.compiler.config.cache_key_tag = environment.get("TORCH_COMPILE_CACHE_KEY_TAG", "")


def statuses_of(pids: list[int]) -> list[int]:
    """Exit statuses of children, which are killed after a time, and where nobody waits for them any longer."""
    statuses: dict[int, int] = {}
    ends_at = time.monotonic() + TIMEOUT_S
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        nobody_waits = bool(select.select([sys.stdin], [], [], 0.01)[0])
        if nobody_waits or time.monotonic() > ends_at:
            for pid in set(pids) - set(statuses):
                os.kill(pid, signal.SIGKILL)
    return [statuses[pid] for pid in pids]


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
    serve() if sys.argv[1:] == ["serve"] else main(*sys.argv[1:])
