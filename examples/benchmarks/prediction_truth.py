"""Predictions against measurements: step time and peak of four models at three budgets each, on the CPU.

Each budget is a share of what the model needs under plain ``torch.compile``. Every (model, budget) pair runs three times, each
time in a process of its own that measures the machine and profiles the blocks anew; kernels that Inductor has compiled before
are in its cache, so the first run of a model has the longest profile. What the plan predicts is then held against training
steps and against the peak of `autohete_fx.MemoryMeter`. Machines drift between the minute of the profile and that of the steps,
so a pair's figures are those of the run whose ratio is the median; peaks are judged by all runs. Steps are taken in four
whiles and the figure is the median of the fastest one, since others on the machine only ever slow steps down. Threads are
bound to cores: left alone, the system may keep two of a team on one core for seconds, and steps then take six times as long.

    python examples/benchmarks/prediction_truth.py --json examples/benchmarks/results/prediction_truth_cpu.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from results import environment, print_figures, save

import autohete_fx
from autohete_fx.options import parse_size, resolve_bytes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

_WARM_UP = 3
_WHILES, _PAUSE_S = 4, 1.5
_SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096, "max_position_embeddings": 256}


def main() -> None:
    """Run every pair in a process of its own, print the table and how far off it is, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--budgets", nargs="+", default=["100%", "75%", "60%"], help="shares of plain's peak, or sizes")
    parser.add_argument("--steps", type=int, default=10, help="in each of the four whiles")
    parser.add_argument("--runs", type=int, default=3, help="of every pair")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--budget-bytes", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.budget_bytes, arguments.steps)))
        return
    print_figures(environment())
    with tempfile.TemporaryDirectory() as caches:
        rows = table(arguments.models, arguments.budgets, arguments.runs, arguments.steps, caches)
    print_figures(summary(rows))
    save(arguments.json, rows)


def table(models: Sequence[str], budgets: Sequence[str], runs: int, steps: int, caches: str) -> list[dict[str, Any]]:
    """Run and print all pairs."""
    rows = []
    print(f"{'':<16}  {'step ms':>21}  {'':>5}  {'peak MiB':>17}  {'':>5}  {'profile':>7}")
    print(
        f"{'model':<8}{'budget':>8}  {'predicted':>10} {'measured':>10}  ratio  {'pred.':>8} {'measured':>8}  ratio  {'s':>7}"
        "  all step ratios"
    )
    for model in models:
        plain = in_process(caches, "--one", model)
        for budget in budgets:
            budget_bytes = resolve_bytes(parse_size(budget), int(plain["peak bytes"]))
            words = ("--one", model, "--budget-bytes", str(budget_bytes), "--steps", str(steps))
            found = [in_process(caches, *words) for _ in range(runs)]
            rows.append(
                {"model": model, "budget": budget, "budget bytes": budget_bytes, **of_runs(found), "plain": plain}
            )
            print(line(rows[-1]), "", *(f"{ratio:.2f}" for ratio in rows[-1]["step ratios"]), flush=True)
    print()
    return rows


def of_runs(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run of the median step ratio, and what all of them say."""
    found = sorted(found, key=step_ratio)
    return {
        **found[len(found) // 2],
        "step ratios": [step_ratio(run) for run in found],
        "peak ratios": [peak_ratio(run) for run in found],
        "longest profile s": max(run["profile s"] for run in found),
    }


def line(row: dict[str, Any]) -> str:
    """One pair as a line of the table."""
    step = f"{row['predicted step s'] * 1e3:>10.1f} {row['step s'] * 1e3:>10.1f}  {step_ratio(row):5.2f}"
    peak = f"{row['predicted peak bytes'] / 2**20:>8.1f} {row['peak bytes'] / 2**20:>8.1f}  {peak_ratio(row):5.3f}"
    return f"{row['model']:<8}{row['budget']:>8}  {step}  {peak}  {row['longest profile s']:>7.1f}"


def step_ratio(row: dict[str, Any]) -> float:
    """Predicted over measured."""
    return row["predicted step s"] / row["step s"]


def peak_ratio(row: dict[str, Any]) -> float:
    """Predicted over measured."""
    return row["predicted peak bytes"] / row["peak bytes"]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, object]:
    """The largest and the median errors over all pairs."""
    steps = [abs(step_ratio(row) - 1) for row in rows]
    peaks = [ratio - 1 for row in rows for ratio in row["peak ratios"]]
    return {
        "step time: largest error": f"{max(steps):.1%}",
        "step time: median error": f"{statistics.median(steps):.1%}",
        "peak: most above measured": f"{max(0.0, *peaks):.2%}",
        "peak: most below measured": f"{max(0.0, *(-p for p in peaks)):.2%}",
        "profile: longest, seconds": max(row["longest profile s"] for row in rows),
    }


def in_process(caches: str, *words: str) -> dict[str, Any]:
    """The figures of one training in a process that finds compiled kernels, and neither machine nor profile, in caches."""
    with tempfile.TemporaryDirectory() as own:
        places = {"TORCHINDUCTOR_CACHE_DIR": caches, "AUTOHETE_CACHE_DIR": own, "OMP_PROC_BIND": "true"}
        command = [sys.executable, *sys.argv, *words]
        finished = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(f"{' '.join(words)}: failed\n{finished.stderr[-4000:]}")
    return json.loads(finished.stdout.splitlines()[-1])


def measure(name: str, budget_bytes: int | None, steps: int) -> dict[str, Any]:
    """Train a model, with the plain backend where there is no budget; what was predicted and what was measured."""
    torch.manual_seed(0)
    with autohete_fx.MemoryMeter("cpu") as meter:
        others = meter.start_bytes
    model, loss_of = MODELS[name]()
    if budget_bytes is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
        model.compile()
    else:
        optimizer = autohete_fx.AdamW(model.parameters())
        model.compile(backend="autohete", options={"memory_budget": budget_bytes, "profile": "measured"})

    def step() -> list[float]:
        """One training step; seconds of its forward, its backward, the optimizer, and all."""
        begin = time.perf_counter()
        loss = loss_of()
        middle = time.perf_counter()
        loss.backward()
        del loss
        stepped = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        return [middle - begin, stepped - middle, end - stepped, end - begin]

    whiles = []
    with autohete_fx.MemoryMeter("cpu") as first:
        for _ in range(_WARM_UP):
            step()
    with autohete_fx.MemoryMeter("cpu") as meter:
        for _ in range(_WHILES):
            whiles.append([step() for _ in range(steps)])
            time.sleep(_PAUSE_S)
    medians = [[statistics.median(phase) for phase in zip(*each, strict=True)] for each in whiles]
    best = min(range(_WHILES), key=lambda i: medians[i][-1])
    figures: dict[str, Any] = {
        "step s": medians[best][-1],
        "step s, quartiles": statistics.quantiles(each[-1] for each in whiles[best])[::2],
        "step s, all whiles": [each[-1] for each in medians],
        "forward, backward, optimizer s": medians[best][:3],
        "peak bytes": meter.peak_bytes - others,
        "peak bytes with compiling and profiling": max(first.peak_bytes, meter.peak_bytes) - others,
    }
    return figures if budget_bytes is None else {**figures, **predicted()}


def predicted() -> dict[str, Any]:
    """What the plan of the one training graph predicts, and the plan in words."""
    (compilation,) = [c for c in autohete_fx.compilations() if c.training]
    ends = {
        label: max((e.end_s for e in compilation.events if e.label == label), default=0.0)
        for label in ("forward", "backward")
    }
    phases = [ends["forward"], ends["backward"] - ends["forward"], compilation.plan.step_s - ends["backward"]]
    return {
        "predicted step s": compilation.predicted_step_s,
        "predicted forward, backward, optimizer s": phases,
        "predicted peak bytes": compilation.predicted_peak_bytes,
        "profile s": compilation.compile_s["profiling"],
        "profile source": compilation.profile_source,
        "plan": compilation.plan_table(),
    }


LossOf = Callable[[], torch.Tensor]


def gpt() -> tuple[torch.nn.Module, LossOf]:
    """The GPT of the other benchmarks."""
    config = GPTConfig(layers=6, width=192, heads=6)
    model, tokens = GPT(config), torch.randint(256, (4, config.context))
    return model, lambda: model(tokens, tokens)


def of_transformers(kind: str, batch: int, **sizes: Any) -> tuple[torch.nn.Module, LossOf]:
    """A model of the transformers library with random weights."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **sizes})
    head = "ForMaskedLM" if kind == "Bert" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(config).train()
    tokens = torch.randint(3, config.vocab_size, (batch, 128))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


_DECODER = {"num_key_value_heads": 4, "use_cache": False}
MODELS: dict[str, Callable[[], tuple[torch.nn.Module, LossOf]]] = {
    "gpt": gpt,
    "llama": lambda: of_transformers("Llama", 4, hidden_size=384, intermediate_size=1024, **_DECODER),
    "bert": lambda: of_transformers("Bert", 8, hidden_size=256, intermediate_size=1024),
    "mixtral": lambda: of_transformers(
        "Mixtral", 4, hidden_size=256, intermediate_size=512, num_local_experts=4, **_DECODER
    ),
}


if __name__ == "__main__":
    main()
