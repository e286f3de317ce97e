"""Seconds that GPUs take to make parts whole: those of a message within a unit, and the sums of gradients over replicas.

Enter a `ClusterPlan` with costs and links; leave seconds. Both are rings.
"""

import itertools
from collections.abc import Iterator

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.spec import Link

_FAST_BYTES_PER_S, _BOTH_WAYS_SHARE = 10e9, 0.5
"""A GPU in a ring sends and receives at once. Fast fabrics then give about half of what they carry one way, which is what links
state; slow ports give all of it."""


def gather_time(num_bytes: float, tp: int, within: Link | None) -> float:
    """Seconds in which the GPUs of a unit give each other the parts of a message of so many bytes that each received: a ring."""
    if tp == 1 or within is None:
        return 0.0
    return (tp - 1) * within.seconds(num_bytes / tp, tp)


def reduce_seconds(plan: ClusterPlan, costs: CostTable, links: Links) -> float:
    """Seconds in which replicas sum the gradients of all layers, nothing beside it.

    The owners of a layer form rings, one for each slice of its largest degree. A ring crosses each of its nodes' ports once,
    whatever number of owners is on the node. Rings of one node leave it by different GPUs.
    """
    leaving: dict[str, float] = {}
    inside: dict[str, float] = {}
    senders: dict[str, dict[tuple[int, int], int]] = {}
    peers: dict[str, set[str]] = {}
    for whole, owners in _sums(plan, costs):
        nodes: dict[str, list[tuple[int, int]]] = {}
        for index, place in owners:
            nodes.setdefault(plan.pipelines[index].stages[place].node, []).append((index, place))
        moved = 2 * (len(owners) - 1) / len(owners) * whole * costs.gradient_bytes_per_byte
        for node, here in nodes.items():
            degrees = {(index, place): plan.pipelines[index].stages[place].tp for index, place in here}
            if len(nodes) > 1:
                leaving[node] = leaving.get(node, 0.0) + moved
                senders.setdefault(node, {}).update(degrees)
                peers.setdefault(node, set()).update(nodes.keys() - {node})
            if len(here) > 1:
                inside[node] = inside.get(node, 0.0) + moved / min(degrees.values())
    seconds = [0.0]
    for node, num_bytes in leaving.items():
        pairs = sum(senders[node].values())
        rate = min(links.between(node, peer).bytes_per_s(num_bytes / pairs, pairs) for peer in peers[node])
        if rate / pairs > _FAST_BYTES_PER_S:
            rate *= _BOTH_WAYS_SHARE
        seconds.append(num_bytes / rate)
    for node, num_bytes in inside.items():
        seconds.append(num_bytes / links.within(node).bytes_per_s(num_bytes))
    return max(seconds)


def _sums(plan: ClusterPlan, costs: CostTable) -> Iterator[tuple[float, list[tuple[int, int]]]]:
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
