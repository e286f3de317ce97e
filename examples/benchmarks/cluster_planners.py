"""Plans of published planners for mixed clusters and ours, priced by one simulator.

    python examples/benchmarks/cluster_planners.py
    python examples/benchmarks/cluster_planners.py --scenarios S1 S6 --json rows.json

The plans of others are those that their code printed in six scenarios (``examples/benchmarks/measured/planners.json``). All are
simulated by `autohete_fx.cluster.simulation` on the same measured layers and links, with the sends of the measured runs. Others
may use what they use; ours may recompute, too. Each GPU keeps ``--reserve`` for what nobody plans: contexts, collectives'
buffers, gaps. ``bound`` is the share of the compute bound: all GPUs at work all the time on whole models, memory, network and
bubbles aside. ``search_cpu_s`` is of ours alone, on one core. A plan that the simulator cannot price is listed with its authors'
own simulated seconds, in brackets. Nobody published plans for 256 GPUs: there the others are our searches of equal and of
proportional grids, and the batch is 1024.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from results import environment, print_figures, save

from autohete_fx.cluster.inputs.measurements import cluster_of, costs_of, plan_of_grids, read
from autohete_fx.cluster.planner.grids import equal_grid, proportional_grid
from autohete_fx.cluster.planner.solve import plan_cluster
from autohete_fx.cluster.simulation.simulate import simulate
from autohete_fx.errors import ClusterError

_MEASURED = Path(__file__).parent / "measured"
_GLOBAL_BATCH = 256
_LARGE = {"256 GPUs": {"model": "OPT-350", "gpus": {"A100-40": 64, "V100-16": 192}, "batch": 1024}}
"""A scenario of our own."""


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", help="only these")
    parser.add_argument(
        "--reserve", type=float, metavar="GIB", default=4.5, help="of each GPU's memory (default: %(default)s)"
    )
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each search (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows there: a list of objects")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a result file, with the environment")
    parsed = parser.parse_args()
    print_figures(environment())
    files = {name: read(_MEASURED / f"{name}.json") for name in ("layers", "memory", "network", "planners")}
    reserve = int(parsed.reserve * 2**30)
    rows: list[dict[str, Any]] = []
    for name in parsed.scenarios or [*files["planners"]["scenarios"], *_LARGE]:
        rows.extend(scenario(name, files, reserve, parsed.time_limit))
    ratios = []
    for name in dict.fromkeys(row["scenario"] for row in rows):
        ours, *others = [row["simulated_s"] or row["own_simulated_s"] for row in rows if row["scenario"] == name]
        print(f"{name}: the best of the others takes {min(others) / ours:.3f} times as long as ours")
        if name not in _LARGE:
            ratios.append(min(others) / ours)
    if ratios:
        print(f"mean over published scenarios {sum(ratios) / len(ratios):.3f}, least {min(ratios):.3f}")
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    save(parsed.save, rows)


def scenario(name: str, files: dict[str, Any], reserve: int, time_limit_s: float) -> list[dict[str, Any]]:
    """All planners in one scenario."""
    asked = _LARGE[name] if name in _LARGE else files["planners"]["scenarios"][name]
    batch = asked.get("batch", _GLOBAL_BATCH)
    costs = dataclasses.replace(costs_of(files["layers"], files["memory"], asked["model"]), overhead_bytes=reserve)
    cluster = cluster_of(files["network"], asked["gpus"])
    began_s = time.process_time()
    ours = plan_cluster(cluster, costs, global_batch=batch, time_limit_s=time_limit_s)
    search_cpu_s = time.process_time() - began_s
    rows = [
        {
            "scenario": name,
            "planner": "autohete",
            "simulated_s": ours.timeline.iteration_s,
            "search_s": ours.solve_s,
            "search_cpu_s": search_cpu_s,
            "bound_share": ours.compute_bound_s / ours.timeline.iteration_s,
            "used": ours.plan.used(),
            "available": asked["gpus"],
            "model": asked["model"],
        }
    ]
    for row in files["planners"]["results"]:
        if row["scenario"] != name or not row.get("pipelines"):
            continue
        try:
            plan, filled = plan_of_grids(
                asked["model"],
                row["pipelines"],
                micro_batch=row["mbs"],
                global_batch=_GLOBAL_BATCH,
                network=files["network"],
            )
            seconds = simulate(plan, filled, costs).iteration_s
        except ClusterError:
            seconds = None
        rows.append(
            {
                "scenario": name,
                "planner": row["planner"],
                "simulated_s": seconds,
                "search_s": row["search_s"],
                "bound_share": ours.compute_bound_s / seconds if seconds else None,
                "used": row["used_gpus"],
                "own_simulated_s": row["simulated_s"],
            }
        )
    for grid in (equal_grid, proportional_grid) if name in _LARGE else ():
        began_s = time.monotonic()
        found = grid(cluster, costs, batch)
        if found is not None:
            rows.append(
                {
                    "scenario": name,
                    "planner": found.planner,
                    "simulated_s": found.iteration_s,
                    "search_s": time.monotonic() - began_s,
                    "bound_share": ours.compute_bound_s / found.iteration_s,
                    "used": found.used(),
                    "own_simulated_s": None,
                }
            )
    print(f"{name}: {asked['model']} on {', '.join(f'{count} x {gpu}' for gpu, count in asked['gpus'].items())}")
    for row in sorted(rows, key=lambda row: row["simulated_s"] or float("inf")):
        seconds = f"{row['simulated_s']:9.3f}s" if row["simulated_s"] else f"({row['own_simulated_s']:.3f}s)".rjust(10)
        share = f"{100 * row['bound_share']:5.0f}%" if row["bound_share"] else "     -"
        used = ", ".join(f"{count} {gpu}" for gpu, count in row["used"].items())
        print(f"    {row['planner']:10} {seconds} of bound {share}  search {row['search_s']:6.2f}s  {used}")
    return rows


if __name__ == "__main__":
    main()
