"""Clusters: nodes with GPUs, and the links between and within them.

Values only. A `Cluster` is read from a JSON file or a short form (`parse`), or measured.
"""

import bisect
import itertools
import math
from dataclasses import dataclass, field

from autohete_fx.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The bandwidth of a link while ``pairs`` pairs of GPUs send over it at once, all of them together.

    Attributes:
        pairs: GPUs that send, each to one that receives.
        points: (bytes of one pair's message, bytes a second of all pairs), by rising bytes. Between points the rate is linear in
            the logarithm of the bytes. A message of fewer bytes than the first point's takes as long as that one.
    """

    pairs: int
    points: tuple[tuple[float, float], ...]

    def at(self, num_bytes: float) -> float:
        """Bytes a second of all pairs, each with a message of ``num_bytes``."""
        points = self.points
        if num_bytes <= points[0][0]:
            return points[0][1] * num_bytes / points[0][0]
        if num_bytes >= points[-1][0]:
            return points[-1][1]
        place = bisect.bisect_right(points, (num_bytes, math.inf))
        (low, slow), (high, fast) = points[place - 1], points[place]
        share = math.log(num_bytes / low) / math.log(high / low)
        return slow + share * (fast - slow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of a connection that several GPUs may share: a node's port, or the fabric within a node.

    Attributes:
        name: for tables.
        rates: by rising number of pairs.
    """

    name: str
    rates: tuple[Rates, ...]

    def bytes_per_s(self, num_bytes: float, pairs: float = 1) -> float:
        """Bytes a second of ``pairs`` pairs together, linear between the numbers that are known, constant beyond the last."""
        rates = self.rates
        if pairs <= rates[0].pairs:
            return rates[0].at(num_bytes) * pairs / rates[0].pairs
        for fewer, more in itertools.pairwise(rates):
            if pairs <= more.pairs:
                share = (pairs - fewer.pairs) / (more.pairs - fewer.pairs)
                return (1 - share) * fewer.at(num_bytes) + share * more.at(num_bytes)
        return rates[-1].at(num_bytes)

    def seconds(self, num_bytes: float, pairs: float = 1) -> float:
        """Until messages of ``num_bytes`` of each of ``pairs`` pairs have arrived, nothing else on the link."""
        return pairs * num_bytes / self.bytes_per_s(num_bytes, pairs) if num_bytes else 0.0


def steady_link(name: str, bytes_per_s: float, *, latency_s: float, pairs: int = 1) -> Link:
    """A link of a data sheet: each GPU sends at ``bytes_per_s`` after a latency, up to ``pairs`` of them beside each other.

    Raises ClusterError for a rate of 0 or less.
    """
    if bytes_per_s <= 0:
        raise ClusterError(
            f"the link {name!r} has a rate of 0 or less. Expected was more than 0. Leave out nodes that cannot be reached"
        )
    points = []
    for power in range(31):
        num_bytes = float(1 << power)
        points.append((num_bytes, num_bytes / (latency_s + num_bytes / bytes_per_s)))
    single = tuple(points)
    rates = [Rates(pairs=1, points=single)]
    if pairs > 1:
        rates.append(Rates(pairs=pairs, points=tuple((size, pairs * rate) for size, rate in single)))
    return Link(name=name, rates=tuple(rates))


def slower_link(one: Link, other: Link) -> Link:
    """Two links one after the other: for each number of pairs and size of message, the slower of the two counts."""
    rates = []
    for pairs in sorted({row.pairs for link in (one, other) for row in link.rates}):
        sizes = sorted({size for link in (one, other) for row in link.rates for size, _ in row.points})
        points = tuple((size, min(link.bytes_per_s(size, pairs) for link in (one, other))) for size in sizes)
        rates.append(Rates(pairs=pairs, points=points))
    return Link(name=f"{one.name}, {other.name}", rates=tuple(rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A type of GPU.

    Attributes:
        name: its key in costs and links.
        memory_bytes: that a plan may take, of each GPU.
        usd_per_hour: price of one; None where nobody said.
    """

    name: str
    memory_bytes: int
    usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with GPUs of one type.

    Attributes:
        name: unique in its cluster.
        gpu: name of their type.
        gpus: how many.
        zone: of the datacentre; nodes of two zones are joined by the link of the zones.
    """

    name: str
    gpu: str
    gpus: int
    zone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A link between two kinds of places: GPU types within one zone, or zones."""

    source: str
    target: str
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedLinks:
    """Links that were timed; `Cluster` explains them."""

    within: tuple[Joined, ...]
    between: tuple[Joined, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes and what joins them.

    Attributes:
        gpus: the types that nodes have.
        nodes: the machines.
        within: by GPU type, the fabric of a node (``source`` equals ``target``).
        between: by the GPU types of sender and receiver, the sender's port.
        zones: by zones of sender and receiver, where they differ; it binds beside the port.
    """

    gpus: tuple[Gpu, ...]
    nodes: tuple[Node, ...]
    within: tuple[Joined, ...]
    between: tuple[Joined, ...]
    zones: tuple[Joined, ...] = field(default=())

    def __post_init__(self) -> None:
        types = {gpu.name for gpu in self.gpus}
        names = [node.name for node in self.nodes]
        if not names:
            raise ClusterError("the cluster has no nodes. At least one was expected. Give nodes, or counts of GPUs")
        for node in self.nodes:
            if node.gpu not in types:
                raise ClusterError(
                    f"node {node.name!r} has GPUs {node.gpu!r}, and the cluster describes {sorted(types)}. Expected was one of"
                    " these. Describe the type, or correct the node"
                )
            if node.gpus < 1:
                raise ClusterError(
                    f"node {node.name!r} has {node.gpus} GPUs. Expected was at least 1. Leave the node out"
                )
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ClusterError(f"two nodes are called {twice[0]!r}. Expected were different names. Rename one")
        for joined in (*self.within, *self.between, *self.zones):
            if any(rate <= 0 or size <= 0 for rates in joined.link.rates for size, rate in rates.points):
                raise ClusterError(
                    f"the link {joined.link.name!r} from {joined.source!r} to {joined.target!r} has a rate of 0 or less. Expected"
                    " was more than 0. Leave out nodes that cannot be reached"
                )

    def count(self, gpu: str) -> int:
        """How many GPUs of a type there are."""
        return sum(node.gpus for node in self.nodes if node.gpu == gpu)

    def units(self, gpu: str, zone: str, num_gpus: int) -> int:
        """How many units of so many GPUs of a type the nodes of a zone hold; a unit stays within a node."""
        return sum(node.gpus // num_gpus for node in self.nodes if (node.gpu, node.zone) == (gpu, zone))

    def require_prices(self) -> None:
        """Raise ClusterError where a type of GPU has no price."""
        unknown = self.without_price()
        if unknown:
            entries = ", ".join(f'"{gpu}": DOLLARS' for gpu in unknown)
            raise ClusterError(
                f"there is no price of {', '.join(unknown)}. Expected was one for every type of GPU. Give"
                f' "usd_per_hour": {{{entries}}} in a cluster file'
            )

    def without_price(self) -> list[str]:
        """The types of GPU that have no price."""
        return [gpu.name for gpu in self.gpus if gpu.usd_per_hour is None]

    def gpu(self, name: str) -> Gpu:
        """The type of that name."""
        return next(gpu for gpu in self.gpus if gpu.name == name)
