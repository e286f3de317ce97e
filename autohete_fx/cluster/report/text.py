"""Plans over many devices as text and as JSON; `plots` draws them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.memory import memory_of_plan
from autohete_fx.cluster.plan import ClusterPlan, Pipeline
from autohete_fx.cluster.planner.frontier import Priced
from autohete_fx.cluster.planner.solve import Solution
from autohete_fx.cluster.planner.two_stages import TWO_STAGES
from autohete_fx.cluster.simulation.simulate import Timeline, cost_with_gathers
from autohete_fx.cluster.spec import Cluster, Gpu
from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.report.tables import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A plan to compare: a baseline, or ours on another cluster; ``plan`` is None where ``missing`` says why there is none."""

    name: str
    plan: ClusterPlan | None
    missing: str = "nothing fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """All that is said of a plan.

    Attributes:
        solution: that is reported.
        cluster: that it is for.
        costs: that it was made from.
        seq: tokens of a sample.
        flops: of a step: six for each parameter and token.
        peak_flops_per_s: stated, of one GPU, by type; empty where nobody knows.
        frontier: plans that none beats in seconds and dollars, where the cheapest was asked for.
        baselines: on the same cluster.
        changes: of the cluster.
        assumed: sentences on what was not described.
        is_given: the plan was given, and nothing searched.
    """

    solution: Solution
    cluster: Cluster
    costs: CostTable
    seq: int
    flops: float
    peak_flops_per_s: Mapping[str, float]
    frontier: Sequence[Priced] = ()
    baselines: Sequence[Variant] = ()
    changes: Sequence[Variant] = ()
    assumed: Sequence[str] = ()
    is_given: bool = False

    @property
    def plan(self) -> ClusterPlan:
        """The plan of the solution."""
        return self.solution.plan

    @property
    def timeline(self) -> Timeline:
        """Its simulated step."""
        return self.solution.timeline

    @property
    def tokens_per_s(self) -> float:
        """The throughput of all pipelines together."""
        return self.plan.global_batch * self.seq / self.timeline.iteration_s

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization: the share of the used GPUs' stated peak that the model's own products make up."""
        if not self.peak_flops_per_s:
            return None
        peak = sum(count * self.peak_flops_per_s[gpu] for gpu, count in self.plan.used().items())
        return self.flops / self.timeline.iteration_s / peak

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Price of the used GPUs; None where one has none."""
        return usd_per_million_tokens(self.plan, self.cluster, self.seq)


def usd_per_million_tokens(plan: ClusterPlan, cluster: Cluster, seq: int) -> float | None:
    """Dollars that the used GPUs cost while a million tokens are trained; None where one has no price."""
    usd_per_s = 0.0
    for gpu, count in plan.used().items():
        price = cluster.gpu(gpu).usd_per_hour
        if price is None:
            return None
        usd_per_s += count * price / 3600
    return usd_per_s * plan.iteration_s / (plan.global_batch * seq) * 1e6


def binding(plan: ClusterPlan, timeline: Timeline) -> dict[str, float]:
    """Seconds of the step by what takes them, in the pipeline that ends last: its busiest stage and all that follows."""
    last = max(timeline.units, key=lambda unit: unit.backward_end_s).pipeline
    busiest = max((unit for unit in timeline.units if unit.pipeline == last), key=lambda unit: unit.compute_s)
    messages_s = sum(span.end_s - span.begin_s for span in busiest.spans if span.what in ("send", "receive"))
    return {
        "compute": busiest.compute_s,
        "messages": messages_s,
        "bubble": max(0.0, timeline.pipelines_s - busiest.compute_s - messages_s),
        "gradient sums": timeline.reduce_s,
        "updates": timeline.update_s,
    }


def alike(plan: ClusterPlan) -> list[tuple[Pipeline, int]]:
    """Pipelines that differ in their nodes alone, each once with its number."""
    groups: dict[tuple[Any, ...], list[Pipeline]] = {}
    for pipeline in plan.pipelines:
        stages = tuple((s.gpu, s.tp, s.shards, s.first, s.last, s.recomputed, s.offloaded) for s in pipeline.stages)
        groups.setdefault((stages, pipeline.micro_batch, pipeline.micro_batches), []).append(pipeline)
    return [(members[0], len(members)) for members in groups.values()]


def report_text(report: ClusterReport) -> str:
    """The plan as tables."""
    plan, timeline = report.plan, report.timeline
    solution = report.solution
    bound = ""
    if solution.model_bound_s is not None:
        bound = f"{format_seconds(min(solution.model_bound_s, timeline.iteration_s))} as the solver counts, "
    unpriced = [", ".join(report.cluster.without_price())]
    shares = binding(plan, timeline)
    parts = [f"{name} {seconds / timeline.iteration_s:.0%}" for name, seconds in shares.items() if seconds]
    lines = [
        f"{report.costs.model} on {counted({gpu.name: report.cluster.count(gpu.name) for gpu in report.cluster.gpus})},"
        f" {plan.global_batch} sample{'s' * (plan.global_batch > 1)} of {report.seq} tokens a step",
        *(f"assumed: {sentence}" for sentence in report.assumed),
        *(f"no price of {gpu}: a cluster file may give it, as usd_per_hour" for gpu in unpriced if gpu),
        f"costs: {report.costs.source}",
        "",
        f"step {format_seconds(timeline.iteration_s)}, {report.tokens_per_s:,.0f} tokens/s{_utilization(report)}{_price(report)}",
        f"where it goes: {', '.join(parts)}",
        f"at best {bound}{format_seconds(solution.compute_bound_s)} with {_bounded(report)} always at work{_searched(report)}",
        "",
        _pipelines_table(report),
    ]
    notes = [*shard_lines(report), *idle_lines(report)]
    lines += ["", *notes] if notes else []
    others = "other clusters, the cheapest plan of each" if report.frontier else "other clusters"
    for title, variants in (("other ways to plan this cluster", report.baselines), (others, report.changes)):
        if variants:
            lines += ["", title, _variants_table(report, variants)]
    if report.frontier:
        lines += ["", "faster or cheaper", _frontier_table(report)]
    return "\n".join(lines)


def _bounded(report: ClusterReport) -> str:
    """The GPUs that the solution is best for: a part of the cluster, where the cheapest was asked for."""
    part = next((point.part for point in report.frontier if point.solution is report.solution), report.cluster)
    if part == report.cluster:
        return "all GPUs"
    return counted({gpu.name: part.count(gpu.name) for gpu in part.gpus})


def _searched(report: ClusterReport) -> str:
    solution = report.solution
    first = "" if solution.first_s is None else f", a first plan after {solution.first_s:.1f} s"
    return "; the plan was given" if report.is_given else f"; searched {solution.solve_s:.1f} s{first}"


def _utilization(report: ClusterReport) -> str:
    return "" if report.utilization is None else f", {report.utilization:.0%} of the used GPUs' peak (MFU)"


def _price(report: ClusterReport) -> str:
    dollars = report.usd_per_million_tokens
    return "" if dollars is None else f", {_usd(dollars)} per million tokens"


def _usd(dollars: float) -> str:
    return f"${dollars:.3f}" if dollars >= 0.01 else f"${dollars:.2g}"


def counted(counts: Mapping[str, int]) -> str:
    """Numbers of GPUs in words."""
    return ", ".join(f"{count} x {gpu}" for gpu, count in counts.items())


def _pipelines_table(report: ClusterReport) -> str:
    plan, costs, links = report.plan, report.costs, Links(report.cluster)
    memories = dict(zip(plan.pipelines, memory_of_plan(plan, costs), strict=True))
    rows = []
    for pipeline, count in alike(plan):
        for place, stage in enumerate(pipeline.stages):
            cost = cost_with_gathers(costs, stage, pipeline.micro_batch, links)
            treated = [
                f"{number} {word}"
                for number, word in ((stage.recomputed, "recomputed"), (stage.offloaded, "offloaded"))
                if number
            ]
            rows.append(
                [
                    f"{count} x" if not place else "",
                    f"{pipeline.micro_batches} of {pipeline.micro_batch}" if not place else "",
                    stage.gpu,
                    f"{stage.tp} x {stage.shards}" if stage.shards > 1 else str(stage.tp),
                    f"{stage.first}-{stage.last}",
                    ", ".join(treated) or "kept",
                    format_seconds(cost.forward_s + cost.backward_s),
                    format_bytes(memories[pipeline][place].peak_bytes),
                    format_bytes(report.cluster.gpu(stage.gpu).memory_bytes),
                ]
            )
    header = [
        "pipelines",
        "micro-batches",
        "gpu",
        "tp x shards" if plan.has_shards else "tp",
        "layers",
        "activations",
        "a micro-batch",
        "peak",
        "of",
    ]
    return aligned(header, rows, right_from=6)


def shard_lines(report: ClusterReport) -> Iterator[str]:
    """A sentence on what trains a plan with shards."""
    if report.plan.has_shards:
        otherwise = "" if report.is_given else "; --max-shards 1 plans without shards"
        yield (
            'shards: train with backend="autohete", for other backends keep whole layers from forward to backward, in more memory'
            f" than this{otherwise}"
        )


def idle_lines(report: ClusterReport) -> Iterator[str]:
    """A sentence on each type of GPU that the plan leaves alone."""
    reasons = {idle.gpu: idle for idle in report.solution.idle}
    used = report.plan.used()
    for gpu in report.cluster.gpus:
        count = report.cluster.count(gpu.name) - used.get(gpu.name, 0)
        if not count:
            continue
        if report.is_given:
            why = "the given plan has no part for them"
        elif report.frontier:
            why = "plans with more of them that were made cost more a token"
        elif report.plan.planner == TWO_STAGES:
            why = "the two stages make no faster plan with more of them"
        elif (with_more_s := reasons[gpu.name].with_more_s) is None:
            why = "no plan with more of them was found: they lack memory, or the batch lacks samples for more pipelines or stages"
        else:
            why = (
                f"the fastest plan with more of them takes {format_seconds(with_more_s)}: what they compute is less than the"
                " bubble, the messages or the gradient sums that they add"
            )
        yield f"idle: {count} x {gpu.name}; {why}"


def _of_type(report: ClusterReport, gpu: Gpu) -> dict[str, Any]:
    return {
        "count": report.cluster.count(gpu.name),
        "used": report.plan.used().get(gpu.name, 0),
        "capacity_bytes": gpu.memory_bytes,
        "usd_per_hour": gpu.usd_per_hour,
    }


def _variants_table(report: ClusterReport, variants: Sequence[Variant]) -> str:
    rows = []
    ours = report.timeline.iteration_s
    for variant in (Variant(name="this plan", plan=report.plan), *variants):
        plan = variant.plan
        if plan is None:
            rows.append([variant.name, variant.missing, "-", "-", "-"])
            continue
        cost = usd_per_million_tokens(plan, report.cluster, report.seq) if _known(plan, report.cluster) else None
        rows.append(
            [
                variant.name,
                format_seconds(plan.iteration_s),
                f"{plan.iteration_s / ours:.2f}x",
                "-" if cost is None else _usd(cost),
                counted(plan.used()),
            ]
        )
    return aligned(["", "step", "of this", "a million tokens", "used"], rows, right_from=1, right_until=4)


def _known(plan: ClusterPlan, cluster: Cluster) -> bool:
    return set(plan.used()) <= {gpu.name for gpu in cluster.gpus}


def _frontier_table(report: ClusterReport) -> str:
    """Seconds against dollars: plans that none beats in both."""
    tokens = report.plan.global_batch * report.seq
    rows = [
        [
            format_seconds(point.solution.plan.iteration_s),
            f"{tokens / point.solution.plan.iteration_s:,.0f}",
            _usd(point.usd_per_step / tokens * 1e6),
            counted(point.solution.plan.used()),
        ]
        for point in report.frontier
    ]
    return aligned(["step", "tokens/s", "a million tokens", "used"], rows, right_from=0, right_until=3)


def report_json(report: ClusterReport) -> str:
    """The plan and its figures as one JSON object."""
    plan = report.plan
    memories, tokens = memory_of_plan(plan, report.costs), plan.global_batch * report.seq
    body = {
        "plan": json.loads(plan.to_json()),
        "iteration_s": report.timeline.iteration_s,
        "tokens_per_s": report.tokens_per_s,
        "utilization": report.utilization,
        "usd_per_million_tokens": report.usd_per_million_tokens,
        "seconds_by_cause": binding(plan, report.timeline),
        "model_bound_s": report.solution.model_bound_s,
        "compute_bound_s": report.solution.compute_bound_s,
        "solve_s": report.solution.solve_s,
        "first_s": report.solution.first_s,
        "gpus": {gpu.name: _of_type(report, gpu) for gpu in report.cluster.gpus},
        "idle": list(idle_lines(report)),
        "memory": [[asdict(held) | {"peak_bytes": held.peak_bytes} for held in row] for row in memories],
        "baselines": {v.name: v.plan and v.plan.iteration_s for v in report.baselines},
        "changes": {v.name: v.plan and v.plan.iteration_s for v in report.changes},
        "frontier": [
            {
                "iteration_s": point.solution.plan.iteration_s,
                "tokens_per_s": tokens / point.solution.plan.iteration_s,
                "usd_per_million_tokens": point.usd_per_step / tokens * 1e6,
                "used": point.solution.plan.used(),
            }
            for point in report.frontier
        ],
        "assumed": list(report.assumed),
        "without_price": report.cluster.without_price(),
        "costs": report.costs.source,
    }
    return json.dumps(body, indent=1)
