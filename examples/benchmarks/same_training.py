"""Does a change of the code change plans or values? Five models, each trained at 60% of plain's peak, before and after.

A row has the digest of the plan and the bits of every loss and of all parameters. Blocks are priced by the analytic profile and by
rates that are measured once, so both runs must share ``AUTOHETE_CACHE_DIR``:

    export AUTOHETE_CACHE_DIR=$(mktemp -d)
    git checkout BEFORE && python examples/benchmarks/same_training.py --json before.json
    git checkout AFTER && python examples/benchmarks/same_training.py --against before.json
"""

import argparse
import gc
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from prediction_truth import MODELS, LossOf
from results import environment, print_figures, save

import autohete_fx

_SHARE, _STEPS = 0.6, 3


def albert() -> tuple[torch.nn.Module, LossOf]:
    """Layers that share weights."""
    import transformers

    sizes: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256}
    config = transformers.AlbertConfig(vocab_size=4096, embedding_size=64, intermediate_size=1024, **sizes)
    model, tokens = transformers.AlbertForMaskedLM(config), torch.randint(4096, (8, 128))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


ALL: dict[str, Callable[[], tuple[torch.nn.Module, LossOf]]] = {**MODELS, "albert": albert}


def main() -> None:
    """Train every model, print and save its row, and tell where it differs from an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=ALL, default=list(ALL))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path, help="what an earlier run has saved")
    arguments = parser.parse_args()
    print_figures(environment())
    rows = []
    for name in arguments.models:
        rows.append(trained(name))
        print_figures(rows[-1])
    save(arguments.json, rows)
    if arguments.against:
        before = {row["model"]: row for row in json.loads(arguments.against.read_text())["rows"]}
        different = [
            f"{row['model']}: {key}" for row in rows for key in row if before[row["model"]].get(key) != row[key]
        ]
        print("all as before" if not different else "different from before: " + ", ".join(different))
        sys.exit(bool(different))


def trained(name: str) -> dict[str, Any]:
    """The row of one model."""
    plain_peak, _ = steps(name, None)
    budget = int(_SHARE * plain_peak)
    _, values = steps(name, {"memory_budget": budget, "profile": "analytic", "inner_backend": "eager"})
    plans = [c.plan for c in autohete_fx.compilations() if c.training]
    return {
        "model": name,
        "budget bytes": budget,
        "plan": plans[-1].digest,
        "predicted peak bytes": plans[-1].peak_bytes,
        **values,
    }


def steps(name: str, options: dict[str, object] | None) -> tuple[int, dict[str, str]]:
    """Most device bytes of a few steps beside what was there, and the bits of what they computed; plain training for no options."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    with autohete_fx.MemoryMeter("cpu") as before:
        pass
    model, loss_of = ALL[name]()
    if options is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True)
        model.compile(backend="aot_eager")
    else:
        optimizer = autohete_fx.AdamW(model.parameters())
        model.compile(backend="autohete", options=options)
    losses, peak = [], 0
    for step in range(_STEPS):
        torch.manual_seed(step)
        with autohete_fx.MemoryMeter("cpu") as meter:
            loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
        peak = max(peak, meter.peak_bytes)
        del loss
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return peak - before.peak_bytes, {"losses": " ".join(losses), "parameters": digest.hexdigest()[:16]}


if __name__ == "__main__":
    main()
