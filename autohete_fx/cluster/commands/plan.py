"""``autohete plan --cluster``: from what was asked to the text that is printed."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.inputs.described import described
from autohete_fx.cluster.inputs.described_measured import described_measured
from autohete_fx.cluster.inputs.measurements import costs_of, read, tokens_of
from autohete_fx.cluster.inputs.priced import priced_costs
from autohete_fx.cluster.memory import OVERHEAD_BYTES
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.planner.baselines import BASELINES, best_homogeneous, two_stages_solution
from autohete_fx.cluster.planner.frontier import Priced, changes, frontier
from autohete_fx.cluster.planner.given import given_solution
from autohete_fx.cluster.planner.shapes import shard_counts
from autohete_fx.cluster.planner.solve import Solution, plan_cluster
from autohete_fx.cluster.planner.two_stages import MOST_COMPOSITIONS, TWO_STAGES, num_compositions
from autohete_fx.cluster.report.plots import draw_frontier, draw_gantt
from autohete_fx.cluster.report.text import ClusterReport, Variant, report_json, report_text
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import ClusterError

DEGREES = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8)
_UNSAID = "tokens a sample, as --seq counts them: the costs do not say with how many they were measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line's wishes.

    Attributes:
        model: as `autohete plan` takes it.
        cluster: short form or file.
        global_batch: samples of a step.
        seq: tokens of a sample. `autohete plan` takes those of measured layers where their file says them.
        measured: folder of measured layers and links; None: priced from data sheets.
        dtype: of parameters; None: bfloat16.
        tf32: fp32 products run in TF32.
        objective: ``throughput`` or ``cost``.
        solver: ``cp-sat``, or ``scip`` for the two stages of AutoHet's paper.
        spot: prices are those of GPUs that may be taken away.
        symmetric_tp: one degree for all pipelines.
        max_tp: the most GPUs that share a layer; None: as many as a node allows.
        max_shards: the most shards of a unit; None: as many as a node allows.
        given: file of a plan to price instead of a search; None: search.
        explain: also plan clusters that differ by one thing.
        as_json: one JSON object instead of tables.
        plot: path of a chart: of the step, or for ``cost`` of seconds and dollars; None: none.
        time_limit_s: of each search.
    """

    model: str
    cluster: str
    global_batch: int
    seq: int
    measured: str | None
    dtype: torch.dtype | None
    tf32: bool
    objective: str
    solver: str
    spot: bool
    symmetric_tp: bool
    max_tp: int | None
    max_shards: int | None
    given: str | None
    explain: bool
    as_json: bool
    plot: str | None
    time_limit_s: float

    @property
    def searches_all(self) -> bool:
        """Whether the answer is the fastest plan that our search finds, with nothing held back."""
        return (self.objective, self.solver, self.symmetric_tp) == ("throughput", "cp-sat", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """All that a search needs, wherever it came from; ``peaks`` are stated FLOP/s of one GPU by type, empty where nobody knows."""

    cluster: Cluster
    costs: CostTable
    peaks: Mapping[str, float]
    itemsize: int
    sizes: Sequence[int]
    assumed: Sequence[str]


def plan_for_cluster(request: Request) -> tuple[str, ClusterPlan]:
    """Plan and draw as asked; returns what is to be printed, and the plan. Raises AutoHeteError for what cannot be."""
    if request.measured:
        inputs = _measured(request, request.measured)
    else:
        inputs = inputs_from_data_sheets(
            request.model,
            request.cluster,
            seq=request.seq,
            dtype=request.dtype,
            tf32=request.tf32,
            spot=request.spot,
        )

    if request.max_tp is not None:
        inputs = dataclasses.replace(inputs, costs=inputs.costs.up_to(request.max_tp))

    def solve(cluster: Cluster) -> Solution:
        if request.solver == "scip":
            return two_stages_solution(cluster, inputs.costs, global_batch=request.global_batch)
        return plan_cluster(
            cluster,
            inputs.costs,
            global_batch=request.global_batch,
            micro_batches=[size for size in inputs.sizes if size <= request.global_batch],
            shards=shard_counts(cluster, request.max_shards),
            symmetric_tp=request.symmetric_tp,
            time_limit_s=request.time_limit_s,
        )

    def best(cluster: Cluster, also: Mapping[str, int]) -> tuple[Solution, Sequence[Priced]]:
        """The best plan by the objective, and those that it was chosen from where that is the cheapest (`frontier`)."""
        if request.objective != "cost":
            return solve(cluster), ()
        points = frontier(cluster, solve, also)
        return min(points, key=lambda point: point.usd_per_step).solution, points

    if request.given:
        plan = ClusterPlan.load(request.given)
        solution, points = given_solution(plan, inputs.cluster, inputs.costs, sizes=inputs.sizes), ()
    else:
        solution, points = best(inputs.cluster, {})
    report = _report(request, inputs, solution, lambda cluster: best(cluster, solution.plan.used())[0], points)
    if request.plot:
        (draw_frontier if points else draw_gantt)(report, request.plot)
    return report_json(report) if request.as_json else report_text(report), solution.plan


def inputs_from_data_sheets(
    model: str, cluster: str, *, seq: int, dtype: torch.dtype | None, tf32: bool, spot: bool = False
) -> Inputs:
    """From the device table and a trace of the model. Raises AutoHeteError for a model or cluster that cannot be."""
    found = described(cluster, spot=spot)
    costs = priced_costs(
        model,
        list(found.specs.values()),
        seq=seq,
        micro_batches=MICRO_BATCHES,
        degrees=DEGREES,
        dtype=dtype,
        tf32=tf32,
        gpus_of_node=max(node.gpus for node in found.cluster.nodes),
    )
    taken = dtype or torch.bfloat16
    name = str(taken).removeprefix("torch.")
    return Inputs(
        cluster=found.cluster,
        costs=dataclasses.replace(costs, overhead_bytes=costs.overhead_bytes + OVERHEAD_BYTES),
        peaks={gpu: spec.peak_flops_per_s(name, tf32=tf32) for gpu, spec in found.specs.items()},
        itemsize=taken.itemsize,
        sizes=MICRO_BATCHES,
        assumed=found.assumed,
    )


def _measured(request: Request, folder: str) -> Inputs:
    """From measured layers and links: ``layers.json``, ``memory.json`` and ``network.json`` of a folder."""
    files = {name: read(Path(folder) / f"{name}.json") for name in ("layers", "memory", "network")}
    costs = costs_of(files["layers"], files["memory"], request.model)
    return Inputs(
        cluster=described_measured(request.cluster, files["network"]),
        costs=dataclasses.replace(costs, overhead_bytes=OVERHEAD_BYTES),
        peaks={},
        itemsize=4,
        sizes=sorted({row.micro_batch for row in costs.times if row.micro_batch <= max(MICRO_BATCHES)}),
        assumed=() if tokens_of(files["layers"], request.model) else (f"{request.seq} {_UNSAID}",),
    )


def _report(
    request: Request,
    inputs: Inputs,
    solution: Solution,
    best: Callable[[Cluster], Solution],
    points: Sequence[Priced],
) -> ClusterReport:
    params = sum(inputs.costs.whole_bytes(layer) for layer in range(len(inputs.costs.kinds))) / inputs.itemsize
    alone = functools.partial(
        best_homogeneous,
        shards=shard_counts(inputs.cluster, request.max_shards),
        time_limit_s=request.time_limit_s,
    )
    asked = inputs.cluster, inputs.costs, request.global_batch
    baselines = []
    for name, make in ({} if request.given else {**BASELINES, "one type": alone}).items():
        if name == "one type" and request.searches_all and len(inputs.cluster.gpus) == 1:
            continue  # it is this plan
        if name == TWO_STAGES and num_compositions(*asked) > MOST_COMPOSITIONS:
            baselines.append(Variant(name=name, plan=None, missing="left out: it would take long"))
        else:
            baselines.append(Variant(name=name, plan=make(*asked)))
    others = []
    for name, cluster in changes(inputs.cluster) if request.explain else ():
        try:
            others.append(Variant(name=name, plan=best(cluster).plan))
        except ClusterError:
            others.append(Variant(name=name, plan=None))
    return ClusterReport(
        solution=solution,
        cluster=inputs.cluster,
        costs=inputs.costs,
        seq=request.seq,
        is_given=request.given is not None,
        flops=6 * params * request.global_batch * request.seq,
        peak_flops_per_s=inputs.peaks,
        frontier=points,
        baselines=baselines,
        changes=others,
        assumed=inputs.assumed,
    )
