"""Our plans against other systems' strategies, all replayed by one simulator: GPTs of the paper's sizes and cards.

    python examples/benchmarks/strategies.py --models gpt-2b gpt-4b gpt-10b --device a100-40g

Every figure of this table is *simulated*, from a traced model and a device's data sheet; beside the ratios stand the paper's
(arXiv 2503.01890, one A100-40GB, sequence 1024, batch 8), which its authors measured. Ours differ where the simulator is
kinder to a strategy than its implementation is: it replays ZeRO-Offload, PatrickStar and StrongHold without the costs of
their implementations, at the best setting of their free numbers, with our copies overlapped as well as ours are.
Checkpointing in segments of sqrt(n) blocks is not in it; `autohete_fx.planner.baselines` says why.
"""

import argparse
import dataclasses
from pathlib import Path

from results import environment, print_figures, save

from autohete_fx.blueprint import read_model
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.options import Options
from autohete_fx.planner.baselines import BASELINES, fits
from autohete_fx.planner.solve import solve
from autohete_fx.profiler.devices import RESERVE_SHARE, find_device, machine_of_spec
from autohete_fx.whatif import trace_model

_PAPER = {
    "zero-offload": "ZeRO-Offload 1.85 mean, 2.08 max",
    "chunks-on-demand": "PatrickStar 1.63 mean, 1.91 max",
    "working-window": "StrongHold 1.32 mean, 1.41 max",
    "three-integers-on-arrival": "without priority 1.16 mean, 1.24 max",
}


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt-2b", "gpt-4b", "gpt-10b", "gpt-22b"])
    parser.add_argument("--device", default="a100-40g")
    parser.add_argument("--budgets", nargs="+", type=float, help="GiB; by default the card less its reserve")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_figures(environment())
    machine = machine_of_spec(find_device(arguments.device))
    budgets = [int(gib * 2**30) for gib in arguments.budgets or ()]
    rows = []
    for model in arguments.models:
        blueprint = read_model(model, batch=arguments.batch, seq=arguments.seq, dtype=None)
        traced = trace_model(blueprint, machine, Options())
        for budget in budgets or [int((1 - RESERVE_SHARE) * machine.device_bytes)]:
            problem = dataclasses.replace(
                traced.problem,
                device_budget_bytes=budget,
                host_budget_bytes=machine.host_bytes,
                schedule=Schedule(overlap=Overlap.BACKWARD),
            )
            try:
                ours = solve(problem)
            except InfeasiblePlanError as error:
                print(f"{model}, {budget / 2**30:.0f} GiB: {error}\n")
                continue
            print(f"{model}, {budget / 2**30:.0f} GiB: ours {ours.step_s:.3f} s, gap {ours.gap:.2%}")
            for name, strategy in BASELINES.items():
                theirs = strategy(problem)
                fit = fits(problem, theirs)
                ratio = theirs.step_s / ours.step_s
                print(f"  {name:<28}{f'{ratio:.2f}x' if fit else 'does not fit':<14}{_PAPER.get(name, '')}")
                rows.append({"model": model, "budget": budget, "strategy": name, "fits": fit, "time / ours": ratio})
            print(flush=True)
    for name, paper in _PAPER.items():
        ratios = [row["time / ours"] for row in rows if row["strategy"] == name and row["fits"]]
        if ratios:
            mean, most = sum(ratios) / len(ratios), max(ratios)
            print(f"{name:<28}{mean:.2f} mean, {most:.2f} max, simulated; the paper, measured: {paper}")
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
