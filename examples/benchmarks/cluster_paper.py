"""Clusters like those of AutoHet's paper: our plans against baselines that search, too.

    python examples/benchmarks/cluster_paper.py
    python examples/benchmarks/cluster_paper.py --models llama-2-7b --clusters 8xA100-80G,8xH20
    python examples/benchmarks/cluster_paper.py --json rows.json    # goes on where the file ends

GPUs are A100, H800 and H20, priced from data sheets in bf16; every figure is simulated, none was measured. The paper
(arXiv 2512.20953) has mixes of these GPUs, which its abstract does not list. Its authors claim up to 1.79 times the throughput of
Megatron-LM and Whale. The baselines here have the freedom that a careful user has: each is the best of all grids of its kind, under
the same simulator (`autohete_fx.cluster.planner.baselines`). Equal grids are Megatron-LM's way, proportional ones Whale's, two
stages is the paper's own way as it was published, and one type is our planner on the best type alone. One degree is our planner
under the paper's rule that all pipelines have the same degree of tensor parallelism.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from results import environment, print_figures, save

from autohete_fx.cluster.commands.plan import DEGREES, MICRO_BATCHES
from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.inputs.described import described
from autohete_fx.cluster.inputs.priced import priced_costs
from autohete_fx.cluster.memory import OVERHEAD_BYTES
from autohete_fx.cluster.planner.baselines import BASELINES
from autohete_fx.cluster.planner.solve import Solution, plan_cluster
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import ClusterError

_MODELS = ("llama-2-7b", "llama-2-13b", "qwen3-32b")
_CLUSTERS = (
    "8xA100-40G,4xH800",
    "8xA100-80G,8xH20",
    "8xA100-80G,4xH800,8xH20",
    "4xH800,16xH20",
    "16xA100-40G,8xA100-80G,4xH800",
)
_TIME_LIMIT_S = 1200.0
"""Of a search: none ends by the clock, however busy the machine is."""


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=_MODELS)
    parser.add_argument("--clusters", nargs="+", default=_CLUSTERS)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a result file, with the environment")
    parsed = parser.parse_args()
    print_figures(environment())
    rows: list[dict[str, Any]] = []
    if parsed.json and parsed.json.exists():
        rows = json.loads(parsed.json.read_text())["rows"]
    specs = {name: spec for text in parsed.clusters for name, spec in described(text).specs.items()}
    for model in parsed.models:
        known = {row["cluster"] for row in rows if row["model"] == model}
        missing = [text for text in parsed.clusters if text not in known]
        if not missing:
            continue
        costs = replace(
            priced_costs(model, list(specs.values()), seq=parsed.seq, micro_batches=MICRO_BATCHES, degrees=DEGREES),
            overhead_bytes=OVERHEAD_BYTES,
        )
        for text in missing:
            rows.append({"model": model, "cluster": text, **compared(described(text).cluster, costs, parsed.batch)})
            print(line(rows[-1]), flush=True)
            save(parsed.json, rows)
    save(parsed.json, rows)


def compared(cluster: Cluster, costs: CostTable, batch: int) -> dict[str, Any]:
    """Simulated seconds of ours and of each baseline; None where nothing fits."""
    began_s = time.process_time()
    found = planned(cluster, costs, batch, symmetric_tp=False)
    search_cpu_s = time.process_time() - began_s
    seconds: dict[str, float | None] = {}
    for name, make in BASELINES.items():
        plan = make(cluster, costs, batch)
        seconds[name] = plan and plan.iteration_s
    symmetric = planned(cluster, costs, batch, symmetric_tp=True)
    seconds["one degree"] = symmetric and symmetric.timeline.iteration_s
    if found is None:
        return {"autohete_s": None, "baselines_s": seconds}
    return {
        "autohete_s": found.timeline.iteration_s,
        "bound_share": found.compute_bound_s / found.timeline.iteration_s,
        "search_cpu_s": search_cpu_s,
        "degrees": sorted({stage.tp for _, _, stage in found.plan.stages()}),
        "pipelines": len(found.plan.pipelines),
        "depths": sorted({len(pipeline.stages) for pipeline in found.plan.pipelines}),
        "used": found.plan.used(),
        "baselines_s": seconds,
    }


def planned(cluster: Cluster, costs: CostTable, batch: int, *, symmetric_tp: bool) -> Solution | None:
    """Our plan; None where nothing fits."""
    try:
        return plan_cluster(
            cluster,
            costs,
            global_batch=batch,
            micro_batches=MICRO_BATCHES,
            symmetric_tp=symmetric_tp,
            time_limit_s=_TIME_LIMIT_S,
        )
    except ClusterError:
        return None


def line(row: dict[str, Any]) -> str:
    """A row as text: each baseline's seconds over ours."""
    ours = row["autohete_s"]
    if ours is None:
        return f"{row['model']:12} {row['cluster']:32} nothing fits"
    others = ", ".join(
        f"{name} {seconds / ours:.2f}" if seconds else f"{name} fits nothing"
        for name, seconds in row["baselines_s"].items()
    )
    return (
        f"{row['model']:12} {row['cluster']:32} {ours:7.2f} s, {row['bound_share']:.0%} of bound; over ours: {others}"
    )


if __name__ == "__main__":
    main()
