"""Simulated pipelines against measured ones: whole training runs on clusters of one and of several types of GPU.

    python examples/benchmarks/cluster_truth.py
    python examples/benchmarks/cluster_truth.py --runs RUNS.json --json rows.json

The runs, layers and links are other people's measurements (``examples/benchmarks/measured``). Every run is predicted from the
layers and the network alone; nothing is fitted to the runs. Other files of that schema may have other models, GPUs and degrees.
Nodes of types that the measured clusters lacked are taken to have eight GPUs, unless a run's ``gpus_of_node`` says otherwise, and
links between two types that nobody timed are as fast as the slower port. A run that lacks something is named.

Beside the seconds stands a run's peak memory. ``planned`` is weights,
gradients, optimizer states and activations in flight; ``beyond`` is the rest of what nvidia-smi showed: PyTorch's allocator reserve
and temporary tensors of a backward, the flat copy of gradients, the CUDA context, kernels' modules, and NCCL's buffers.

``launch-bound`` marks runs whose layers take as long as the CPU needs to launch them. The table of layers says so itself: time does
not fall with the micro-batch. ``floor`` is the part of the simulated step that is above the GPUs' own work, by the slope of the
larger micro-batches. A profile that waits for every layer counts launches that a run hides, and a run may launch slower than a
profile. Predictions of these runs are therefore uncertain by that part, and they are listed apart.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from results import environment, print_figures, save

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.inputs.measurements import Run, costs_of, read, rows_of, run_of
from autohete_fx.cluster.memory import memory_of_plan
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.simulation.simulate import simulate
from autohete_fx.errors import ClusterError

_MEASURED = Path(__file__).parent / "measured"
_LAUNCH_BOUND_SHARE = 0.3


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "memory", "network", "runs"):
        parser.add_argument(
            f"--{name}", metavar="FILE", default=_MEASURED / f"{name}.json", help="default: %(default)s"
        )
    parser.add_argument("--json", metavar="FILE", help="write the rows there: a list of objects")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write a result file, with the environment")
    parsed = parser.parse_args()
    print_figures(environment())
    try:
        layers, memory, network = read(parsed.layers), read(parsed.memory), read(parsed.network)
        entries = rows_of(read(parsed.runs))
    except ClusterError as error:
        sys.exit(str(error))
    rows = []
    for entry in entries:
        try:
            run = run_of(entry, network)
            rows.append(row_of(run, costs_of(layers, memory, run.plan.model)))
        except ClusterError as error:
            print(f"not predicted: {error}")
    print(table(rows))
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    save(parsed.save, rows)


def row_of(run: Run, costs: CostTable) -> dict[str, Any]:
    """What is predicted of a run, beside what was measured. Seconds and bytes."""
    step = simulate(run.plan, run.cluster, costs, sums_within=False)
    memories = [memory for row in memory_of_plan(run.plan, costs) for memory in row]
    floor = launch_share(run.plan, costs)
    return {
        "name": run.name,
        "measured_s": run.iteration_s,
        "predicted_s": step.iteration_s,
        "error": step.iteration_s / run.iteration_s - 1,
        "measured_reduce_s": run.reduce_s,
        "predicted_reduce_s": step.reduce_s,
        "mixed": len(run.plan.used()) > 1,
        "launch_share": floor,
        "launch_bound": floor > _LAUNCH_BOUND_SHARE,
        "measured_peak_bytes": run.peak_bytes,
        "planned_peak_bytes": max(memory.peak_bytes for memory in memories),
        "peak_doubt": run.peak_doubt,
    }


def launch_share(plan: ClusterPlan, costs: CostTable) -> float:
    """Of the compute of a plan's slowest stage, the part above the GPUs' own work.

    Their own work is the least time that a sample takes in any micro-batch of the table.
    """
    shares = []
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            taken = needed = 0.0
            for index in stage.layers:
                kind = costs.kinds[index]
                sizes = (*costs.micro_batches(stage.gpu, stage.tp), pipeline.micro_batch)
                taken += sum(costs.layer_s(kind, stage.gpu, stage.tp, pipeline.micro_batch))
                needed += pipeline.micro_batch * min(
                    sum(costs.layer_s(kind, stage.gpu, stage.tp, size)) / size for size in sizes
                )
            shares.append((taken, 1 - needed / taken))
    return max(shares)[1]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, launch-bound ones last, with what must hold under them."""
    lines = [
        f"{'run':32} {'measured':>10} {'predicted':>10} {'error':>7} {'floor':>6}   {'peak GiB':>8} {'planned':>8} {'beyond':>7}"
    ]
    gib = 2**30
    for bound in (False, True):
        if bound:
            lines.append("launch-bound:")
        for row in rows:
            if row["launch_bound"] is not bound:
                continue
            peak = row["measured_peak_bytes"] or float("nan")
            planned = row["planned_peak_bytes"]
            lines.append(
                f"{row['name'] + (' (mixed)' if row['mixed'] else ''):32} {row['measured_s']:9.3f}s {row['predicted_s']:9.3f}s"
                f" {100 * row['error']:+6.1f}% {100 * row['launch_share']:5.0f}%   {peak / gib:8.2f} {planned / gib:8.2f}"
                f" {(peak - planned) / gib:+7.2f}"
            )
    lines.extend(f"peak of {row['name']}: its file doubts it: {row['peak_doubt']}" for row in rows if row["peak_doubt"])
    groups = {
        "all": rows,
        "not launch-bound": [row for row in rows if not row["launch_bound"]],
        "mixed": [row for row in rows if row["mixed"]],
    }
    for name, group in groups.items():
        errors = [abs(row["error"]) for row in group]
        if errors:
            lines.append(
                f"{name}: {len(errors)} runs, median error {100 * statistics.median(errors):.1f}%, within 10%"
                f" {sum(error <= 0.1 for error in errors)}, worst {100 * max(errors):.1f}%"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
