"""Two or more ranks that share a model, on emulated machines: step times of plans against the simulator's, and against each other.

Every rank is a process. Collectives really run, on gloo, and all lanes take the seconds which the plan counts on (`emulated.py`).
Beside each step stand the seconds of real collectives, of which those count that end late, and of the mean of small gradients.
The machines are bound by the net, by copies, by updates, and by compute. On each stand plans that decide alike for every block.
They gather everything again for backward, or keep it. They have states on the device, or on the host, or shards there too, as
FSDP2's offload does. The solver has the memory that gathering again takes, once with states on the device and once with them on
the host. With several micro-batches there is also one that replicates everything, and the solver has its memory too.

What the processes themselves do in a step, plans do not count. ``--slower`` makes lanes slower and leaves that as it is. The
column ``turn`` has by how much longer than planned the turn from the last backward to the next forward takes on the first rank.
There are the mean of small gradients, ``optimizer.step()``, and the call of the model.

    torchrun --nproc-per-node 2 examples/benchmarks/emulated_ranks.py --json examples/benchmarks/results/emulated_ranks_cpu.json
"""

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from emulated import Emulation, Speeds, steps_s
from results import environment, print_figures, save
from torch.distributed.device_mesh import init_device_mesh

import autohete_fx
from autohete_fx.ir import BlockDecision, Optimizer, Overlap, Params, Plan, Schedule
from autohete_fx.runtime.shard import step

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

LAYERS, WIDTH, BATCH, CONTEXT = 8, 128, 2, 64
LABELS = ("prologue", *(f"layers.{i}" for i in range(LAYERS)), "epilogue")
_LAYER_PARAMS = 12 * WIDTH**2
_WARM_UP = 2


def speeds(*, forward_s: float, gather_s: float, update_s: float, copy_s: float) -> Speeds:
    """Of ranks that take so long for the forward of a layer, its gather, the update of a rank's part of it, and a copy of that."""
    ranks = dist.get_world_size()
    layer_bytes = 4 * _LAYER_PARAMS
    return Speeds(
        forward_s=forward_s,
        h2d_bytes_per_s=layer_bytes / ranks / copy_s,
        d2h_bytes_per_s=layer_bytes / ranks / copy_s,
        update_params_per_s=_LAYER_PARAMS / ranks / update_s,
        net_bytes_per_s=(ranks - 1) / ranks * layer_bytes / gather_s,
        num_ranks=ranks,
    )


MACHINES = {
    "net-bound": {"forward_s": 0.03, "gather_s": 0.09, "update_s": 0.02, "copy_s": 0.02},
    "copy-bound": {"forward_s": 0.03, "gather_s": 0.02, "update_s": 0.03, "copy_s": 0.12},
    "update-bound": {"forward_s": 0.03, "gather_s": 0.02, "update_s": 0.15, "copy_s": 0.02},
    "compute-bound": {"forward_s": 0.08, "gather_s": 0.03, "update_s": 0.03, "copy_s": 0.02},
}
STATES = BlockDecision(optimizer=Optimizer.HOST)
AGAIN, STATES_ON_HOST, REPLICATED = "gathered again", "gathered again, states on the host", "replicated"
PLANS = {
    AGAIN: BlockDecision(),
    "kept": BlockDecision(keeps_fetched=True),
    STATES_ON_HOST: STATES,
    "kept, states on the host": dataclasses.replace(STATES, keeps_fetched=True),
    "gathered again, all on the host": dataclasses.replace(STATES, params=Params.HOST),
    REPLICATED: dataclasses.replace(STATES, replicates=True),
}
SOLVED = {"solved": AGAIN, "solved in less": STATES_ON_HOST, "solved in more": REPLICATED}
"""Plans of the solver, with the one whose memory they may take."""


def main() -> None:
    """Run every plan on every machine, print the table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each plan")
    parser.add_argument("--micro-batches", type=int, default=1, help="forward and backward passes of a step")
    parser.add_argument("--slower", type=float, default=1.0, help="times as long that all lanes take")
    parser.add_argument("--only", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    is_first, rows = dist.get_rank() == 0, []
    if is_first:
        print_figures({**environment(), "ranks": dist.get_world_size()})
        print(
            f"{'machine':<15}{'plan':<36}{'peak':>10}{'simulated':>11}{'measured':>10}{'ratio':>8}{'real':>8}"
            f"{'late':>8}{'means':>8}{'turn':>8}"
        )
    for name in arguments.only:
        peaks: dict[str, int] = {}
        for plan in (*PLANS, *SOLVED):
            if arguments.micro_batches == 1 and REPLICATED in (plan, SOLVED.get(plan)):
                continue
            row = {"machine": name, "plan": plan}
            given = peaks[SOLVED[plan]] if plan in SOLVED else None
            seconds = {part: arguments.slower * takes_s for part, takes_s in MACHINES[name].items()}
            row |= measure(speeds(**seconds), plan, given, arguments.steps, arguments.micro_batches)
            peaks[plan] = row["budget bytes"] = given or row["peak bytes"]
            rows.append(row)
            if is_first:
                print(
                    f"{name:<15}{plan:<36}{row['peak bytes'] / 2**20:>6.1f} MiB{row['simulated s']:>10.3f}s"
                    f"{row['step s']:>9.3f}s{row['step s'] / row['simulated s']:>8.3f}{row['real collectives s']:>7.3f}s"
                    f"{row['of that late s']:>7.3f}s{row['means of small gradients s']:>7.3f}s{row['turn late s']:>7.3f}s",
                    flush=True,
                )
    if is_first:
        save(arguments.json, {"ranks": dist.get_world_size(), "times as slow": arguments.slower, "steps": rows})
    dist.destroy_process_group()


def measure(machine: Speeds, plan: str, budget_bytes: int | None, steps: int, micro_batches: int) -> dict[str, Any]:
    """Train under one plan, or under the solver's within a budget; seconds of its steps, measured and simulated."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    given: dict[str, Any] = {"memory_budget": budget_bytes, "solver_time_limit_s": 10}
    if plan in PLANS:
        schedule = Schedule(overlap=Overlap.STEP)
        given = {"plan": Plan(labels=LABELS, decisions=(PLANS[plan],) * len(LABELS), schedule=schedule)}
    with Emulation(machine).running() as emulation:
        model = GPT(GPTConfig(layers=LAYERS, width=WIDTH, heads=4, context=CONTEXT, dropout=0.0))
        model = autohete_fx.shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = autohete_fx.AdamW(model.parameters(), overlap="step")
        options = {**emulation.options, **given, "micro_batches": micro_batches}
        model.compile(backend="autohete", options=options)
        tokens = torch.randint(256, (BATCH, CONTEXT))
        with counting_means() as means:
            taken = steps_s(model, optimizer, tokens, warm_up=_WARM_UP, steps=steps, micro_batches=micro_batches)
        all_steps = _WARM_UP + steps + 1
        found = next(c for c in reversed(autohete_fx.compilations()) if c.training)
    return {
        "step s": statistics.median(taken),
        "simulated s": found.plan.step_s,
        "peak bytes": found.plan.peak_bytes,
        "plan digest": found.plan.digest,
        "collectives a step": len(emulation.collectives) / all_steps,
        "real collectives s": sum(real_s for real_s, _ in emulation.collectives) / all_steps,
        "of that late s": sum(late_s for _, late_s in emulation.collectives) / all_steps,
        "means of small gradients s": sum(means) / all_steps,
        "turn late s": statistics.median(turns_s(emulation, micro_batches)[_WARM_UP:]) - planned_turn_s(found),
    }


def turns_s(emulation: Emulation, micro_batches: int) -> list[float]:
    """Seconds from the end of each step's last backward to the begin of the next step's forward."""
    turns = [
        begin_s - end_s
        for (phase, _, _, end_s), (following, _, begin_s, _) in itertools.pairwise(emulation.computed)
        if (phase, following) == ("backward", "forward")
    ]
    return turns[micro_batches - 1 :: micro_batches]


def planned_turn_s(found: autohete_fx.Compilation) -> float:
    """Likewise as the simulator has it."""
    end_s = max(event.end_s for event in found.events if event.block == 0 and event.label == "backward")
    begins = (event.start_s for event in found.events if event.block == 0 and event.label == "forward")
    return min(begin_s for begin_s in begins if begin_s >= end_s) - end_s


@contextlib.contextmanager
def counting_means() -> Iterator[list[float]]:
    """The seconds within that steps take for the mean of small gradients, which plans do not count."""
    found: list[float] = []
    prepare = step.prepare

    def timed(params: Iterable[torch.Tensor]) -> None:
        began_s = time.perf_counter()
        prepare(params)
        found.append(time.perf_counter() - began_s)

    with mock.patch.object(step, "prepare", timed):
        yield found


if __name__ == "__main__":
    main()
