"""Step time and compile time at several budgets, against plain ``torch.compile`` in paired runs, and against the best
that PyTorch's own ``activation_memory_budget`` reaches at the same measured peak.

Each budget runs in a process of its own. There a plain model and ours take steps in turns, A B A B, and the figure is
the median of the ratios of neighbouring steps, because machines drift.

    python examples/benchmarks/step_time.py --budgets 100% 50% --steps 20
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_cache

import autohete_fx
from autohete_fx.options import parse_size, resolve_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

SWEEP = (0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
Step = Callable[[], float]


def main() -> None:
    """Run every budget in a subprocess, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", nargs="+", default=["100%", "50%"], help="shares of plain's peak, or sizes")
    parser.add_argument("--steps", type=int, default=15, help="pairs of steps a budget")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--no-sweep", action="store_true", help="leave PyTorch's activation_memory_budget out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments, arguments.one)))
        return
    print(f"command: python {' '.join(sys.argv)}")
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {platform.processor()}"
    )
    rows = []
    for budget in arguments.budgets:
        finished = subprocess.run(
            [sys.executable, *sys.argv, "--one", budget], capture_output=True, text=True, check=False
        )
        if finished.returncode:
            print(f"{budget}: failed\n{finished.stderr[-2000:]}")
            continue
        rows.append(json.loads(finished.stdout.splitlines()[-1]))
        report(rows[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps({"command": sys.argv, "torch": torch.__version__, "rows": rows}, indent=1))


def report(row: dict[str, object]) -> None:
    """One budget's figures."""
    for key, value in row.items():
        print(f"  {key:<44}{value:.4g}" if isinstance(value, float) else f"  {key:<44}{value}")
    print()


def measure(arguments: argparse.Namespace, budget: str) -> dict[str, object]:
    """Peaks, the paired ratio of step times, compile times and the sweep, for one budget."""
    plain, plain_compile_s = compiled_step(arguments, lambda m: m.compile(), plain=True)
    plain_peak = peak_of(plain)
    budget_bytes = resolve_bytes(parse_size(budget), plain_peak)

    def ours_compile(model: torch.nn.Module) -> None:
        model.compile(backend="autohete", options={"memory_budget": budget_bytes})

    torch._dynamo.reset()
    plain, plain_compile_s = compiled_step(arguments, lambda m: m.compile(), plain=True)
    ours, ours_compile_s = compiled_step(arguments, ours_compile, plain=False)
    compilation = next(c for c in reversed(autohete_fx.compilations()) if c.training)
    ratios = paired(ours, plain, arguments.steps)
    ours_peak = peak_alone(arguments, ours_compile)
    row: dict[str, object] = {
        "budget": budget,
        "budget MiB": budget_bytes / 2**20,
        "plain peak MiB": plain_peak / 2**20,
        "our peak MiB": ours_peak / 2**20,
        "predicted peak MiB": compilation.plan.peak_bytes / 2**20,
        "step time, ours / plain (median of pairs)": statistics.median(ratios),
        "predicted / plain step": compilation.plan.step_s / statistics.median(plain_times),
        "compile time, ours / plain": ours_compile_s / plain_compile_s,
        "solver s": compilation.plan.solve_s,
    }
    if not arguments.no_sweep:
        row.update(sweep(arguments, ours_peak))
    return row


plain_times: list[float] = []


def compiled_step(
    arguments: argparse.Namespace, compile_model: Callable[[torch.nn.Module], None], *, plain: bool
) -> tuple[Step, float]:
    """A function that takes one training step and returns its seconds; and the seconds of the first, compiling one."""
    torch.manual_seed(0)
    config = GPTConfig(layers=arguments.layers, width=arguments.width, heads=arguments.width // 32)
    model = GPT(config)
    optimizer: Any = autohete_fx.AdamW(model.parameters())
    if plain:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    compile_model(model)
    tokens = torch.randint(256, (arguments.batch, config.context))

    def step() -> float:
        begin = time.perf_counter()
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    with fresh_cache():
        first_s = step()
    for _ in range(3):
        step()
    return step, first_s


def paired(ours: Step, plain: Step, count: int) -> list[float]:
    """Ratios of steps taken in turns."""
    ratios = []
    for _ in range(count):
        ours_s, plain_s = ours(), plain()
        plain_times.append(plain_s)
        ratios.append(ours_s / plain_s)
    return ratios


def peak_alone(arguments: argparse.Namespace, compile_model: Callable[[torch.nn.Module], None]) -> int:
    """Peak device memory of our steps, without the bytes of models that were made before."""
    torch._dynamo.reset()
    gc.collect()
    with autohete_fx.MemoryMeter("cpu") as meter:
        foreign = meter.start_bytes
    step, _ = compiled_step(arguments, compile_model, plain=False)
    return peak_of(step) - foreign


def peak_of(step: Step) -> int:
    """Peak device memory of two steps."""
    with autohete_fx.MemoryMeter("cpu") as meter:
        step()
        step()
    return meter.peak_bytes


def sweep(arguments: argparse.Namespace, peak_limit: int) -> dict[str, object]:
    """The fastest setting of PyTorch's activation_memory_budget whose measured peak is within ours."""
    best: tuple[float, float] | None = None
    least = None
    for setting in SWEEP:
        torch._dynamo.reset()
        gc.collect()
        with autohete_fx.MemoryMeter("cpu") as meter:
            foreign = meter.start_bytes
        with functorch_config.patch(activation_memory_budget=setting):
            step, _ = compiled_step(arguments, lambda m: m.compile(), plain=True)
            peak = peak_of(step) - foreign
            least = peak if least is None else min(least, peak)
            if peak <= peak_limit:
                torch._dynamo.reset()
                plain, _ = compiled_step(arguments, lambda m: m.compile(), plain=True)
                ratio = statistics.median(paired(step, plain, arguments.steps))
                best = min(best or (ratio, setting), (ratio, setting))
    assert least is not None
    return {
        "PyTorch's budget: least peak MiB": least / 2**20,
        "PyTorch's budget: best step / plain at our peak": "none fits" if best is None else best[0],
    }


if __name__ == "__main__":
    main()
