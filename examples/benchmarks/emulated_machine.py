"""The simulator against an emulated machine: step time, what priority and overlap gain, and the share of the roofline.

Whole training steps run with real tensors on lanes that take the seconds which the plan counts on (`emulated.py`), on four
machines: bound by updates, by copies, by compute, and by copies down alone. ``step`` lets updates overlap the next
forward, by priority or as gradients came (fifo); ``none`` waits for them. The median step is held against the simulator's.

The roofline is the busiest lane, and no overlap beats it. Updates that begin at ``step()`` cannot hide behind the backward, so
the floor is the busiest lane up to the end of the backward and then the busiest lane of the rest. Both add the gradient,
update and return of block 0, which nothing hides.

    python examples/benchmarks/emulated_machine.py --json examples/benchmarks/results/emulated_machine_cpu.json
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from emulated import Emulation, Speeds
from results import environment, print_figures, save

import autohete_fx
from autohete_fx.compilation import LaneEvent
from autohete_fx.ir import Activations, BlockDecision, Lane, Optimizer, Overlap, Params, Plan, Schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

LAYERS, WIDTH, BATCH, CONTEXT = 5, 128, 2, 64
LABELS = ("prologue", *(f"layers.{i}" for i in range(LAYERS)), "epilogue")
_LAYER_PARAMS = 12 * WIDTH**2
_WARM_UP = 2
_CHAIN = ("gradients", "update", "upload", "fetch")


def speeds(*, forward_s: float, update_s: float, up_s: float, down_s: float) -> Speeds:
    """Of a machine that takes so long for the forward, the update, and a copy either way of one layer."""
    return Speeds(
        forward_s=forward_s,
        h2d_bytes_per_s=4 * _LAYER_PARAMS / up_s,
        d2h_bytes_per_s=4 * _LAYER_PARAMS / down_s,
        update_params_per_s=_LAYER_PARAMS / update_s,
    )


MACHINES = {
    "update-bound": speeds(forward_s=0.05, update_s=0.25, up_s=0.05, down_s=0.05),
    "copy-bound": speeds(forward_s=0.05, update_s=0.07, up_s=0.2, down_s=0.2),
    "compute-bound": speeds(forward_s=0.12, update_s=0.07, up_s=0.05, down_s=0.05),
    "slow way down": speeds(forward_s=0.05, update_s=0.05, up_s=0.05, down_s=0.2),
}
SCHEDULES = {
    "none": Schedule(overlap=Overlap.NONE),
    "fifo": Schedule(overlap=Overlap.STEP, priority=False),
    "priority": Schedule(overlap=Overlap.STEP),
}
STATES = BlockDecision(optimizer=Optimizer.HOST)
ALL = BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST)
FAR = dataclasses.replace(ALL, prefetch_distance=2, activations=Activations.RECOMPUTE)
KEPT = dataclasses.replace(ALL, keeps_fetched=True)
SENT = BlockDecision(activations=Activations.OFFLOAD, optimizer=Optimizer.HOST, prefetch_distance=2)
PLACES = {
    "states on the host": (STATES,) * len(LABELS),
    "all on the host": (ALL,) * len(LABELS),
    "mixed": (BlockDecision(), ALL, STATES, SENT, FAR, KEPT, STATES),
}
RUNS = [
    *((machine, "states on the host", schedule) for machine in MACHINES for schedule in SCHEDULES),
    *(("copy-bound", "all on the host", schedule) for schedule in SCHEDULES),
    *((machine, "mixed", "priority") for machine in list(MACHINES)[:3]),
]


def main() -> None:
    """Run every plan, print both tables, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each plan")
    parser.add_argument("--only", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_figures(environment())
    rows = table([run for run in RUNS if run[0] in arguments.only], arguments.steps)
    found = gains(rows)
    print_figures(summary(rows, found))
    save(arguments.json, {"steps": rows, "gains": found})


def table(runs: Sequence[tuple[str, str, str]], steps: int) -> list[dict[str, Any]]:
    """Run and print all plans."""
    rows = []
    print(
        f"{'machine':<15}{'homes':<20}{'schedule':<10}{'simulated':>10}{'measured':>10}{'ratio':>8}{'roofline':>10}{'floor':>8}"
    )
    for machine, places, schedule in runs:
        row: dict[str, Any] = {"machine": machine, "homes": places, "schedule": schedule}
        row |= measure(MACHINES[machine], PLACES[places], SCHEDULES[schedule], steps)
        rows.append(row)
        print(
            f"{machine:<15}{places:<20}{schedule:<10}{row['simulated s']:>9.3f}s{row['step s']:>9.3f}s"
            f"{row['step s'] / row['simulated s']:>8.3f}{row['roofline s'] / row['step s']:>10.1%}"
            f"{row['floor s'] / row['step s']:>8.1%}",
            flush=True,
        )
    print()
    return rows


def measure(machine: Speeds, decisions: tuple[BlockDecision, ...], schedule: Schedule, steps: int) -> dict[str, float]:
    """Train under one plan; seconds of its steps, measured and simulated, and what bounds them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plan = Plan(labels=LABELS, decisions=decisions, schedule=schedule)
    with Emulation(machine).running() as emulation:
        model = GPT(GPTConfig(layers=LAYERS, width=WIDTH, heads=4, context=CONTEXT, dropout=0.0))
        optimizer = autohete_fx.AdamW(model.parameters())
        model.compile(backend="autohete", options={**emulation.options, "plan": plan})
        tokens = torch.randint(256, (BATCH, CONTEXT))
        began_s = []
        for _ in range(_WARM_UP + steps + 1):
            began_s.append(time.perf_counter())
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        compilation = next(c for c in reversed(autohete_fx.compilations()) if c.training)
    taken = [end - begin for begin, end in zip(began_s[_WARM_UP:], began_s[_WARM_UP + 1 :], strict=False)]
    return {
        "step s": statistics.median(taken),
        "fastest s": min(taken),
        "slowest s": max(taken),
        "simulated s": compilation.plan.step_s,
        **bounds(compilation),
    }


def bounds(compilation: autohete_fx.Compilation) -> dict[str, float]:
    """Seconds that no step, and no step whose updates follow its backward, can go below."""
    events = compilation.events
    turn_s = max(e.end_s for e in events if e.label == "backward")
    before = _busiest_s([e for e in events if e.start_s < turn_s], [])
    chain = [e for e in events if e.block == 0 and e.label in _CHAIN and e.end_s > turn_s]
    after = _busiest_s([e for e in events if e.start_s >= turn_s], chain)
    return {"roofline s": _busiest_s(events, chain), "floor s": before + after}


def _busiest_s(events: Sequence[LaneEvent], chain: Sequence[LaneEvent]) -> float:
    """Of all lanes the most: its own work, and what of a chain through all lanes is not its own."""
    return max(sum(e.end_s - e.start_s for e in {*events, *chain} if e.lane is lane or e in chain) for lane in Lane)


def gains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What overlap by priority gains over none and over fifo; printed too."""
    by_run = {(row["machine"], row["homes"], row["schedule"]): row for row in rows}
    found = []
    print(f"{'machine':<15}{'homes':<20}{'priority over':<15}{'simulated':>10}{'measured':>10}{'ratio':>8}")
    for (machine, places, schedule), other in by_run.items():
        best = by_run.get((machine, places, "priority"))
        if schedule == "priority" or best is None:
            continue
        simulated, measured = (other[name] / best[name] for name in ("simulated s", "step s"))
        found.append(
            {"machine": machine, "homes": places, "over": schedule, "simulated": simulated, "measured": measured}
        )
        print(f"{machine:<15}{places:<20}{schedule:<15}{simulated:>9.3f}x{measured:>9.3f}x{measured / simulated:>8.3f}")
    print()
    return found


def summary(rows: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> dict[str, object]:
    """How far off the simulator is, and how near the best schedule of each machine comes to the roofline."""
    figures: dict[str, object] = {
        "plans": len(rows),
        "step time: largest error": f"{max(abs(row['step s'] / row['simulated s'] - 1) for row in rows):.1%}",
        "gains: largest error": f"{max(abs(g['measured'] / g['simulated'] - 1) for g in found):.1%}",
    }
    for machine in dict.fromkeys(row["machine"] for row in rows):
        best = min(
            (row for row in rows if row["machine"] == machine and row["homes"] != "mixed"), key=lambda r: r["step s"]
        )
        shares = (f"{best[name] / best['step s']:.1%} of the {name[:-2]}" for name in ("roofline s", "floor s"))
        figures[f"{machine}: the best reaches"] = ", ".join(shares)
    return figures


if __name__ == "__main__":
    main()
