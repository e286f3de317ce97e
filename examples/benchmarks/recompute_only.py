"""Recomputation alone, against PyTorch's own: step times at measured peaks, ours beside ``activation_memory_budget``.

For each model the peaks of plain ``torch.compile`` and of recomputing every block bound the range; five budgets stand
between them, raised to the smallest that our planner finds a plan for. Ours solves each with ``allow=["recompute"]``.
PyTorch's setting is swept, because its peak neither is the setting's share of plain's nor falls with it. Per budget, the
best that PyTorch has is the setting with the least median step time among those whose measured peak is at most ours.

Everything compiled for a model stays in one process and takes steps in turns, in alternating direction, because machines
drift; a figure is the median of the ratios of two steps of one turn. Peaks are measured without the others in the process.
All use ``torch.optim.AdamW(fused=True)``.

    python examples/benchmarks/recompute_only.py --turns 11 --plot curves.png
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from results import environment, print_figures, save
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from trained import Loss, Trained

import autohete_fx
from autohete_fx import Activations, BlockDecision, Plan

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

SETTINGS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.1, 0.0)
"""Of PyTorch's activation_memory_budget."""
POINTS = 5
PLAIN, FULL = "plain", "recompute all"


def main() -> None:
    """Run every model in a subprocess, print its curves, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--turns", type=int, default=11, help="timed steps of everything compiled")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--profile", choices=["measured", "analytic"], default="measured")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG of the curves; needs matplotlib")
    parser.add_argument("--one", choices=list(MODELS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    print_figures(environment())
    rows = []
    for name in arguments.models:
        command = [sys.executable, *sys.argv, "--one", name]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if finished.returncode:
            sys.exit(f"{name}: failed")
        rows.append(json.loads(finished.stdout.splitlines()[-1]))
        print_curves(rows[-1])
    save(arguments.json, rows)
    if arguments.plot:
        plot(rows, arguments.plot)


# -- the models -----------------------------------------------------------------------------------------------------


def gpt(arguments: argparse.Namespace) -> tuple[nn.Module, Loss]:
    """A GPT in plain PyTorch with dropout."""
    model = GPT(GPTConfig(layers=arguments.layers, width=arguments.width, heads=arguments.width // 32))

    def loss_of(tokens: Tensor) -> Tensor:
        return model(tokens, tokens)

    return model, loss_of


def llama(arguments: argparse.Namespace) -> tuple[nn.Module, Loss]:
    """A Llama of transformers with random weights and grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = arguments.width // 32
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=arguments.width,
            intermediate_size=arguments.width * 8 // 3 // 32 * 32,
            num_hidden_layers=arguments.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            use_cache=False,
        )
    ).train()

    def loss_of(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss_of


MODELS: Mapping[str, Callable[[argparse.Namespace], tuple[nn.Module, Loss]]] = {"gpt": gpt, "llama": llama}


# -- measuring ------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything compiled for one model: peaks, median ratios to plain, and our points against PyTorch's best."""
    ran: dict[str, Trained] = {}
    tokens = torch.randint(256, (arguments.batch, 256))

    def run(name: str, **how: Any) -> Trained:
        ran[name] = Trained(lambda: trained_with_adamw(*MODELS[arguments.one](arguments)), tokens, **how)
        print(f"  {arguments.one} {name}: peak {ran[name].peak_bytes / 2**20:.1f} MiB", file=sys.stderr, flush=True)
        return ran[name]

    def run_ours(name: str, **options: Any) -> Trained:
        options = {"profile": arguments.profile, "allow": ["recompute"], **options}
        return run(name, backend="autohete", options=options)

    keep_bytes = run(PLAIN).peak_bytes
    model, loss_of = MODELS[arguments.one](arguments)
    labels = autohete_fx.preview(loss_of, tokens, options={"profile": "analytic"})[0].plan.labels
    del model, loss_of
    every = Plan(labels=labels, decisions=(BlockDecision(activations=Activations.RECOMPUTE),) * len(labels))
    full_bytes = run_ours(FULL, plan=every).peak_bytes
    plans: dict[str, Plan] = {}
    budgets = [keep_bytes - (keep_bytes - full_bytes) * point // (POINTS + 1) for point in range(1, POINTS + 1)]
    for index, budget_bytes in enumerate(budgets):
        name = f"ours {index + 1}"
        try:
            run_ours(name, memory_budget=budget_bytes)
        except autohete_fx.InfeasiblePlanError as error:
            assert error.smallest_budget_bytes is not None
            budgets[index] = error.smallest_budget_bytes
            run_ours(name, memory_budget=budgets[index])
        plans[name] = next(c for c in reversed(autohete_fx.compilations()) if c.training).plan
    for setting in SETTINGS:
        with functorch_config.patch(activation_memory_budget=setting):
            run(f"setting {setting}")
    times: dict[str, list[float]] = {name: [] for name in ran}
    for turn in range(arguments.turns):
        for name in reversed(ran) if turn % 2 else ran:
            times[name].append(ran[name].step())
    peaks = {name: trained.peak_bytes for name, trained in ran.items()}
    return {
        "model": arguments.one,
        "plain step s": statistics.median(times[PLAIN]),
        "curves": {name: {"peak bytes": peaks[name], **ratio(times[name], times[PLAIN])} for name in ran},
        "points": [
            {
                "ours": name,
                "budget bytes": budget_bytes,
                "plan": " ".join(decision.activations.value for decision in plans[name].decisions),
                "predicted step s": plans[name].step_s,
                "at our peak": against_best(name, times, peaks, peaks[name]),
                "within the budget": against_best(name, times, peaks, budget_bytes),
            }
            for name, budget_bytes in zip(plans, budgets, strict=True)
        ],
    }


def trained_with_adamw(model: nn.Module, loss_of: Loss) -> tuple[nn.Module, Any, Loss]:
    """The same optimizer for all: what differs is recomputation."""
    return model, torch.optim.AdamW(model.parameters(), fused=True), loss_of


def ratio(times: list[float], others: list[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of one turn's steps."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times, others, strict=True)])
    return {"median": middle, "lower quartile": low, "upper quartile": high}


def against_best(
    name: str, times: Mapping[str, list[float]], peaks: Mapping[str, int], limit_bytes: int
) -> dict[str, Any] | None:
    """Our step time as a ratio to that of PyTorch's best within the limit; None where no setting is within it."""
    within = [other for other in times if other.startswith(("setting", PLAIN)) and peaks[other] <= limit_bytes]
    if not within:
        return None
    best = min(within, key=lambda other: ratio(times[other], times[PLAIN])["median"])
    return {"best": best, "peak bytes": peaks[best], **ratio(times[name], times[best])}


# -- printing -------------------------------------------------------------------------------------------------------


def print_curves(row: Mapping[str, Any]) -> None:
    """Both curves, then each of our points against PyTorch's best."""
    print(f"{row['model']}: a plain step takes {row['plain step s']:.3f} s\n")
    print(f"  {'':<24}{'peak MiB':>10}{'step / plain':>14}   quartiles")
    for name, figures in row["curves"].items():
        print(f"  {name:<24}{figures['peak bytes'] / 2**20:>10.1f}{spread(figures)}")
    print("\n  ours / the best setting whose peak is at most ours, or at most the budget")
    for point in row["points"]:
        for where in ("at our peak", "within the budget"):
            best = point[where]
            found = "no setting fits" if best is None else f"{spread(best)}   {best['best']}"
            print(f"  {point['ours'] if where == 'at our peak' else '':<24}{where:<20}{found}")
        print(f"  {'':<24}budget {point['budget bytes'] / 2**20:.1f} MiB: {point['plan']}")
    print(flush=True)


def spread(figures: Mapping[str, float]) -> str:
    """A median and its quartiles."""
    return f"{figures['median']:>14.3f}   {figures['lower quartile']:.3f}, {figures['upper quartile']:.3f}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Both curves of every model as a PNG."""
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(1, len(rows), figsize=(5 * len(rows), 4), squeeze=False)
    for pane, row in zip(panes[0], rows, strict=True):
        for label, start in (("autohete, recompute only", "ours"), ("activation_memory_budget", "setting")):
            chosen = [f for name, f in row["curves"].items() if name.startswith((start, PLAIN))]
            chosen.sort(key=lambda figures: figures["peak bytes"])
            xs = [figures["peak bytes"] / 2**20 for figures in chosen]
            pane.plot(xs, [figures["median"] for figures in chosen], marker="o", label=label)
        pane.set(title=row["model"], xlabel="measured peak, MiB", ylabel="step time / plain")
        pane.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
