"""Budget, profile and overlap truth on a GPU: two GPTs at four budgets each, predicted and measured.

Each budget is a share of what the model needs under plain ``torch.compile`` with the same optimizer. Every (model, budget) pair
runs in a process of its own; the first one measures the machine, and the first of a model times its blocks. Printed for each: step
time and peak, predicted and measured; what the caching allocator reserved; and for each copy lane the share of its time that is
hidden under kernels, from a trace of PyTorch's profiler. Timing blocks may take all of the budget, so the forward that compiles is
apart from the peak that was predicted. It exits with an error where a measured peak, of either, exceeds its budget, or a pair
failed; the others have their rows all the same.

    python examples/benchmarks/cuda_truth.py --json examples/benchmarks/results/cuda_truth_h100.json

``--dry`` takes small models on the CPU through the same code, where there are no kernels to hide copies under. A process takes
about a minute; ``--models`` runs half of them.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from prediction_truth import line, of_runs, predicted, step_ratio, summary
from results import environment, print_figures, save
from torch import nn

import autohete_fx
from autohete_fx.options import parse_size, resolve_bytes
from autohete_fx.runtime.placement import placement_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

_WARM_UP, _WHILES = 3, 4
BUDGETS = ("100%", "70%", "50%", "35%")

Span = tuple[float, float]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--budgets", nargs="+", default=list(BUDGETS), help="shares of plain's peak, or sizes")
    parser.add_argument("--steps", type=int, default=5, help="in each of the four whiles")
    parser.add_argument("--dry", action="store_true", help="small models on the CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--budget-bytes", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run every pair in a process of its own, print the table and how far off it is, and write JSON where asked."""
    arguments = parsed()
    if not arguments.dry and not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device; --dry runs small models on the CPU")
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.budget_bytes, arguments.steps, dry=arguments.dry)))
        return
    print_figures(environment())
    with tempfile.TemporaryDirectory() as caches:
        rows = table(arguments, caches)
    trained = [row for row in rows if "failed" not in row]
    if trained:
        print_figures(summary(trained) | judged(trained))
    broken = [f"{row['model']} at {row['budget']} failed" for row in rows if "failed" in row]
    broken += [f"{row['model']} at {row['budget']} peaked above its budget" for row in trained if not keeps_budget(row)]
    if broken:
        sys.exit("; ".join(broken))


def keeps_budget(row: dict[str, Any]) -> bool:
    """In every step, and in the forward that compiles."""
    return max(row["peak bytes"], row["compiling peak bytes"]) <= row["budget bytes"]


def judged(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Of how many pairs what is wanted holds."""
    found = {
        "peak within its budget": [keeps_budget(row) for row in rows],
        "peak within 5% of predicted": [abs(ratio - 1) <= 0.05 for row in rows for ratio in row["peak ratios"]],
        "step time within 10% of predicted": [abs(step_ratio(row) - 1) <= 0.1 for row in rows],
    }
    return {what: f"{sum(holds)} of {len(holds)}" for what, holds in found.items()}


def table(arguments: argparse.Namespace, caches: str) -> list[dict[str, Any]]:
    """Run and print all pairs. One that fails is a row with the end of its error; the file is up to date after each."""
    rows: list[dict[str, Any]] = []
    print(f"{'':<16}  {'step ms':>21}  {'':>5}  {'peak MiB':>17}  {'':>5}  {'profile':>7}")
    print(
        f"{'model':<8}{'budget':>8}  {'predicted':>10} {'measured':>10}  ratio  {'pred.':>8} {'measured':>8}  ratio  {'s':>7}"
        "  reserved MiB, hidden share of copies"
    )
    for model in arguments.models:
        common = ("--one", model, "--steps", str(arguments.steps), *(["--dry"] if arguments.dry else []))
        plain = in_process(caches, *common)
        for budget in arguments.budgets:
            row = {"model": model, "budget": budget, "plain": plain}
            found = plain
            if "failed" not in plain:
                row["budget bytes"] = resolve_bytes(parse_size(budget), int(plain["peak bytes"]))
                found = in_process(caches, *common, "--budget-bytes", str(row["budget bytes"]))
            if "failed" in found:
                rows.append(row | found)
                print(f"{model:<8}{budget:>8}  failed: {found['failed'].splitlines()[-1]}", flush=True)
            else:
                rows.append(row | of_runs([found]))
                hidden = " ".join(f"{lane} {share:.0%}" for lane, share in found["hidden"].items())
                print(f"{line(rows[-1])}  {found['reserved bytes'] / 2**20:>8.0f}  {hidden}", flush=True)
            save(arguments.json, rows)
    print()
    return rows


def in_process(caches: str, *words: str) -> dict[str, Any]:
    """The figures of one training, or the end of its error. It finds compiled kernels, the machine's figures and blocks' timings
    in ``caches``."""
    places = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "AUTOHETE_CACHE_DIR": f"{caches}/autohete"}
    command = [sys.executable, sys.argv[0], *words]
    finished = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, check=False)
    if finished.returncode:
        said = [
            text
            for text in finished.stderr.splitlines()
            if text.strip() and not text.startswith("Set TORCHDYNAMO_VERBOSE")
        ]
        return {"failed": "\n".join(said[-30:]) or f"ended with {finished.returncode}"}
    return json.loads(finished.stdout.splitlines()[-1])


def measure(name: str, budget_bytes: int | None, steps: int, *, dry: bool) -> dict[str, Any]:
    """Train a model, with the plain backend where there is no budget; what was predicted and what was measured."""
    device = "cpu" if dry else "cuda"
    warm_up(device)
    torch.manual_seed(0)
    with autohete_fx.MemoryMeter(device) as meter:
        others = meter.start_bytes
    model, tokens = made(name, device, dry=dry)
    optimizer = autohete_fx.AdamW(model.parameters())
    if budget_bytes is None:
        model.compile()
    else:
        model.compile(backend="autohete", options={"memory_budget": budget_bytes})

    def train(count: int) -> float:
        """Seconds of a step, of several taken without a pause."""
        begin = time.perf_counter()
        for _ in range(count):
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        if device != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - begin) / count

    with autohete_fx.MemoryMeter(device) as compiling:
        loss = model(tokens, tokens)
    with autohete_fx.MemoryMeter(device) as first:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train(_WARM_UP)
    with autohete_fx.MemoryMeter(device) as meter:
        whiles = [train(steps) for _ in range(_WHILES)]
    figures: dict[str, Any] = {
        "step s": min(whiles),
        "step s, median of whiles": statistics.median(whiles),
        "step s, all whiles": whiles,
        "peak bytes": max(first.peak_bytes, meter.peak_bytes) - others,
        "compiling peak bytes": compiling.peak_bytes - others,
        "reserved bytes": 0 if device == "cpu" else torch.cuda.max_memory_reserved(),
        "hidden": {} if device == "cpu" else hidden_shares(*traced(lambda: train(2))),
        **beside(device, model),
    }
    return figures if budget_bytes is None else {**figures, **predicted()}


def beside(device: str, model: nn.Module) -> dict[str, float]:
    """What of the device is taken beside PyTorch's allocator, and the seconds that homes took: to pin, and to wait for."""
    found: dict[str, float] = {}
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        found["outside bytes"] = total - free - torch.cuda.memory_reserved()
    placed = next((where for p in model.parameters() if (where := placement_of(p)) is not None), None)
    if placed is not None:
        found |= {"pinning s": placed.tier.mapped_s, "waiting for homes s": placed.tier.waited_s}
    return found


def warm_up(device: str) -> None:
    """What a process pays once on the device: cuBLAS's workspaces, in the thread of backward too, and the machine's figures."""
    layer = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).to(device)
    layer(torch.ones(256, 256, device=device)).sum().backward()
    autohete_fx.preview(layer, torch.ones(256, 256, device=device))
    del layer
    torch._dynamo.reset()
    gc.collect()  # what is garbage must not count as others' memory now, and be gone at the peak


def traced(run: Any) -> tuple[list[Span], dict[str, list[Span]]]:
    """When kernels ran, and when copies did, by their direction; in microseconds."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
    kernels: list[Span] = []
    copies: dict[str, list[Span]] = {"h2d": [], "d2h": []}
    for event in recorded.events() or ():
        if event.device_type is not DeviceType.CUDA:  # what launched it: of Triton's kernels, cuLaunchKernelEx
            continue
        span = (float(event.time_range.start), float(event.time_range.end))
        name = event.name.lower()
        if "memcpy htod" in name:
            copies["h2d"].append(span)
        elif "memcpy dtoh" in name:
            copies["d2h"].append(span)
        elif not name.startswith(("memcpy", "memset")):
            kernels.append(span)
    return kernels, copies


def hidden_shares(kernels: Sequence[Span], copies: dict[str, list[Span]]) -> dict[str, float]:
    """Of each lane that copied: the share of its time during which a kernel ran."""
    busy = merged(kernels)
    return {lane: overlap(merged(spans), busy) / total(merged(spans)) for lane, spans in copies.items() if spans}


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as disjoint spans in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def total(spans: Iterable[Span]) -> float:
    """How long disjoint spans last together."""
    return sum(end - begin for begin, end in spans)


def overlap(some: Sequence[Span], others: Sequence[Span]) -> float:
    """How long a span of either ran at once; both are disjoint and in order."""
    seconds, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        seconds += max(0.0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return seconds


def made(name: str, device: str, *, dry: bool) -> tuple[nn.Module, torch.Tensor]:
    """A model and its batch. It is built on its device, so that building takes no host memory."""
    config, dtype, batch = MODELS[name]
    if dry:
        config, batch = GPTConfig(layers=6, width=128, heads=4, context=64), 4
    with torch.device(device):
        model = GPT(config).to(dtype)
        return model, torch.randint(config.vocab_size, (batch, config.context))


MODELS: dict[str, tuple[GPTConfig, torch.dtype, int]] = {
    "fp32": (GPTConfig(layers=16, width=2048, heads=16, context=1024, vocab_size=32768), torch.float32, 8),
    "bf16": (GPTConfig(layers=24, width=3072, heads=24, context=1024, vocab_size=32768), torch.bfloat16, 8),
}


if __name__ == "__main__":
    main()
