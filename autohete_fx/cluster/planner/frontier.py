"""Plans on parts of a cluster and on larger ones: the cheapest, the frontier of seconds and dollars, and what more would buy.

Enter a `Cluster` and what `plan_cluster` takes; leave plans for the clusters that are like it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autohete_fx.cluster.inputs.described import NODE_GPUS
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.planner.solve import Solution
from autohete_fx.cluster.spec import Cluster, Link, Node, Rates
from autohete_fx.errors import ClusterError

Solve = Callable[[Cluster], Solution]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A solution for a part of a cluster, with the dollars that a step of its GPUs costs."""

    solution: Solution
    part: Cluster
    usd_per_step: float


def usd_per_step(plan: ClusterPlan, cluster: Cluster) -> float:
    """Dollars of the used GPUs for one step; every type has a price (`Cluster.require_prices`)."""
    prices = {gpu.name: gpu.usd_per_hour or 0.0 for gpu in cluster.gpus}
    return sum(count * prices[gpu] * plan.iteration_s / 3600 for gpu, count in plan.used().items())


def frontier(cluster: Cluster, solve: Solve, also: Mapping[str, int] = MappingProxyType({})) -> list[Priced]:
    """Plans that none beats in both seconds and dollars, the fastest first: of the whole cluster and of parts of it.

    Parts are the whole halved again and again, and the same of each type alone. ``also``: by type, GPUs of one more part, where
    the cluster has them. Raises ClusterError where a type has no price, or where nothing fits the whole.
    """
    cluster.require_prices()
    found = []
    for number, part in enumerate(_parts(cluster, also)):
        try:
            solution = solve(part)
        except ClusterError:
            if not number:
                raise
            continue
        found.append(Priced(solution=solution, part=part, usd_per_step=usd_per_step(solution.plan, cluster)))
    found.sort(key=lambda priced: (priced.solution.plan.iteration_s, priced.usd_per_step))
    kept: list[Priced] = []
    for priced in found:
        if not kept or priced.usd_per_step < kept[-1].usd_per_step * (1 - 1e-9):
            kept.append(priced)
    return kept


def _parts(cluster: Cluster, also: Mapping[str, int]) -> Iterator[Cluster]:
    seen = set()
    for counts in _counts(cluster, also):
        nodes = tuple(_taken(cluster, counts))
        if nodes not in seen:
            seen.add(nodes)
            yield with_nodes(cluster, nodes)


def _counts(cluster: Cluster, also: Mapping[str, int]) -> Iterator[Mapping[str, int]]:
    """By type, GPUs of each part."""
    counts = {gpu.name: cluster.count(gpu.name) for gpu in cluster.gpus}
    for types in (counts, *({gpu: count} for gpu, count in counts.items())):
        part, share = types, 1.0
        while any(part.values()):
            yield part
            share /= 2
            part = {gpu: int(count * share) for gpu, count in types.items()}
    if also and all(counts.get(gpu, 0) >= count for gpu, count in also.items()):
        yield also


def _taken(cluster: Cluster, counts: Mapping[str, int]) -> Iterator[Node]:
    """Whole nodes of each type up to so many GPUs, then a part of one."""
    for gpu, left in counts.items():
        for node in cluster.nodes:
            if node.gpu == gpu and left:
                taken = min(left, node.gpus)
                left -= taken
                yield replace(node, gpus=taken)


def with_nodes(cluster: Cluster, nodes: Sequence[Node]) -> Cluster:
    """The cluster with other nodes of types that it has."""
    types = {node.gpu for node in nodes}
    return replace(cluster, nodes=tuple(nodes), gpus=tuple(gpu for gpu in cluster.gpus if gpu.name in types))


def changes(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Clusters that differ by one thing, named: a GPU or a node more or less of each type, twice the network between nodes.

    A GPU more goes to the smallest node of its type, if that has fewer than `NODE_GPUS`, or than the largest. Else it is a node of
    its own. A GPU less leaves the smallest node.
    """
    for gpu in cluster.gpus:
        alike = [node for node in cluster.nodes if node.gpu == gpu.name]
        last, least = alike[-1], min(alike, key=lambda node: node.gpus)
        room = max(NODE_GPUS, *(node.gpus for node in alike))
        rest, others = ([node for node in cluster.nodes if node != taken] for taken in (last, least))
        fresh = replace(last, name=_unused(f"{last.name}-more", cluster))
        one = replace(least, gpus=least.gpus + 1) if least.gpus < room else replace(fresh, gpus=1)
        yield f"1 more {gpu.name}", with_nodes(cluster, [*(others if least.gpus < room else cluster.nodes), one])
        fewer = [*others, replace(least, gpus=least.gpus - 1)] if least.gpus > 1 else others
        if fewer:
            yield f"1 less {gpu.name}", with_nodes(cluster, fewer)
        if last.gpus > 1:
            yield f"{last.gpus} more {gpu.name}", with_nodes(cluster, [*cluster.nodes, fresh])
            if rest:
                yield f"{last.gpus} less {gpu.name}", with_nodes(cluster, rest)
    if len(cluster.nodes) > 1:
        faster = tuple(replace(joined, link=_twice(joined.link)) for joined in cluster.between)
        zones = tuple(replace(joined, link=_twice(joined.link)) for joined in cluster.zones)
        yield "twice the network", replace(cluster, between=faster, zones=zones)


def _unused(name: str, cluster: Cluster) -> str:
    """The name, longer where a node has it."""
    return _unused(f"{name}-more", cluster) if any(node.name == name for node in cluster.nodes) else name


def _twice(link: Link) -> Link:
    rates = tuple(
        Rates(pairs=rates.pairs, points=tuple((size, 2 * rate) for size, rate in rates.points)) for rates in link.rates
    )
    return replace(link, rates=rates)
