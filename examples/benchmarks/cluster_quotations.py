"""What the pages quote of the benchmarks of clusters; see `quotations`."""

import json
import statistics
from collections.abc import Callable
from typing import Any

from quoting import RESULTS, read


def cluster_truth() -> str:
    """Predicted and measured seconds of published runs."""
    rows = read("cluster_truth").rows
    lines = ["| run | GPUs | measured | predicted | error |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: row["launch_bound"]):
        gpus = "mixed" if row["mixed"] else "alike"
        note = ", launch-bound" if row["launch_bound"] else ""
        lines.append(
            f"| {row['name']} | {gpus}{note} | {row['measured_s']:.3g} s | {row['predicted_s']:.3g} s | {row['error']:+.1%} |"
        )
    return "\n".join(lines)


def cluster_truth_in_short() -> str:
    """Median errors, in a phrase."""
    rows = read("cluster_truth").rows
    median = statistics.median(abs(row["error"]) for row in rows)
    mixed = [abs(row["error"]) for row in rows if row["mixed"]]
    return f"{median:.1%} in the median of {len(rows)} runs, and at most {max(mixed):.1%} on the {len(mixed)} of several GPU types"


def cluster_pricing() -> str:
    """The largest misses of our prices, in a phrase."""
    rows = [row for row in read("cluster_pricing").rows if not row["launch_bound"]]
    worst = {
        kind: max(abs(row["ratio"] - 1) for row in rows if (row["kind"] == "update") is (kind == "update"))
        for kind in ("layer", "update")
    }
    return f"within {worst['layer']:.0%} and updates within {worst['update']:.0%}"


def cluster_planners() -> str:
    """Simulated seconds of our plans and of the best others, by scenario."""
    rows = read("cluster_planners").rows
    lines = [
        "| model and GPUs | ours | share of compute bound | best other | its seconds | others over ours |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["scenario"] for row in rows):
        ours, *others = [row for row in rows if row["scenario"] == name]
        best = min(others, key=lambda row: row["simulated_s"] or row["own_simulated_s"])
        seconds = best["simulated_s"] or best["own_simulated_s"]
        whose = "" if best["simulated_s"] else " (its own simulator's)"
        gpus = ", ".join(f"{count} {gpu}" for gpu, count in ours["available"].items())
        cells = [
            f"{ours['model']} on {gpus}",
            f"{ours['simulated_s']:.2f} s",
            f"{ours['bound_share']:.0%}",
            best["planner"],
            f"{seconds:.2f} s{whose}",
            f"{seconds / ours['simulated_s']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cluster_paper() -> str:
    """Seconds of other ways to plan mixes of the paper's GPUs, over ours; all simulated."""
    lines = [
        "| model and GPUs | ours | share of compute bound | proportional grid | two stages | equal grid | one type |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _of_paper():
        ours, others = row["autohete_s"], row["baselines_s"]
        ratios = [_over(others[name], ours) for name in ("proportional grid", "two stages", "equal grid", "one type")]
        cells = [f"{row['model']} on {row['cluster']}", f"{ours:.2f} s", f"{row['bound_share']:.0%}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cluster_paper_in_short() -> str:
    """How much longer the best of the others takes, in a phrase."""
    ratios = []
    for row in _of_paper():
        others = [s for name, s in row["baselines_s"].items() if s is not None and name != "one degree"]
        ratios.append(min(others, default=float("nan")) / row["autohete_s"])
    mean = f"{statistics.fmean(ratios):.2f} in the mean of {len(ratios)}"
    return f"{min(ratios):.2f} to {max(ratios):.2f} times as long as ours, {mean}"


def cluster_symmetric() -> str:
    """The cost of one degree of tensor parallelism for all pipelines."""
    lines = ["| model and GPUs | degrees of our plan | its step | with one degree | longer |", "|---|---|---|---|---|"]
    for row in _of_paper():
        ours, one = row["autohete_s"], row["baselines_s"]["one degree"]
        degrees = ", ".join(map(str, row["degrees"]))
        cells = [
            f"{row['model']} on {row['cluster']}",
            degrees,
            f"{ours:.2f} s",
            f"{one:.2f} s",
            f"{one / ours - 1:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _of_paper() -> list[dict[str, Any]]:
    return [row for row in read("cluster_paper").rows if row["autohete_s"] is not None]


def _over(seconds: float | None, ours: float) -> str:
    return "fits nothing" if seconds is None else f"{seconds / ours:.2f}"


def cluster_search() -> str:
    """Seconds of one core that our searches took, by number of GPUs."""
    rows = [row for row in read("cluster_planners").rows if row["planner"] == "autohete"]
    by_count = sorted((sum(row["available"].values()), row["search_cpu_s"]) for row in rows)
    return ", ".join(f"{seconds:.1f} s for {count}" for count, seconds in by_count)


def cluster_emulated() -> str:
    """Steps of jobs on emulated GPUs, measured and simulated, by planner."""
    rows = read("cluster_emulated").rows
    lines = ["| plan | measured | simulated | error | over ours, as measured |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['planner']} | {row['measured_s']:.3f} s | {row['predicted_s']:.3f} s | {row['error']:+.1%} |"
            f" {row['measured_over_ours']:.2f} |"
        )
    return "\n".join(lines)


def cluster_chaos() -> str:
    """The outcome of a job that was disturbed, in a sentence."""
    found = json.loads((RESULTS / "cluster_chaos.json").read_text())
    rows = [row for row in found["recovery_s"] if row["recovery_s"] is not None]
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["kinds"].items())
    return (
        f"{found['events']} changes ({kinds}) in {found['steps']} steps: the largest difference of a weight at the end is"
        f" {found['max_weight_difference']:.0e} in fp64, {found['lost_saved_steps']} saved steps were lost, and of"
        f" {found['cloud_bytes_needed']:,} bytes that no disk had {found['cloud_bytes_read']:,} were read from the cloud."
        f" Training went on"
        f" {statistics.median(row['recovery_s'] for row in rows):.0f} s after a change in the median,"
        f" {statistics.median(row['join_s'] for row in rows):.1f} s of it in `join`; the rest is torchrun's rendezvous and"
        f" the start of"
        " Python on 2 cores."
    )


def cluster_recovery() -> str:
    """Seconds until states are back, predicted and measured, beside those of the cloud alone."""
    lines = [
        "| bandwidths | lost | measured | predicted | error | all from the cloud | over ours |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in read("cluster_recovery").rows:
        sums = {
            (way, kind): sum(row[way][kind][part] for part in ("local", "peer", "cloud"))
            for way in ("nearest", "cloud")
            for kind in ("measured_s", "predicted_s")
        }
        ours, predicted = sums["nearest", "measured_s"], sums["nearest", "predicted_s"]
        cloud = sums["cloud", "measured_s"]
        lines.append(
            f"| {row['setting']} | {row['loss']} | {ours:.2f} s | {predicted:.2f} s | {predicted / ours - 1:+.0%} | {cloud:.2f} s |"
            f" {cloud / ours:.1f} |"
        )
    return "\n".join(lines)


FIGURES: dict[str, Callable[[], str]] = {
    "cluster.truth": cluster_truth,
    "cluster.truth.short": cluster_truth_in_short,
    "cluster.pricing": cluster_pricing,
    "cluster.planners": cluster_planners,
    "cluster.chaos": cluster_chaos,
    "cluster.recovery": cluster_recovery,
    "cluster.emulated": cluster_emulated,
    "cluster.paper": cluster_paper,
    "cluster.paper.short": cluster_paper_in_short,
    "cluster.symmetric": cluster_symmetric,
    "cluster.search": cluster_search,
}
"""By the name under which a page quotes it."""
