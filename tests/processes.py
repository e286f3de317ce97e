"""Processes of Python that need not import PyTorch: forks of one that has. To import it takes longer than most of their work.

There are two such servers, as ranks of a job must agree though they hash with other seeds. They start with the first process that
is asked for, and end with the session. They have imported PyTorch, what we depend on, and our package, and have asked the C++
compiler what Inductor asks it. A test of what importing our package does asks for a server without it. A test that measures the
memory of a process, or sets what imports read, starts one of its own by ``subprocess``.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 600
_IMPORTED = """
    torch torch.distributed.checkpoint.state_dict torch.distributed.fsdp torch.distributed.tensor.parallel
    torch.distributed.tensor.experimental torch._dynamo.backends.inductor torch._inductor.compile_fx
    torch._inductor.compiler_bisector torch.utils.cpp_extension networkx
    ortools.sat.python.cp_model ortools.linear_solver.python.model_builder
    rich.console rich.progress
""".split()
"""Nothing here may compute: neither autograd nor OpenMP goes on in a fork."""
_OURS = """
    autohete_fx.backend autohete_fx.whatif.trace autohete_fx.cluster.job.joining
    autohete_fx.cluster.report.history pytest
""".split()
"""Our package, and what most tests import with it."""
_servers: dict[tuple[int, bool], "subprocess.Popen[str]"] = {}
"""By number, and whether our package is imported."""

Ended = subprocess.CompletedProcess[str]


def run_python(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, *, has_ours: bool = True
) -> Ended:
    """What ``python *arguments`` does in our root: a script, ``-c code`` or ``-m module``, after ``-W ignore`` or not.

    ``has_ours``: whether our package may be imported before.
    """
    return run_together([arguments], environment, has_ours=has_ours)[0]


def run_together(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None, *, has_ours: bool = True
) -> list[Ended]:
    """Processes that run at one time, each with the arguments of Python's own command line."""
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
        **(os.environ if environment is None else environment),
    }
    listed = [list(command) for command in commands]
    shares = [share for share in (range(0, len(listed), 2), range(1, len(listed), 2)) if share]
    ended: dict[int, Ended] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for at, share in enumerate(shares):
                asked = {
                    "commands": {place: listed[place] for place in share},
                    "environment": variables,
                    "folder": folder,
                }
                print(json.dumps(asked), file=_server(at, has_ours).stdin, flush=True)
            for at, share in enumerate(shares):
                answer = _server(at, has_ours).stdout
                assert answer is not None
                for place, status in zip(share, json.loads(answer.readline()), strict=True):
                    output, errors = (Path(folder, f"{place}.{kind}").read_text() for kind in ("out", "err"))
                    ended[place] = subprocess.CompletedProcess(listed[place], status, output, errors)
        except BaseException:  # a timeout of pytest's, among others
            end_servers()
            raise
    return [ended[place] for place in range(len(listed))]


def _server(at: int, has_ours: bool) -> "subprocess.Popen[str]":
    key = (at, has_ours)
    if key not in _servers:
        command = [sys.executable, "-W", "ignore", "-m", "tests.processes", *(_OURS if has_ours else ())]
        _servers[key] = subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1, text=True)
    return _servers[key]


@atexit.register
def end_servers() -> None:
    """They end their forks, too."""
    while _servers:
        _, ended = _servers.popitem()
        assert ended.stdin is not None and ended.stdout is not None
        ended.stdin.close()
        ended.wait()
        ended.stdout.close()


def _serve() -> None:
    """Fork the processes of each line of the input, wait for them, print their statuses. A fork returns as one that has ended."""
    for name in (*_IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    _look_around()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        pids = []
        for place, command in asked["commands"].items():
            pids.append(os.fork())
            if not pids[-1]:
                _become(f"{asked['folder']}/{place}", asked["environment"])
                _run(command)
                return
        print(json.dumps(_statuses(pids)), flush=True)


def _look_around() -> None:
    """Find out what each fork would ask for itself: the vectors that C++ may have here, each kind tried by a process, the digest of
    PyTorch's own code, and Inductor's backends."""
    from torch._inductor.codecache import torch_key
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    valid_vec_isa_list()
    torch_key()
    init_backend_registration()


def _become(path: str, environment: dict[str, str]) -> None:
    """What a process of its own would have."""
    for descriptor, file in ((0, os.devnull), (1, f"{path}.out"), (2, f"{path}.err")):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [
        path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    import torch.compiler.config

    torch.compiler.config.cache_key_tag = environment.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _run(command: list[str]) -> None:
    """As the interpreter runs the arguments behind its name."""
    if command[:2] == ["-W", "ignore"]:
        command = command[2:]
    else:
        warnings.resetwarnings()
        warnings.simplefilter("default")
    kind, *arguments = command
    if kind == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = command
        sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def _statuses(pids: list[int]) -> list[int]:
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


if __name__ == "__main__":
    _serve()
