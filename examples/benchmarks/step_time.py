"""Step time and peak at several budgets, against plain ``torch.compile`` in paired runs, and against the best that
PyTorch's own ``activation_memory_budget`` reaches at the same measured peak.

Each budget runs in a process of its own. There a plain model and ours take steps in turns, A B A B, and the figure is
the median of the ratios of neighbouring steps, because machines drift. Peaks are measured without the other models of
the process. `compile_time.py` measures compilation.

    python examples/benchmarks/step_time.py --budgets 100% 50% --steps 20
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results import environment, print_figures, save
from torch import Tensor
from torch._functorch import config as functorch_config
from trained import Loss, Trained

import autohete_fx
from autohete_fx.options import parse_size, resolve_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

SETTINGS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
"""Of PyTorch's activation_memory_budget."""


def main() -> None:
    """Run every budget in a subprocess, print its figures, and write JSON where asked."""
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
    print_figures(environment())
    rows = []
    for budget in arguments.budgets:
        command = [sys.executable, *sys.argv, "--one", budget]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        if finished.returncode:
            sys.exit(f"{budget}: failed\n{finished.stderr[-4000:]}")
        rows.append(json.loads(finished.stdout.splitlines()[-1]))
        print_figures(rows[-1])
    save(arguments.json, rows)


def trained(arguments: argparse.Namespace, *, ours: bool, **how: Any) -> Trained:
    """A GPT in training, with our optimizer or PyTorch's."""
    config = GPTConfig(layers=arguments.layers, width=arguments.width, heads=arguments.width // 32)

    def make() -> tuple[GPT, Any, Loss]:
        model = GPT(config)
        parameters = model.parameters()
        optimizer = autohete_fx.AdamW(parameters) if ours else torch.optim.AdamW(parameters, fused=True)

        def loss_of(tokens: Tensor) -> Tensor:
            return model(tokens, tokens)

        return model, optimizer, loss_of

    return Trained(make, torch.randint(256, (arguments.batch, config.context)), **how)


def measure(arguments: argparse.Namespace, budget: str) -> dict[str, object]:
    """Peaks, the paired ratio of step times, and the best of PyTorch's settings, for one budget."""
    plain = trained(arguments, ours=False)
    budget_bytes = resolve_bytes(parse_size(budget), plain.peak_bytes)
    ours = trained(arguments, ours=True, backend="autohete", options={"memory_budget": budget_bytes})
    plan = next(c for c in reversed(autohete_fx.compilations()) if c.training).plan
    ratios, plain_s = paired(ours.step, plain.step, arguments.steps)
    figures: dict[str, object] = {
        "budget": budget,
        "budget MiB": budget_bytes / 2**20,
        "plain peak MiB": plain.peak_bytes / 2**20,
        "our peak MiB": ours.peak_bytes / 2**20,
        "our peak / predicted": ours.peak_bytes / plan.peak_bytes,
        "step time, ours / plain (median of pairs)": statistics.median(ratios),
        "step time, ours / plain (quartiles)": ", ".join(f"{q:.3f}" for q in statistics.quantiles(ratios)[::2]),
        "step time, predicted / plain measured": plan.step_s / plain_s,
        "solver s": plan.solve_s,
    }
    if not arguments.no_sweep:
        figures |= sweep(arguments, plain, ours.peak_bytes)
    return figures


def paired(one: Callable[[], float], other: Callable[[], float], count: int) -> tuple[list[float], float]:
    """Ratios of steps taken in turns, and the median seconds of the other's."""
    times = [(one(), other()) for _ in range(count)]
    return [a / b for a, b in times], statistics.median(b for _, b in times)


def sweep(arguments: argparse.Namespace, plain: Trained, limit_bytes: int) -> dict[str, object]:
    """PyTorch's activation_memory_budget: its least peak, and the fastest setting whose peak is within ours."""
    least, best = 0, None
    for setting in SETTINGS:
        with functorch_config.patch(activation_memory_budget=setting):
            theirs = trained(arguments, ours=False)
        least = min(least or theirs.peak_bytes, theirs.peak_bytes)
        if theirs.peak_bytes <= limit_bytes:
            ratio = statistics.median(paired(theirs.step, plain.step, arguments.steps)[0])
            best = min(best or (ratio, setting), (ratio, setting))
    return {
        "activation_memory_budget: least peak MiB": least / 2**20,
        "activation_memory_budget: step / plain in our peak": "no setting fits"
        if best is None
        else f"{best[0]:.3f} at {best[1]}",
    }


if __name__ == "__main__":
    main()
