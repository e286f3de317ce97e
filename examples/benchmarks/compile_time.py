"""Compile time against plain ``torch.compile``, and where ours goes.

Both compile the same model with empty Inductor caches, in processes of their own, in turns; the figure is the median
of the ratios of neighbours. Seconds are those of the first training step, after a small other model was compiled the
same way, which loads the compiler and, for ours, measures the machine, as happens once a machine. Blocks are profiled
anew every time. The budget is a share of the plain model's peak.

    python examples/benchmarks/compile_time.py --layers 24 --budget 50%
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from results import environment, print_figures, save
from torch._inductor.utils import fresh_cache

import autohete_fx
from autohete_fx.options import parse_size, resolve_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig


def main() -> None:
    """Compile in turns, print the figures, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--budget", default="50%", help="a share of plain's peak, or a size")
    parser.add_argument("--profile", choices=["auto", "measured", "analytic"], default="auto")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=["plain", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--budget-bytes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(compile_once(arguments)))
        return
    print_figures(environment())
    rows = []
    for _ in range(arguments.pairs):
        plain = in_process("plain")
        budget_bytes = resolve_bytes(parse_size(arguments.budget), int(plain["peak bytes"]))
        ours = in_process("ours", "--budget-bytes", str(budget_bytes))
        rows.append(
            {
                "plain s": plain["first step s"],
                "ours s": ours["first step s"],
                "of that solver s": ours["solver s"],
                "(ours - solver) / plain": (ours["first step s"] - ours["solver s"]) / plain["first step s"],
            }
        )
        print_figures(rows[-1])
    print_figures(
        {"median of (ours - solver) / plain": statistics.median(row["(ours - solver) / plain"] for row in rows)}
    )
    save(arguments.json, rows)


def in_process(which: str, *words: str) -> dict[str, float]:
    """The figures of one compilation in a process and cache directories of its own."""
    with tempfile.TemporaryDirectory() as caches:
        command = [sys.executable, *sys.argv, "--one", which, *words]
        places = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "AUTOHETE_CACHE_DIR": f"{caches}/autohete"}
        finished = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(f"{which}: failed\n{finished.stderr[-4000:]}")
    return json.loads(finished.stdout.splitlines()[-1])


def compile_once(arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of the first step and of the solver in it, and the peak of later ones in bytes."""
    ours = arguments.one == "ours"
    small = arguments.width // 2
    how: dict[str, Any] = {}
    if ours:
        how = {"backend": "autohete", "options": {"profile": arguments.profile, "memory_budget": "1TiB"}}
    first_step(GPTConfig(layers=1, width=small, heads=small // 32), arguments.batch, ours, how)
    if ours:
        how["options"] |= {"memory_budget": arguments.budget_bytes}
    torch._dynamo.reset()
    config = GPTConfig(layers=arguments.layers, width=arguments.width, heads=arguments.width // 32)
    with fresh_cache():
        figures = first_step(config, arguments.batch, ours, how)
    plans = [c.plan for c in autohete_fx.compilations() if c.training]
    return {**figures, "solver s": plans[-1].solve_s if plans else 0.0}


def first_step(config: GPTConfig, batch: int, ours: bool, how: dict[str, Any]) -> dict[str, float]:
    """Train one step, which compiles, and two more, which are metered."""
    torch.manual_seed(0)
    with autohete_fx.MemoryMeter("cpu") as meter:
        others = meter.start_bytes
    model = GPT(config)
    make: Any = autohete_fx.AdamW if ours else torch.optim.AdamW
    optimizer = make(model.parameters())
    model.compile(**how)
    tokens = torch.randint(256, (batch, config.context))

    def step() -> float:
        begin = time.perf_counter()
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    first_step_s = step()
    with autohete_fx.MemoryMeter("cpu") as meter:
        step()
        step()
    return {"first step s": first_step_s, "peak bytes": meter.peak_bytes - others}


if __name__ == "__main__":
    main()
