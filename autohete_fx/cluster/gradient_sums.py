"""Seconds that GPUs take to make parts whole: a message or sharded weights within a unit, and sums of gradients over replicas.

Enter a `ClusterPlan` with costs and links; leave seconds. All are rings. A sum begins when all its owners have done their passes,
while earlier stages still compute: the job does so, whatever compiles its stages.
"""

import itertools
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """Gradients with equal owners.

    Attributes:
        owners: stages that have them: pipeline and place.
        port_s: by what it takes, the node's port or the links within a node, the seconds that it takes it.
    """

    owners: tuple[tuple[int, int], ...]
    port_s: Mapping[tuple[str, bool], float]


def sums_of(plan: ClusterPlan, costs: CostTable, links: Links) -> tuple[Summed, ...]:
    """The sums over replicas of the gradients of all layers.

    The owners of a layer form rings, one for each slice of its largest unit. A ring crosses each of its nodes' ports once,
    whatever number of owners is on the node. Rings of one node leave it by different GPUs. Messages are as large as if all sums
    of a node were one.
    """
    rows: list[tuple[tuple[tuple[int, int], ...], dict[tuple[str, bool], float]]] = []
    senders: dict[str, dict[tuple[int, int], int]] = {}
    peers: dict[str, set[str]] = {}
    for whole, owners in _owned_weights(plan, costs):
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
        rows.append((tuple(owners), num_bytes))
    totals: dict[tuple[str, bool], float] = {}
    for _, num_bytes in rows:
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
        Summed(owners=owners, port_s={port: count / rates[port] for port, count in num_bytes.items() if count})
        for owners, num_bytes in rows
    )


def sum_spans(sums: Sequence[Summed], ends_s: Mapping[tuple[int, int], float]) -> list[tuple[float, float]]:
    """When each sum begins and ends: after the last pass of its last owner, one at a time on each port.

    Args:
        sums: of a plan.
        ends_s: by pipeline and place, when the stage has done all passes.
    """
    ready_s = [max(ends_s[owner] for owner in each.owners) for each in sums]
    spans = [(ready, ready) for ready in ready_s]
    free_s: dict[tuple[str, bool], float] = {}
    for place in sorted(range(len(sums)), key=ready_s.__getitem__):
        begins = {port: max(ready_s[place], free_s.get(port, 0.0)) for port in sums[place].port_s}
        for port, seconds in sums[place].port_s.items():
            free_s[port] = begins[port] + seconds
        if begins:
            spans[place] = min(begins.values()), max(free_s[port] for port in begins)
    return spans


def last_sums_s(plan: ClusterPlan, sums: Sequence[Summed]) -> float:
    """Seconds at least from the end of all passes to the end of all sums.

    Gradients that the first stages of all pipelines own cannot be summed before: a pipeline ends with its first stage.
    """
    firsts = {(index, 0) for index in range(len(plan.pipelines))}
    port_s: dict[tuple[str, bool], float] = {}
    for each in sums:
        if firsts.issubset(each.owners):
            for port, seconds in each.port_s.items():
                port_s[port] = port_s.get(port, 0.0) + seconds
    return max(port_s.values(), default=0.0)


def _rate(links: Links, node: str, num_bytes: float, pairs: int, peers: Iterable[str]) -> float:
    """Bytes a second that leave a node for its peers."""
    rate = min(links.between(node, peer).bytes_per_s(num_bytes / pairs, pairs) for peer in peers)
    return rate * _BOTH_WAYS_SHARE if rate / pairs > _FAST_BYTES_PER_S else rate


def _owned_weights(plan: ClusterPlan, costs: CostTable) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Bytes of weights whose gradients are summed, and their owners: pipeline and place. Tied weights have the last stages as
    owners, too."""
    tied = [(index, place) for index, pipeline in enumerate(plan.pipelines) for place in {0, len(pipeline.stages) - 1}]
    if not costs.tied_bytes or len(tied) == len(plan.pipelines):
        tied = []
    for layers, owners in owned(plan):
        whole = sum(costs.whole_bytes(layer) for layer in layers)
        if tied and not layers.start:
            whole -= costs.tied_bytes
        if len(owners) > 1:
            yield whole, list(enumerate(owners))
    if tied:
        yield costs.tied_bytes, tied


def owned(plan: ClusterPlan) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Runs of layers with the same owners: for each pipeline the place of its stage."""
    firsts = sorted({stage.first for pipeline in plan.pipelines for stage in pipeline.stages})
    places = [0] * len(plan.pipelines)
    for first, stop in itertools.pairwise([*firsts, plan.num_layers]):
        for index, pipeline in enumerate(plan.pipelines):
            if pipeline.stages[places[index]].last < first:
                places[index] += 1
        yield range(first, stop), tuple(places)
