"""Seconds that GPUs take to make parts whole: a message or sharded weights within a unit, and sums of gradients over replicas.

Enter a `ClusterPlan` with costs and links; leave seconds. All are rings. A layer's sum begins when all its owners have done its
last backward, while they go on with the layers before it. Jobs do so where layers run one by one, and where our backend compiles
them. Sums of a stage with optimizer steps on the host begin after its passes. Its last layers' gradients are on the host and come
first in the order.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autohete_fx.cluster.costs import CostTable, StageCost
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.spec import Link

_FAST_BYTES_PER_S, _BOTH_WAYS_SHARE = 10e9, 0.5
"""A GPU in a ring sends and receives at once. Fast fabrics then give about half of what they carry one way, which is what links
state; slow ports give all of it."""


def gather_time(num_bytes: float, count: int, within: Link | None, rings: int = 1) -> float:
    """Seconds in which so many GPUs of a unit give each other their parts of so many bytes: a ring, beside others of the unit."""
    if count == 1 or within is None or not num_bytes:
        return 0.0
    return (count - 1) * within.seconds(num_bytes / count, count * rings)


def with_gathers(
    cost: StageCost,
    weights: tuple[Sequence[int], Sequence[int]],
    costs: CostTable,
    *,
    tp: int,
    shards: int,
    within: Link | None,
) -> StageCost:
    """Seconds of a stage for a micro-batch, with gathers and reduces of weights (`StageSums.weights`) beside its layers' work."""
    if shards == 1:
        return cost
    gathered, reduced = weights
    known = {each: gather_time(each, shards, within, tp) for each in {*gathered, *reduced}}
    first_s, last_s, all_s = known[gathered[0]], known[gathered[-1]], sum(known[each] for each in gathered)
    reduced_s = costs.gradient_bytes_per_byte * sum(known[each] for each in reduced)
    return replace(
        cost,
        forward_s=first_s + max(cost.forward_s, all_s - first_s),
        backward_s=last_s + max(cost.backward_s, all_s - last_s + reduced_s),
    )


_Parts = tuple[tuple[float, tuple[float, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """Gradients with equal owners.

    Attributes:
        owners: stages that have them: pipeline and place.
        port_s: by what it takes, the node's port or the links within a node, the seconds that it takes it.
        parts: of the layers in the order of backward. Each has its share of the bytes. By owner it has seconds from where its sum
            may begin to the end of the owner's last backward.
    """

    owners: tuple[tuple[int, int], ...]
    port_s: Mapping[tuple[str, bool], float]
    parts: _Parts


def sums_of(plan: ClusterPlan, costs: CostTable, links: Links) -> tuple[Summed, ...]:
    """The sums over replicas of the gradients of all layers.

    The owners of a layer form rings, one for each slice of its largest unit. A ring crosses each of its nodes' ports once,
    whatever number of owners is on the node. Rings of one node leave it by different GPUs. Messages are as large as if all sums
    of a node were one.
    """
    rows: list[tuple[tuple[tuple[int, int], ...], dict[tuple[str, bool], float], _Parts]] = []
    senders: dict[str, dict[tuple[int, int], int]] = {}
    peers: dict[str, set[str]] = {}
    for weights, owners in _owned_weights(plan, costs):
        whole = sum(num_bytes for _, num_bytes in weights)
        nodes: dict[str, list[tuple[int, int]]] = {}
        for index, place in owners:
            nodes.setdefault(plan.pipelines[index].stages[place].node, []).append((index, place))
        moved = 2 * (len(owners) - 1) / len(owners) * whole * costs.gradient_bytes_per_byte
        num_bytes: dict[tuple[str, bool], float] = {}
        for node, here in nodes.items():
            degrees = {(index, place): plan.pipelines[index].stages[place].num_gpus for index, place in here}
            if len(nodes) > 1:
                num_bytes[node, True] = moved
                senders.setdefault(node, {}).update(degrees)
                peers.setdefault(node, set()).update(nodes.keys() - {node})
            if len(here) > 1:
                num_bytes[node, False] = moved / min(degrees.values())
        rows.append((tuple(owners), num_bytes, _parts(plan, costs, weights, owners)))
    totals: dict[tuple[str, bool], float] = {}
    for _, num_bytes, _ in rows:
        for port, count in num_bytes.items():
            totals[port] = totals.get(port, 0.0) + count
    rates = {
        (node, leaves): _rate(links, node, total, sum(senders[node].values()), peers[node])
        if leaves
        else links.within(node).bytes_per_s(total)
        for (node, leaves), total in totals.items()
        if total
    }
    return tuple(
        Summed(
            owners=owners, port_s={port: count / rates[port] for port, count in num_bytes.items() if count}, parts=parts
        )
        for owners, num_bytes, parts in rows
    )


def _parts(
    plan: ClusterPlan, costs: CostTable, weights: Sequence[tuple[int, float]], owners: Sequence[tuple[int, int]]
) -> _Parts:
    """`Summed.parts` of layers with so many bytes each."""
    whole = sum(num_bytes for _, num_bytes in weights) or 1.0
    found = []
    stages = [(plan.pipelines[index].stages[place], plan.pipelines[index].micro_batch) for index, place in owners]
    sums = [costs.sums(stage.gpu, stage.tp, micro_batch, stage.shards) for stage, micro_batch in stages]
    for layer, num_bytes in reversed(weights):
        left_s = tuple(
            0.0
            if stage.offloaded
            else of_stage.backward_s(stage.first, max(layer, stage.first), recomputed=stage.recomputed)
            for (stage, _), of_stage in zip(stages, sums, strict=True)
        )
        found.append((num_bytes / whole, left_s))
    return tuple(found)


def sum_spans(
    sums: Sequence[Summed], ends_s: Mapping[tuple[int, int], float], *, within: bool = True
) -> list[tuple[float, float]]:
    """When each sum begins and ends, its layers one after another, and one at a time on each port.

    Args:
        sums: of a plan.
        ends_s: by pipeline and place, when the stage's last backward ends.
        within: a layer waits for its own last backward on all of its owners; else for these ends.
    """

    def ready(owners: Sequence[tuple[int, int]], left_s: Sequence[float]) -> float:
        ends = zip(owners, left_s, strict=True)
        return max(ends_s[owner] - (seconds if within else 0.0) for owner, seconds in ends)

    ready_s = [[ready(each.owners, left_s) for _, left_s in each.parts] for each in sums]
    spans = [(ready[0], ready[-1]) for ready in ready_s]
    free_s: dict[tuple[str, bool], float] = {}
    for place in sorted(range(len(sums)), key=lambda place: ready_s[place][0]):
        begins, ends = [], []
        for port, seconds in sums[place].port_s.items():
            end_s = free_s.get(port, -math.inf)
            begins.append(max(end_s, ready_s[place][0]))
            for since_s, (share, _) in zip(ready_s[place], sums[place].parts, strict=True):
                end_s = max(end_s, since_s) + share * seconds
            free_s[port] = end_s
            ends.append(end_s)
        if begins:
            spans[place] = min(begins), max(ends)
    return spans


def last_sums_s(plan: ClusterPlan, sums: Sequence[Summed]) -> float:
    """Seconds at least from the end of all passes to the end of all sums.

    A pipeline ends with its first stage. Gradients that the first stages of all pipelines own are there shortly before: as long
    as such a stage takes for the layers below.
    """
    firsts = {(index, 0) for index in range(len(plan.pipelines))}
    parts: list[tuple[float, Mapping[tuple[str, bool], float], float]] = []
    for each in sums:
        if firsts.issubset(each.owners):
            for share, left_s in each.parts:
                most_s = max(seconds for owner, seconds in zip(each.owners, left_s, strict=True) if owner in firsts)
                parts.append((most_s, each.port_s, share))
    port_s: dict[tuple[str, bool], float] = {}
    last_s = 0.0
    for left_s, taken_s, share in sorted(parts, key=lambda part: part[0]):
        for port, seconds in taken_s.items():
            port_s[port] = port_s.get(port, 0.0) + share * seconds
            last_s = max(last_s, port_s[port] - left_s)
    return last_s


def _rate(links: Links, node: str, num_bytes: float, pairs: int, peers: Iterable[str]) -> float:
    """Bytes a second that leave a node for its peers."""
    rate = min(links.between(node, peer).bytes_per_s(num_bytes / pairs, pairs) for peer in peers)
    return rate * _BOTH_WAYS_SHARE if rate / pairs > _FAST_BYTES_PER_S else rate


def _owned_weights(
    plan: ClusterPlan, costs: CostTable
) -> Iterator[tuple[list[tuple[int, float]], list[tuple[int, int]]]]:
    """By layer, bytes of weights whose gradients are summed, and their owners: pipeline and place. Tied weights have the last
    stages as owners, too, and are of the first layer, whose backward completes their gradients."""
    tied = [(index, place) for index, pipeline in enumerate(plan.pipelines) for place in {0, len(pipeline.stages) - 1}]
    if not costs.tied_bytes or len(tied) == len(plan.pipelines):
        tied = []
    for layers, owners in owned(plan):
        if len(owners) > 1:
            weights = [(layer, float(costs.whole_bytes(layer))) for layer in layers]
            if tied and not layers.start:
                weights[0] = 0, weights[0][1] - costs.tied_bytes
            yield weights, list(enumerate(owners))
    if tied:
        yield [(0, float(costs.tied_bytes))], tied


def owned(plan: ClusterPlan) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Runs of layers with the same owners: for each pipeline the place of its stage."""
    firsts = sorted({stage.first for pipeline in plan.pipelines for stage in pipeline.stages})
    places = [0] * len(plan.pipelines)
    for first, stop in itertools.pairwise([*firsts, plan.num_layers]):
        for index, pipeline in enumerate(plan.pipelines):
            if pipeline.stages[places[index]].last < first:
                places[index] += 1
        yield range(first, stop), tuple(places)
