"""What it is worth that the memory trace follows Inductor's fusion, order and reuse: compilations, and plans.

The trace of a rewritten graph decides whether its plan is compiled at all (`autohete_fx.profiler.memory.liveness`). Each of the
twelve pairs of model and budget of `prediction_truth.py` is compiled twice: with that trace, and with a plain one, in which kernels
run in the graph's order and every result has memory of its own. Compiled code is judged in the same way by both. A row has how
often the graph was compiled, the seconds of a core of all that, and the last plan's predicted step and peak. Each runs in a process
whose seconds have a limit; one that comes to it counts as not ended. Kernels that a run before has compiled are in a cache, so
seconds of the first run of a model compare with no others. The first process measures the machine, and all others plan for it, so
that predicted steps compare.

    python examples/benchmarks/trace_savings.py --json examples/benchmarks/results/trace_savings.json
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from prediction_truth import MODELS
from results import environment, print_figures, save

import autohete_fx
from autohete_fx.compiler import training
from autohete_fx.compiler.graph import GraphCompiler
from autohete_fx.errors import InfeasiblePlanError

_PAIRS = Path(__file__).parent / "results" / "prediction_truth_cpu.json"
_SETTINGS = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the process whose seconds are counted
}
_PATIENCE = 10
"""Seconds of the clock for each second of a core that a process may take."""
_TRACES = ("as Inductor", "plain")


class _OutOfTimeError(BaseException):
    """The limit on seconds of a core came first; no handler of errors on the way catches it."""


def main() -> None:
    """Compile every pair with both traces, each in a process of its own, print the table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--limit", type=int, default=600, help="seconds of a core that one process may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "BYTES", "TRACE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, budget, trace = arguments.one
        print(json.dumps(compiled(name, int(budget), trace, arguments.limit)))
        return
    print_figures(environment())
    pairs = [pair for pair in json.loads(_PAIRS.read_text())["rows"] if pair["model"] in arguments.models]
    rows: list[dict[str, Any]] = []
    print(f"{'model':<9}{'budget':>7}  {'trace':<12}{'compiled':>8} {'core s':>8} {'step ms':>8} {'of budget':>9}")
    with tempfile.TemporaryDirectory() as caches:
        for pair, trace in itertools.product(pairs, _TRACES):
            limit = ("--limit", str(arguments.limit))
            found = in_process(caches, *limit, "--one", pair["model"], str(pair["budget bytes"]), trace)
            rows.append({"model": pair["model"], "budget": pair["budget"], "trace": trace, **found})
            print(line(rows[-1]), flush=True)
            save(arguments.json, rows)
    print()
    print_figures(summary(rows))


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    start = (
        f"{row['model']:<9}{row['budget']:>7}  {row['trace']:<12}{row['compilations']:>8} {row['core seconds']:>8.1f}"
    )
    if row["refused"] or not row["ended"]:
        return f"{start}  {'refused' if row['refused'] else 'did not end'}"
    return f"{start} {row['predicted step s'] * 1e3:>8.1f} {row['share of budget']:>9.1%}"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Both traces side by side."""
    figures: dict[str, object] = {}
    of = {trace: [row for row in rows if row["trace"] == trace] for trace in _TRACES}
    for trace in _TRACES:
        figures[f"{trace}: compilations"] = sum(row["compilations"] for row in of[trace])
        figures[f"{trace}: core seconds"] = sum(row["core seconds"] for row in of[trace])
        figures[f"{trace}: refused"] = sum(row["refused"] for row in of[trace])
        figures[f"{trace}: did not end"] = sum(not row["ended"] for row in of[trace])
    pairs = [
        (ours["predicted step s"], plain["predicted step s"])
        for ours, plain in zip(*of.values(), strict=True)
        if "predicted step s" in ours and "predicted step s" in plain
    ]
    slower = [plain / ours - 1 for ours, plain in pairs]
    figures["steps longer with the plain trace, median"] = f"{statistics.median(slower):.1%}"
    figures["steps longer with the plain trace, most"] = f"{max(slower):.1%}"
    return figures


def in_process(caches: str, *words: str) -> dict[str, Any]:
    """One compilation in a process of its own. ``caches`` has kernels that another run compiled, and the machine as the first one
    measured it, but no graphs and no plans."""
    measured = Path(caches) / "machine"
    with tempfile.TemporaryDirectory() as own:
        if measured.exists():
            shutil.copytree(measured, Path(own) / "machine")
        places = {"TORCHINDUCTOR_CACHE_DIR": caches, "AUTOHETE_CACHE_DIR": own, **_SETTINGS}
        command = [sys.executable, sys.argv[0], *words]
        finished = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=False)
        if not measured.exists() and (Path(own) / "machine").exists():
            shutil.copytree(Path(own) / "machine", measured)
    if finished.returncode:
        sys.exit(f"{' '.join(words)}: failed\n{finished.stderr[-4000:]}")
    return json.loads(finished.stdout.splitlines()[-1])


def compiled(name: str, budget_bytes: int, trace: str, limit_s: int) -> dict[str, Any]:
    """One training step within a budget: how often its graph was compiled, and what came of it. Blocks are priced, not timed, so
    that both traces plan for the same costs."""

    def stop(*_: object) -> None:
        traceback.print_stack()
        raise _OutOfTimeError

    for limit in (signal.SIGXCPU, signal.SIGALRM):
        signal.signal(limit, stop)
    signal.alarm(_PATIENCE * limit_s)  # for one that waits
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 30))
    if trace == "plain":
        full = training.trace_step

        def traced(*graphs: Any, **how: Any) -> Any:
            return full(*graphs, **{**how, "inner_backend": "eager"})

        training.trace_step = traced
    compilations, compile_fx = [0], GraphCompiler._compile_fx

    def counted(self: GraphCompiler, example_inputs: Sequence[Any]) -> Any:
        compilations[0] += 1
        return compile_fx(self, example_inputs)

    GraphCompiler._compile_fx = counted
    torch.manual_seed(0)
    model, loss_of = MODELS[name]()
    autohete_fx.AdamW(model.parameters())
    model.compile(backend="autohete", options={"memory_budget": budget_bytes, "profile": "analytic"})
    began, refused, ended = _core_seconds(), False, True
    try:
        loss_of()
    except InfeasiblePlanError:
        refused = True
    except _OutOfTimeError:
        ended = False
    figures: dict[str, Any] = {
        "compilations": compilations[0],
        "core seconds": _core_seconds() - began,
        "refused": refused,
        "ended": ended,
    }
    for compilation in autohete_fx.compilations():
        figures["predicted step s"] = compilation.predicted_step_s
        figures["share of budget"] = compilation.predicted_peak_bytes / budget_bytes
    return figures


def _core_seconds() -> float:
    """Of this process and of the compilers that it ran."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


if __name__ == "__main__":
    main()
