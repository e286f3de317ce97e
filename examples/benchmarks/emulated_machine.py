"""The simulator against an emulated machine: step time, what priority and overlap gain, and the share of the roofline.

Whole training steps run with real tensors on lanes that take the seconds which the plan counts on (`emulated.py`), on three
machines: bound by updates, by copies, and by compute. With ``step`` updates overlap the next forward, with
``backward`` they begin when a gradient has come; both by priority, or as gradients came (fifo). ``none`` waits for them. The median
step is held against the simulator's.

The roofline is the busiest lane, with the gradient, update and return of block 0, which nothing hides: no overlap beats it. The
floor is what an exact step of whole blocks comes to at best, where

* updates of ``step`` cannot hide behind the backward: the busiest lane up to its end, and then the busiest lane of the rest;
* with ``backward`` the last block's parameters are of use from its return to its next gradient, while no other block has an update,
  so that lane is idle, and without fetches the lane up is, too;
* gradients leave the device before backward ends, because the forward needs their memory: the lane down is idle in the forward,
  and until the first gradient is there.

    python examples/benchmarks/emulated_machine.py --json examples/benchmarks/results/emulated_machine_cpu.json
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from emulated import Emulation, Speeds, steps_s
from results import environment, print_figures, save

import autohete_fx
from autohete_fx.ir import Activations, BlockDecision, Lane, Optimizer, Overlap, Params, Plan, Schedule
from autohete_fx.planner.model.simulation import Event

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

LAYERS, WIDTH, BATCH, CONTEXT = 16, 128, 2, 64
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
    "update-bound": speeds(forward_s=0.03, update_s=0.24, up_s=0.03, down_s=0.03),
    "copy-bound": speeds(forward_s=0.06, update_s=0.1, up_s=0.24, down_s=0.24),
    "compute-bound": speeds(forward_s=0.06, update_s=0.036, up_s=0.024, down_s=0.024),
}
SCHEDULES = {
    "none": Schedule(overlap=Overlap.NONE),
    "step fifo": Schedule(overlap=Overlap.STEP, priority=False),
    "step": Schedule(overlap=Overlap.STEP),
    "backward fifo": Schedule(overlap=Overlap.BACKWARD, priority=False),
    "backward": Schedule(overlap=Overlap.BACKWARD),
}
GAINS = [(of, over) for of in ("step", "backward") for over in ("none", f"{of} fifo")]
STATES = BlockDecision(optimizer=Optimizer.HOST)
ALL = BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST)
FAR = dataclasses.replace(ALL, prefetch_distance=2, activations=Activations.RECOMPUTE)
KEPT = dataclasses.replace(ALL, keeps_fetched=True)
STREAMED = BlockDecision(optimizer=Optimizer.STREAMED)
STREAMED_HOME = BlockDecision(params=Params.HOST, optimizer=Optimizer.STREAMED)
SENT = BlockDecision(activations=Activations.OFFLOAD, optimizer=Optimizer.HOST, prefetch_distance=2)
PLACES = {
    homes: tuple(itertools.islice(itertools.cycle(decisions), len(LABELS)))
    for homes, decisions in {
        "states on the host": (STATES,),
        "all on the host": (ALL,),
        "mixed": (BlockDecision(), ALL, STATES, SENT, FAR, KEPT),
        "half streamed": (STREAMED, STATES, STREAMED_HOME, ALL),
    }.items()
}
RUNS = [
    *(
        (machine, "states on the host", schedule)
        for machine in MACHINES
        for schedule in SCHEDULES
        if "back" not in schedule
    ),
    *((machine, "states on the host", "backward") for machine in MACHINES),
    ("update-bound", "states on the host", "backward fifo"),
    *(("copy-bound", "all on the host", schedule) for schedule in ("none", "backward")),
    ("copy-bound", "mixed", "backward"),
    *(("update-bound", "half streamed", schedule) for schedule in ("none", "step", "backward")),
    ("copy-bound", "half streamed", "backward"),
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
        f"{'machine':<15}{'homes':<20}{'schedule':<15}{'simulated':>10}{'measured':>10}{'ratio':>8}{'roofline':>10}{'floor':>8}"
    )
    for machine, places, schedule in runs:
        row: dict[str, Any] = {"machine": machine, "homes": places, "schedule": schedule}
        row |= measure(MACHINES[machine], PLACES[places], SCHEDULES[schedule], steps)
        rows.append(row)
        print(
            f"{machine:<15}{places:<20}{schedule:<15}{row['simulated s']:>9.3f}s{row['step s']:>9.3f}s"
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
        overlap = None if schedule.overlap is Overlap.NONE else schedule.overlap.value
        optimizer = autohete_fx.AdamW(model.parameters(), overlap=overlap)
        model.compile(backend="autohete", options={**emulation.options, "plan": plan})
        tokens = torch.randint(256, (BATCH, CONTEXT))
        taken = steps_s(model, optimizer, tokens, warm_up=_WARM_UP, steps=steps)
        compilation = next(c for c in reversed(autohete_fx.compilations()) if c.training)
    return {
        "step s": statistics.median(taken),
        "fastest s": min(taken),
        "slowest s": max(taken),
        "simulated s": compilation.plan.step_s,
        **bounds(compilation),
    }


def bounds(compilation: autohete_fx.Compilation) -> dict[str, float]:
    """Seconds that no step can go below, and none of whole blocks with this schedule."""
    events = compilation.events
    turn_s = max(e.end_s for e in events if e.label == "backward")
    chain = [e for e in events if e.block == 0 and e.label in _CHAIN and e.end_s > turn_s]
    roofline_s = _busiest_s(events, chain)
    if compilation.plan.schedule.overlap is Overlap.BACKWARD:
        return {"roofline s": roofline_s, "floor s": max(roofline_s, _idle_at_the_turn_s(events))}
    before = _busiest_s([e for e in events if e.start_s < turn_s], [])
    after = _busiest_s([e for e in events if e.start_s >= turn_s], chain)
    return {"roofline s": roofline_s, "floor s": before + after}


def _idle_at_the_turn_s(events: Sequence[Event]) -> float:
    """Of lanes that have nothing to do around the turn from forward to backward the most: their work, and what comes between."""
    last = max(e.block for e in events if e.lane is Lane.UPDATE)
    between = [e for e in events if e.lane is Lane.COMPUTE and e.block >= last]
    between += [e for e in events if e.block == last and e.label in ("gradients", "update", "upload")]
    fetches = any(e.label in ("fetch", "reload") for e in events)
    idle = [lane for lane in (Lane.UPDATE, Lane.H2D) if lane is Lane.UPDATE or not fetches]
    through_s = max(_seconds({*between, *(e for e in events if e.lane is lane)}) for lane in idle)
    gradients = [e for e in events if e.label == "gradients"]
    first_s = min(e.start_s for e in gradients)
    return max(through_s, first_s + _seconds([*gradients, *(e for e in events if e.label == "forward")]))


def _seconds(events: Iterable[Event]) -> float:
    return sum(e.end_s - e.start_s for e in events)


def _busiest_s(events: Sequence[Event], chain: Sequence[Event]) -> float:
    """Of all lanes the most: its own work, and what of a chain through all lanes is not its own."""
    return max(_seconds(e for e in {*events, *chain} if e.lane is lane or e in chain) for lane in Lane)


def gains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What overlap by priority gains over none and over fifo, measured and simulated; printed too."""
    by_run = {(row["machine"], row["homes"], row["schedule"]): row for row in rows}
    found = []
    print(f"{'machine':<15}{'homes':<20}{'gain of':<12}{'over':<15}{'simulated':>10}{'measured':>10}{'ratio':>8}")
    places_of = dict.fromkeys((row["machine"], row["homes"]) for row in rows)
    for (machine, places), (of, over) in itertools.product(places_of, GAINS):
        one, other = (by_run.get((machine, places, schedule)) for schedule in (of, over))
        if one is None or other is None:
            continue
        simulated, measured = (other[name] / one[name] for name in ("simulated s", "step s"))
        gain = {"machine": machine, "homes": places, "of": of, "over": over}
        found.append({**gain, "simulated": simulated, "measured": measured})
        print(
            f"{machine:<15}{places:<20}{of:<12}{over:<15}{simulated:>9.3f}x{measured:>9.3f}x{measured / simulated:>8.3f}"
        )
    print()
    return found


def summary(rows: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> dict[str, object]:
    """How far off the simulator is, and how near the best schedule of each machine comes to the roofline."""
    figures: dict[str, object] = {
        "plans": len(rows),
        "step time: largest error": f"{max(abs(row['step s'] / row['simulated s'] - 1) for row in rows):.1%}",
        "gains: largest error": f"{max(abs(g['measured'] / g['simulated'] - 1) for g in found):.1%}",
    }
    for machine, places in dict.fromkeys((row["machine"], row["homes"]) for row in rows):
        best = min(
            (row for row in rows if (row["machine"], row["homes"]) == (machine, places)), key=lambda r: r["step s"]
        )
        shares = (f"{best[name] / best['step s']:.1%} of the {name[:-2]}" for name in ("roofline s", "floor s"))
        figures[f"{machine}, {places}: {best['schedule']} reaches"] = ", ".join(shares)
    return figures


if __name__ == "__main__":
    main()
