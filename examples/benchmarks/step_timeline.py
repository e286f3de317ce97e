"""One training step on an emulated machine, as its lanes really ran it: what `step_picture.py` draws for the README.

A GPT with real tensors trains within a third of the memory that it needs without a plan, on lanes that take the seconds of a
machine of chosen speeds (`emulated.py`). The plan is the planner's own. Kept is one period of the steady state: the backward of
one step, its updates, and the forward of the next step, which they overlap.

    python examples/benchmarks/step_timeline.py --json examples/benchmarks/results/step_timeline.json
"""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from emulated import Emulation
from emulated_machine import speeds
from results import environment, print_figures, save

import autohete_fx
from autohete_fx.ir import Lane, LaneRecord

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

LAYERS, WIDTH, BATCH, CONTEXT = 6, 128, 2, 64
SPEEDS = speeds(forward_s=0.1, update_s=0.15, up_s=0.12, down_s=0.12)
_STEPS = 5
_KINDS = {
    "prefetch": "parameters",
    "reload": "activations",
    "offload": "activations",
    "download": "parameters",
    "upload": "updated",
}
"""Of records, by their labels, what is moved."""


def main() -> None:
    """Train without a budget and with one, print the lanes, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget", type=float, default=0.35, help="share of the memory that the model needs without one"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_figures(environment())
    whole_bytes = train(None)[1].predicted_peak_bytes
    emulation, compilation, moments_s = train(int(arguments.budget * whole_bytes))
    assert compilation.device_budget_bytes is not None
    begin_s, end_s = (near(emulation, backward_s) for backward_s, _ in moments_s[-2:])
    bars = [
        {**bar, "begin s": round(begin - begin_s, 5), "end s": round(min(end, end_s) - begin_s, 5)}
        for begin, end, bar in all_bars(emulation, len(compilation.plan.labels))
        if begin_s <= begin < end_s
    ]
    print(compilation.plan_table(), "\n")
    save(
        arguments.json,
        {
            "layers": LAYERS,
            "labels": compilation.plan.labels,
            "plan": compilation.plan_table().splitlines(),
            "whole bytes": whole_bytes,
            "budget bytes": compilation.device_budget_bytes,
            "predicted step s": compilation.plan.step_s,
            "step s": round(end_s - begin_s, 5),
            "optimizer.step() s": round(moments_s[-2][1] - begin_s, 5),
            "bars": bars,
        },
    )


def train(budget_bytes: int | None) -> tuple[Emulation, autohete_fx.Compilation, list[tuple[float, float]]]:
    """Some steps; when the program called each one's backward and ``optimizer.step()``."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with Emulation(SPEEDS).running() as emulation:
        model = GPT(GPTConfig(layers=LAYERS, width=WIDTH, heads=4, context=CONTEXT, dropout=0.0))
        optimizer = autohete_fx.AdamW(model.parameters())
        budget = {} if budget_bytes is None else {"memory_budget": budget_bytes}
        model.compile(backend="autohete", options={**emulation.options, **budget})
        tokens, moments_s = torch.randint(256, (BATCH, CONTEXT)), []
        for _ in range(_STEPS):
            loss = model(tokens, tokens)
            backward_s = time.perf_counter()
            loss.backward()
            moments_s.append((backward_s, time.perf_counter()))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return emulation, next(c for c in reversed(autohete_fx.compilations()) if c.training), moments_s


def near(emulation: Emulation, backward_s: float) -> float:
    """When the device began with the backward that the program called then."""
    return min(begin for phase, _, begin, _ in emulation.computed if phase == "backward" and begin >= backward_s - 0.01)


def all_bars(emulation: Emulation, num_blocks: int) -> Iterable[tuple[float, float, dict[str, Any]]]:
    """What every lane did: begin, end, and of which block it was what; by begin."""
    found: list[tuple[float, float, dict[str, Any]]] = []
    free_s = 0.0
    for phase, block, begin, end in emulation.computed:
        found.append((max(begin, free_s), end, {"lane": Lane.COMPUTE.value, "what": phase, "block": block}))
        free_s = end
    for record in emulation.records():
        if record.lane is not Lane.COMPUTE:  # where the program was held
            what, block = of_block(record, num_blocks)
            found.append((record.begin_s, record.end_s, {"lane": record.lane.value, "what": what, "block": block}))
    return sorted(found, key=lambda bar: bar[:2])


def of_block(record: LaneRecord, num_blocks: int) -> tuple[str, int]:
    """What was moved or updated, and of which block, by the priorities that `passes/assign_lanes.py` gives."""
    what, block = _KINDS.get(record.label, record.label), record.priority
    if record.label == "offload" and block >= num_blocks:
        return "gradients", block - num_blocks
    return what, block if block >= 0 else -1 - block


if __name__ == "__main__":
    main()
