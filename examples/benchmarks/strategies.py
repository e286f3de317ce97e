"""Our plans against other systems' strategies, all replayed by one simulator, over a grid of models, cards and budgets.

    python examples/benchmarks/strategies.py                                        # the whole grid, some twenty minutes
    python examples/benchmarks/strategies.py --part paper --models gpt-2b gpt-10b   # some of it

The grid: the paper's GPTs on one A100-40GB and on four that share the model, 7B and 13B models on cards of 24 GB, 1B to 8B on an
H100 of which 12, 24, 40 or 80 GB may be used; sequences of 1024, batch 8, divided among the GPUs. Every figure is *simulated*, from
a traced model and a device's data sheet; beside the ratios of the paper's parts stand the paper's (arXiv 2503.01890), which its
authors measured. Ours differ where the simulator is kinder to a strategy than its implementation is: it replays ZeRO-Offload,
PatrickStar and StrongHold without the costs of their implementations, at the best setting of their free numbers, with our copies
overlapped as well as ours are; of several GPUs they too gather a block ahead, again or once as is faster.
Checkpointing in segments of sqrt(n) blocks is not in it; `autohete_fx.planner.baselines` says why.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from results import environment, print_figures, save

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Overlap, Problem, Schedule
from autohete_fx.machine.devices import RESERVE_SHARE, find_device, machine_of_spec
from autohete_fx.options import Options
from autohete_fx.planner.baselines import BASELINES, SHARDED_BASELINES, fits
from autohete_fx.planner.solve import proven, solve
from autohete_fx.whatif.blueprint import read_model
from autohete_fx.whatif.job import Job
from autohete_fx.whatif.trace import trace_model


@dataclass(frozen=True)
class Part:
    """A part of the grid; ``budgets`` in GB, None for the card less its reserve; ``ranks`` share the model and the batch."""

    devices: tuple[str, ...]
    models: tuple[str, ...]
    budgets: tuple[int | None, ...] = (None,)
    ranks: int = 1


_GPTS = ("gpt-2b", "gpt-4b", "gpt-6b", "gpt-8b", "gpt-10b", "gpt-15b", "gpt-22b")
GRID = {
    "paper": Part(("a100-40g",), _GPTS),
    "paper, 4 GPUs": Part(("a100-40g",), _GPTS, ranks=4),
    "24gb": Part(("rtx-3090", "rtx-4090"), ("llama-2-7b", "llama-2-13b")),
    "h100": Part(("h100-80g",), ("llama-3.2-1b", "llama-3.2-3b", "llama-3-8b"), (12, 24, 40, None)),
}

PAPER = {
    "paper": {
        "zero-offload": (1.85, 2.08),
        "chunks-on-demand": (1.63, 1.91),
        "working-window": (1.32, 1.41),
        "three-integers-on-arrival": (1.16, 1.24),
    },
    "paper, 4 GPUs": {
        "zero-offload": (2.23, 2.67),
        "chunks-on-demand": (1.65, 1.79),
        "working-window": (1.44, 1.52),
        "three-integers-on-arrival": (1.21, 1.30),
    },
}
"""How many times AutoHete's step others take, mean and most, as the authors of arXiv 2503.01890 measured it."""


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=GRID, default=list(GRID))
    parser.add_argument("--models", nargs="+", help="only these of the part's models")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds of solving, for each of our plans")
    parser.add_argument(
        "--prove", type=float, default=0.0, help="seconds of branching after each solve, for the bound alone"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_figures(environment())
    rows: list[dict[str, Any]] = []
    for name in arguments.part:
        part = GRID[name]
        for model in [m for m in part.models if arguments.models is None or m in arguments.models]:
            blueprint = read_model(model, batch=arguments.batch // part.ranks, seq=arguments.seq, dtype=None)
            for device in part.devices:
                spec = find_device(device)
                machine = Job(num_ranks=part.ranks).machine_of(machine_of_spec(spec), spec)
                problem = trace_model(blueprint, machine, Options(), part.ranks).problem
                for budget in part.budgets:
                    share = int((1 - RESERVE_SHARE) * machine.device_bytes)
                    within = replace(
                        problem,
                        device_budget_bytes=share if budget is None else budget * 10**9,
                        host_budget_bytes=machine.host_bytes,
                        schedule=Schedule(overlap=Overlap.BACKWARD),
                    )
                    where = {"part": name, "model": model, "device": device, "ranks": part.ranks}
                    rows += compare(where, within, arguments.time_limit, arguments.prove)
                    save(arguments.json, rows)
    _summarise(rows)


def compare(where: dict[str, Any], problem: Problem, time_limit_s: float, prove_s: float) -> list[dict[str, Any]]:
    """Print and return the step time of every strategy over that of our plan."""
    assert problem.device_budget_bytes is not None
    where = {**where, "budget_bytes": problem.device_budget_bytes}
    title = f"{where['model']}, {where['ranks']} {where['device']}, {problem.device_budget_bytes / 1e9:.0f} GB"
    try:
        ours = solve(problem, time_limit_s=time_limit_s)
        ours = proven(problem, ours, time_limit_s=prove_s) if prove_s else ours
    except InfeasiblePlanError as error:
        print(f"{title}: {error}\n", flush=True)
        return [{**where, "strategy": "ours", "fits": False}]
    print(f"{title}: ours {ours.step_s:.3f} s, gap {ours.gap:.2%}")
    found = {"step_s": ours.step_s, "gap": ours.gap, "time_limit_s": time_limit_s}
    rows = [{**where, "strategy": "ours", "fits": True, **found}]
    for name, strategy in (BASELINES if problem.num_ranks == 1 else {**BASELINES, **SHARDED_BASELINES}).items():
        theirs = strategy(problem)
        fit, ratio = fits(problem, theirs), theirs.step_s / ours.step_s
        print(f"  {name:<28}{f'{ratio:.3f}x' if fit else 'does not fit'}")
        measured = {} if (found := PAPER.get(where["part"], {}).get(name)) is None else {"the paper's": found}
        rows.append({**where, "strategy": name, "fits": fit, "time / ours": ratio, **measured})
    print(flush=True)
    return rows


def _summarise(rows: Sequence[dict[str, Any]]) -> None:
    for part in GRID:
        for strategy in (*BASELINES, *SHARDED_BASELINES):
            mine = [row for row in rows if row["part"] == part and row["strategy"] == strategy]
            ratios = [row["time / ours"] for row in mine if row["fits"]]
            if not mine:
                continue
            theirs = PAPER.get(part, {}).get(strategy)
            paper = "" if theirs is None else "; the paper, measured: {:.2f} mean, {:.2f} most".format(*theirs)
            figures = (
                f"{sum(ratios) / len(ratios):.2f} mean, {min(ratios):.3f} least, {max(ratios):.2f} most"
                if ratios
                else "never fits"
            )
            print(f"{part:<16}{strategy:<28}fits {len(ratios)} of {len(mine)}: {figures}{paper}")


if __name__ == "__main__":
    main()
