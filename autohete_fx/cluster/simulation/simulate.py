"""A step of a plan, event by event: what each unit computes, sends and waits for, and when the step ends.

Enter a `ClusterPlan`, a `Cluster` and a `CostTable`; leaves a `Timeline`. Every unit is a process that works through its pipeline
schedule's instructions in order. Messages share the ports of the nodes: while several are under way, each gets its part of what the
port carries for all of them. The GPUs of a unit each receive a part of a message and gather the whole. Those that hold shards of
a stage gather each layer's weights in forward and again in backward, where they reduce its gradients, too. All but the first gather
of a pass run beside what other layers compute. Replicas sum gradients over rings. A layer's sum begins when all stages that own it
have done its last backward. It overlaps with that of the layers before, and with passes of earlier stages. Sums and messages do not
slow each other down here. After all sums, whose norm every GPU needs, each runs its optimizer's step.

``blocking`` sends are those of NCCL on the stream that computes. Sender and receiver both stand still from the moment that both
are there until the message has arrived. ``buffered`` ones leave the sender at once; one message at a time goes over each
direction of a pair of stages. The published runs had blocking ones, and began sums when all owners had done their passes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autohete_fx.cluster.costs import CostTable, StageCost
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.memory import planned_cost
from autohete_fx.cluster.plan import ClusterPlan, Stage
from autohete_fx.cluster.simulation.events import Engine, Process, Sends, Span
from autohete_fx.cluster.simulation.gradient_sums import sum_spans, sums_of, with_gathers
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTime:
    """One stage's part of the step.

    Attributes:
        pipeline: index.
        place: of the stage in it.
        compute_s: forward and backward.
        backward_end_s: when its last backward ended.
        spans: what it did, in order.
    """

    pipeline: int
    place: int
    compute_s: float
    backward_end_s: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
        iteration_s: of the step.
        pipelines_s: until the last backward of all.
        reduce_s: gradient sums after it; others overlap with passes.
        update_s: optimizer's step after them.
        units: every stage's part.
    """

    iteration_s: float
    pipelines_s: float
    reduce_s: float
    update_s: float
    units: tuple[UnitTime, ...]


def simulate(
    plan: ClusterPlan,
    cluster: Cluster,
    costs: CostTable,
    *,
    sends: Sends = Sends.BLOCKING,
    links: Links | None = None,
    sums_within: bool = True,
) -> Timeline:
    """The step of a plan.

    Args:
        sums_within: sums begin within the last backward passes, as in a job; else when all owners have done their passes. Sums of
            stages with optimizer steps on the host never begin before.

    Raises:
        ClusterError: costs or links lack what the plan needs.
    """
    if plan.num_layers != len(costs.kinds):
        raise ClusterError(
            f"the plan has {plan.num_layers} layers, embedding and head among them, and {costs.model} has {len(costs.kinds)}."
            " Expected was the same number. Give the plan's own costs"
        )
    links = links or Links(cluster)
    table = [
        [cost_with_gathers(costs, stage, pipeline.micro_batch, links) for stage in pipeline.stages]
        for pipeline in plan.pipelines
    ]
    engine = Engine(plan, costs, table, links, sends)
    engine.run()
    pipelines_s = max(process.time_s for process in engine.processes)
    sums = sums_of(plan, costs, links)
    ends_s = {
        (process.pipeline, process.place): _backward_end_s(process) if sums_within else process.time_s
        for process in engine.processes
    }
    spans = sum_spans(sums, ends_s, within=sums_within)
    summed_s = max([pipelines_s, *(end_s for _, end_s in spans)])
    update_s = max(cost.update_s for row in table for cost in row)
    summing: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for each, span in zip(sums, spans, strict=True):
        for owner in each.owners:
            summing.setdefault(owner, []).append(span)
    units = tuple(
        UnitTime(
            pipeline=process.pipeline,
            place=process.place,
            compute_s=sum(span.end_s - span.begin_s for span in process.spans if span.what in ("forward", "backward")),
            backward_end_s=_backward_end_s(process),
            spans=(
                *process.spans,
                *_span("reduce", summing.get((process.pipeline, process.place), ())),
                *_span("update", [(summed_s, summed_s + table[process.pipeline][process.place].update_s)]),
            ),
        )
        for process in engine.processes
    )
    return Timeline(
        iteration_s=summed_s + update_s,
        pipelines_s=pipelines_s,
        reduce_s=summed_s - pipelines_s,
        update_s=update_s,
        units=units,
    )


def _backward_end_s(process: Process) -> float:
    return next(span.end_s for span in reversed(process.spans) if span.what == "backward")


def _span(what: str, parts: Sequence[tuple[float, float]]) -> Iterator[Span]:
    """From the first of these to the last one; nothing where they take no time."""
    begin_s, end_s = min((begin for begin, _ in parts), default=0.0), max((end for _, end in parts), default=0.0)
    if end_s > begin_s:
        yield Span(what=what, micro_batch=-1, begin_s=begin_s, end_s=end_s)


def cost_with_gathers(costs: CostTable, stage: Stage, micro_batch: int, links: Links) -> StageCost:
    """Seconds of a stage for a micro-batch, with gathers and reduces beside its layers' work."""
    cost = planned_cost(costs, stage, micro_batch)
    if stage.shards == 1:
        return cost
    weights = costs.sums(stage.gpu, stage.tp, micro_batch, stage.shards).weights(stage.first, stage.last + 1)
    return with_gathers(cost, weights, costs, tp=stage.tp, shards=stage.shards, within=links.within(stage.node))
