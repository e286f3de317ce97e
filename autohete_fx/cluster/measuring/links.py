"""The cluster that a job runs on: its nodes, the memory of their GPUs, and its links, timed by the ranks themselves.

Enter the ranks of a process group as `Member`s; leaves a `Cluster` that is equal on all ranks. Each kind of pair is timed. Two
GPUs of one node go by the node's type, and two GPUs of two nodes by the types of sender and receiver. One pair sends alone
first, then as many at once as the nodes have GPUs, because those of a node may share a port. Within a node they are half as
many as its GPUs. Links state one direction, and the node's other GPUs send at the same rate the other way.

A message goes there, and a message of the smallest size comes back. Half of such a round trip of two smallest messages is the
smallest message's time. The rest of a larger one's time is its own.

All ranks work through one list of trials in one order, with a barrier before each. Every send has its receive, and nobody sends
while others are timed.
"""

import json
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autohete_fx.cache import load_text, store_text
from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.spec import Cluster, Gpu, Joined, Link, Node, Rates, TimedLinks
from autohete_fx.errors import ClusterError
from autohete_fx.ir.files import SavedAs, spelled
from autohete_fx.machine.devices import RESERVE_SHARE
from autohete_fx.machine.measure import device_capacity_bytes
from autohete_fx.options import Size, resolve_bytes

_CACHED_AS = "cluster_links"
_SIZES = {"cpu": (2**12, 2**18, 2**22), "cuda": (2**12, 2**18, 2**22, 2**26)}
"""Bytes of messages, the smallest first."""
_WARM_UPS, _REPEATS = 2, 5
_LEAST_S = 1e-7
_FILES = SavedAs(
    kind="measured links", writer="a job", again="they are measured again", schema_version=1, error=ClusterError
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Pairs of ranks that send at once.

    Attributes:
        within: they are of one node.
        source: type of the GPUs that send.
        target: type of those that receive.
        pairs: sender and receiver of each; no rank is in two.
    """

    within: bool
    source: str
    target: str
    pairs: tuple[tuple[int, int], ...]


def measured_cluster(
    members: Sequence[Member],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    memory_budget: Size | None = None,
    cache_dir: str | Path | None = None,
    fresh: bool = False,
) -> Cluster:
    """Time the links, or read those of an earlier job on such nodes. All ranks call it; all get one cluster.

    Args:
        members: all ranks, in order.
        device: of this rank.
        group: of all ranks, for values in host memory; None: the default one.
        memory_budget: of each GPU, in bytes or as a share. None: `RESERVE_SHARE` less than there is, which ranks of one host
            share where their device is its CPU.
        cache_dir: where links are kept; None: `cache.cache_dir`.
        fresh: time them whatever is kept.

    Raises:
        ClusterError: a node has GPUs of two types.
    """
    nodes = nodes_of(members)
    memory = _memory(members, device, memory_budget, group)
    # The first rank's file counts, for all ranks must do the same.
    key = repr(
        (sorted((node.name, node.gpu, node.gpus) for node in nodes), device.type, str(dist.get_backend_config()))
    )
    known = [None if fresh or dist.get_rank() else load_text(_CACHED_AS, key, cache_dir)]
    dist.broadcast_object_list(known, group=group)
    timed = _read(known[0])
    if timed is None:
        trials = trials_of(members)
        timed = links_of(trials, run_trials(trials, device, group))
        if not dist.get_rank():
            store_text(_CACHED_AS, key, json.dumps({"schema_version": 1, **asdict(timed)}), cache_dir)
    types = tuple(dict.fromkeys(node.gpu for node in nodes))
    return Cluster(
        gpus=tuple(Gpu(name=gpu, memory_bytes=memory[gpu]) for gpu in types),
        nodes=nodes,
        within=timed.within,
        between=timed.between,
    )


def _read(text: str | None) -> TimedLinks | None:
    if text is None:
        return None
    try:
        return _FILES.parse(text, lambda raw: _of_file(raw))
    except ClusterError:  # of another version of this package: measured again
        return None


def _of_file(raw: dict[str, Any]) -> TimedLinks:
    return spelled(TimedLinks, {key: value for key, value in raw.items() if key != "schema_version"})


def nodes_of(members: Sequence[Member]) -> tuple[Node, ...]:
    """The nodes of a job's ranks, in order of their first. Raises ClusterError where one has GPUs of two types."""
    types: dict[str, list[str]] = {}
    for member in members:
        types.setdefault(member.node, []).append(member.gpu)
    for node, found in types.items():
        if len(set(found)) > 1:
            raise ClusterError(
                f"the node {node!r} has ranks with {' and '.join(sorted(set(found)))}. Expected was one type of GPU a node. Join"
                " with member= of another node's name for each type"
            )
    return tuple(Node(name=node, gpu=found[0], gpus=len(found)) for node, found in types.items())


def _memory(
    members: Sequence[Member], device: torch.device, budget: Size | None, group: dist.ProcessGroup | None
) -> dict[str, int]:
    """Bytes that plans may take of each GPU, by type: those of the smallest."""
    total = device_capacity_bytes(device)
    rows: list[tuple[str, int]] = [("", 0)] * len(members)
    mine = socket.gethostname(), total if budget is None else resolve_bytes(budget, total)
    dist.all_gather_object(rows, mine, group=group)
    hosts = [host for host, _ in rows]
    found: dict[str, int] = {}
    for member, (host, num_bytes) in zip(members, rows, strict=True):
        if budget is None:
            num_bytes = int(num_bytes * (1 - RESERVE_SHARE))
            num_bytes //= hosts.count(host) if device.type == "cpu" else 1
        found[member.gpu] = min(found.get(member.gpu, num_bytes), num_bytes)
    return found


# -- which pairs are timed -------------------------------------------------------------------------------------------


def trials_of(members: Sequence[Member]) -> tuple[Trial, ...]:
    """Pairs of each kind: one alone, and as many as there can be at once. Every rank makes the same list."""
    ranks: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        ranks.setdefault(member.node, []).append(rank)
    gpus = {member.node: member.gpu for member in members}
    types = list(dict.fromkeys(gpus.values()))
    found: list[Trial] = []
    for source in types:
        mine = max((ranks[node] for node in ranks if gpus[node] == source), key=len)
        found += _alone_and_together(True, source, source, list(zip(mine[::2], mine[1::2], strict=False)))
        for target in types:
            rooms = [
                list(zip(ranks[a], ranks[b], strict=False))
                for a in ranks
                for b in ranks
                if a != b and (gpus[a], gpus[b]) == (source, target)
            ]
            found += _alone_and_together(False, source, target, max(rooms, key=len, default=[]))
    return tuple(found)


def _alone_and_together(within: bool, source: str, target: str, pairs: list[tuple[int, int]]) -> list[Trial]:
    return [
        Trial(within=within, source=source, target=target, pairs=tuple(pairs[:count]))
        for count in sorted({1, len(pairs)})
        if 1 <= count <= len(pairs)
    ]


# -- how they are timed ----------------------------------------------------------------------------------------------


def run_trials(
    trials: Sequence[Trial], device: torch.device, group: dist.ProcessGroup | None
) -> list[list[tuple[float, float]]]:
    """Points of each trial: bytes of a message, and bytes a second of all its pairs. All ranks call it."""
    rank, sizes = dist.get_rank(), _SIZES[device.type]
    mine: dict[int, list[float]] = {}
    for index, trial in enumerate(trials):
        dist.barrier(group)
        for source, target in trial.pairs:
            if rank == source:
                mine[index] = [_round_trip_s(size, sizes[0], target, device) for size in sizes]
            elif rank == target:
                for size in sizes:
                    _answer(size, sizes[0], source, device)
    dist.barrier(group)
    rows: list[dict[int, list[float]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(rows, mine, group=group)
    found = []
    for index, trial in enumerate(trials):
        slowest = [max(times) for times in zip(*(row[index] for row in rows if index in row), strict=True)]
        least_s = slowest[0] / 2
        seconds = [max(taken_s - least_s, least_s, _LEAST_S) for taken_s in slowest]
        found.append([(float(size), len(trial.pairs) * size / s) for size, s in zip(sizes, seconds, strict=True)])
    return found


def _round_trip_s(num_bytes: int, num_back: int, other: int, device: torch.device) -> float:
    """Seconds until a message is there and one of ``num_back`` bytes is back."""
    message, answer = (torch.ones(size, dtype=torch.uint8, device=device) for size in (num_bytes, num_back))
    seconds = []
    for _ in range(_WARM_UPS + _REPEATS):
        _synchronize(device)
        began = time.perf_counter()
        dist.send(message, other)
        dist.recv(answer, other)
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UPS:])


def _answer(num_bytes: int, num_back: int, other: int, device: torch.device) -> None:
    message, answer = (torch.ones(size, dtype=torch.uint8, device=device) for size in (num_bytes, num_back))
    for _ in range(_WARM_UPS + _REPEATS):
        dist.recv(message, other)
        dist.send(answer, other)
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def links_of(trials: Sequence[Trial], points: Sequence[Sequence[tuple[float, float]]]) -> TimedLinks:
    """Links from the points of trials. Types without two nodes have between nodes the slowest link of all, which no plan uses."""
    rates: dict[tuple[bool, str, str], list[Rates]] = {}
    for trial, found in zip(trials, points, strict=True):
        rows = rates.setdefault((trial.within, trial.source, trial.target), [])
        rows.append(Rates(pairs=len(trial.pairs), points=tuple(found)))
    within, between = [], []
    for (inside, source, target), rows in rates.items():
        name = f"within {source}" if inside else f"{source} to {target}"
        if inside:  # the node's other GPUs send as fast the other way
            last = rows[-1]
            both_ways = tuple((size, 2 * rate) for size, rate in last.points)
            rows.append(Rates(pairs=2 * last.pairs, points=both_ways))
        link = Link(name=name, rates=tuple(rows))
        (within if inside else between).append(Joined(source=source, target=target, link=link))
    slowest = min((*within, *between), key=lambda joined: joined.link.bytes_per_s(2.0**30), default=None)
    known = {(joined.source, joined.target) for joined in between}
    types = dict.fromkeys(name for trial in trials for name in (trial.source, trial.target))
    between += [
        Joined(source=a, target=b, link=slowest.link)
        for a in types
        for b in types
        if slowest is not None and (a, b) not in known
    ]
    return TimedLinks(within=tuple(within), between=tuple(between))
