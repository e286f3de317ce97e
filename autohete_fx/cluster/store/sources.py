"""Sources of the states that a job's ranks need before they train: their node's disk, a peer, or the cloud.

Nodes first read their own disks and the cloud, then peers send. The seconds until the slowest node has its states are

    max over nodes of ((local + served) / b_local + cloud_first_s + cloud / b_cloud)  +  max over nodes of max(peer, sent) / b_peer

where nodes that read from the cloud share its bandwidth, and others do not wait for its first byte. ``served`` is read for others
alone, and a node sends and receives at once. Nearest first is one way: own disk, else a peer, else one reader in the cloud for
all. Others let each node receive at most so many bytes from peers, small pieces first. It reads the rest from the cloud itself,
though a disk may have it. The quickest way is taken, and nearest first among equals. All ranks choose alike, from the same values.
A choice by whole layers, before a plan is taken, is the choice by their parameters but for the smallest ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_WORTH = 0.05
"""Share of the seconds that a way must save before what is nearer is left aside."""
_MOST_LIMITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Bytes a second at which a node reads states.

    Attributes:
        local: from its own disk.
        peer: from other nodes.
        cloud: from the cloud, where it reads alone.
        cloud_of_all: from the cloud, all nodes together.
        cloud_first_s: seconds until the cloud's first byte, in which states of a small model are there from peers.
    """

    local: float = 2e9
    peer: float = 1e9
    cloud: float = 0.5e9
    cloud_of_all: float = 2.5e9
    cloud_first_s: float = 1.0


ASSUMED = Bandwidths()
"""The rates of jobs that are told nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that move to and from a node.

    Attributes:
        local: read from its disk.
        peer: received from other nodes.
        cloud: read from the cloud.
        sent: to other nodes.
        served: read from its disk for other nodes alone.
    """

    local: float = 0.0
    peer: float = 0.0
    cloud: float = 0.0
    sent: float = 0.0
    served: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """How the states that a job's ranks need reach them.

    Attributes:
        local: by rank, those on its node's disk that it needs.
        cloud: by rank, those that it reads from the cloud, for itself and others.
        peer: by sender and receiver, those that are sent.
    """

    local: Mapping[int, tuple[str, ...]]
    cloud: Mapping[int, tuple[str, ...]]
    peer: Mapping[tuple[int, int], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """All that is needed, and where it is.

    Attributes:
        needs: by rank, keys of pieces.
        nodes: by rank, its node.
        disks: by node, pieces on its disk.
        cloud: by piece there, the saved piece that it is a part of. A rank reads all that is wanted of a saved piece.
        sizes: bytes of pieces, and of saved pieces in the cloud.
    """

    needs: Sequence[Sequence[str]]
    nodes: Sequence[str]
    disks: Mapping[str, set[str]]
    cloud: Mapping[str, str]
    sizes: Mapping[str, float]


def move_parts_s(rows: Mapping[str, Moved], bandwidths: Bandwidths) -> tuple[float, float, float]:
    """Seconds of the node that reads longest from its disk and the cloud, and of the one that then receives or sends most.

    They are in the order disk, peers, cloud.
    """
    readers = sum(row.cloud > 0 for row in rows.values())
    cloud = min(bandwidths.cloud, bandwidths.cloud_of_all / max(1, readers))
    read = [
        (
            (row.local + row.served) / bandwidths.local,
            bandwidths.cloud_first_s + row.cloud / cloud if row.cloud else 0.0,
        )
        for row in rows.values()
    ]
    local_s, cloud_s = max(read, key=sum, default=(0.0, 0.0))
    return local_s, max((max(row.peer, row.sent) / bandwidths.peer for row in rows.values()), default=0.0), cloud_s


def move_s(rows: Mapping[str, Moved], bandwidths: Bandwidths) -> float:
    """Seconds until all nodes have their states."""
    return sum(move_parts_s(rows, bandwidths))


def moved_by(fetch: Fetch, wanted: Wanted) -> dict[str, Moved]:
    """By node, the bytes that it moves. Ranks of one node read the same piece of its disk once, and move nothing among
    themselves."""
    nodes, sizes = wanted.nodes, wanted.sizes
    own, served = ({node: set[str]() for node in nodes} for _ in range(2))
    peer, sent, cloud = (dict.fromkeys(nodes, 0.0) for _ in range(3))
    for rank, keys in fetch.local.items():
        own[nodes[rank]].update(keys)
    for (sender, rank), keys in fetch.peer.items():
        served[nodes[sender]].update(set(keys).difference(fetch.cloud.get(sender, ())))
        if nodes[sender] != nodes[rank]:
            num_bytes = sum(sizes[key] for key in keys)
            peer[nodes[rank]] += num_bytes
            sent[nodes[sender]] += num_bytes
    for rank, keys in fetch.cloud.items():
        cloud[nodes[rank]] += sum(sizes[saved] for saved in {wanted.cloud[key] for key in keys})
    return {
        node: Moved(
            local=sum(sizes[key] for key in own[node]),
            peer=peer[node],
            cloud=cloud[node],
            sent=sent[node],
            served=sum(sizes[key] for key in served[node] - own[node]),
        )
        for node in dict.fromkeys(nodes)
    }


def quickest(wanted: Wanted, bandwidths: Bandwidths) -> Fetch:
    """The way in which the slowest node has its states first; what is nearest among equals."""
    wanted = replace(wanted, needs=[sorted(keys, key=lambda key: (wanted.sizes[key], key)) for keys in wanted.needs])
    best = _fetch(wanted, float("inf"))
    best_s, limits = move_s(moved_by(best, wanted), bandwidths), _limits(best, wanted)
    for own_disk in (True, False) if bandwidths.cloud > bandwidths.local else (True,):
        for limit in limits:
            fetch = _fetch(wanted, limit, own_disk=own_disk)
            seconds = move_s(moved_by(fetch, wanted), bandwidths)
            if seconds < best_s * (1 - _WORTH):
                best, best_s = fetch, seconds
    return best


def _limits(nearest: Fetch, wanted: Wanted) -> list[float]:
    """Bytes that a node may receive, the most first: sums of the first pieces that it receives where all comes from the nearest."""
    sums: dict[str, float] = {}
    limits = {0.0}
    for (_, rank), keys in nearest.peer.items():
        for key in keys:
            node = wanted.nodes[rank]
            sums[node] = sums.get(node, 0.0) + wanted.sizes[key]
            limits.add(sums[node])
    ordered = sorted(limits, reverse=True)
    return [*ordered[:: -(-len(ordered) // _MOST_LIMITS)], 0.0] if len(ordered) > _MOST_LIMITS else ordered


def _fetch(wanted: Wanted, limit: float, *, own_disk: bool = True) -> Fetch:
    """The way in which no node receives more than ``limit`` bytes from peers if the cloud has the rest."""
    nodes, cloud, sizes = wanted.nodes, wanted.cloud, wanted.sizes
    holders: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        for key in wanted.disks[node]:
            holders.setdefault(key, []).append(rank)
    local: dict[int, list[str]] = {}
    fetched: dict[int, dict[str, None]] = {}
    peer: dict[tuple[int, int], list[str]] = {}
    sent, received, readers = [0.0] * len(nodes), dict.fromkeys(nodes, 0.0), _readers(wanted, holders)
    of_node: dict[tuple[str, str], int] = {(nodes[rank], saved): rank for saved, rank in readers.items()}
    for rank, keys in enumerate(wanted.needs):
        for key in keys:
            node, size = nodes[rank], sizes[key]
            here = key in wanted.disks[node]
            if here and (own_disk or key not in cloud):
                local.setdefault(rank, []).append(key)
                continue
            saved = cloud.get(key, "")
            reader = of_node.get((node, saved), readers.get(saved, rank))
            able = holders[key] if key in holders and not here else [reader]
            if (node, saved) in of_node:
                able = [reader]
            sender = min(able, key=lambda other: (sent[other], other), default=rank)
            near = nodes[sender] == node
            if key in cloud and (sender == rank or (not near and received[node] + size > limit)):
                fetched.setdefault(rank, {})[key] = None
                of_node.setdefault((node, saved), rank)
                continue
            if sender == reader:
                fetched.setdefault(reader, {})[key] = None
            sent[sender] += size
            received[node] += 0.0 if near else size
            peer.setdefault((sender, rank), []).append(key)
    return Fetch(
        local={rank: tuple(keys) for rank, keys in local.items()},
        cloud={rank: tuple(keys) for rank, keys in sorted(fetched.items())},
        peer={pair: tuple(keys) for pair, keys in sorted(peer.items())},
    )


def _readers(wanted: Wanted, holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """By saved piece of which no disk has all that is needed, the rank that reads it for all: of those that need it, one whose node
    reads least so far."""
    needing: dict[str, dict[int, None]] = {}
    for rank, keys in enumerate(wanted.needs):
        for key in keys:
            if key not in holders:
                assert key in wanted.cloud, "a save is taken if all of it is somewhere"
                needing.setdefault(wanted.cloud[key], {})[rank] = None
    read = dict.fromkeys(wanted.nodes, 0.0)
    found: dict[str, int] = {}
    for saved in sorted(needing, key=lambda saved: (-wanted.sizes[saved], saved)):
        rank = min(needing[saved], key=lambda rank: (read[wanted.nodes[rank]], rank))
        read[wanted.nodes[rank]] += wanted.sizes[saved]
        found[saved] = rank
    return found
