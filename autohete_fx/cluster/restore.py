"""Restoring a job after its ranks or its plan changed: only what a rank lacks, and from the nearest place that has it.

All ranks say which parameters of which saves their node's disk has; the newest save of which everything is somewhere is taken. A
rank reads a parameter from its own node's disk; else from a peer, whose node's disk has it; else one of the ranks that need it
reads it from the cloud and hands it to the others.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autohete_fx.cluster.store import Entry, Parts, Place, Save, Store, read_parts
from autohete_fx.errors import ClusterError


@dataclass(slots=True, kw_only=True)
class Restored:
    """The states that a rank restored.

    Attributes:
        step: that is trained next.
        tensors: by parameter and key.
        num_bytes: by source: ``local``, ``peer``, ``cloud``.
        seconds: by part: ``look``, ``local``, ``cloud``, ``peer``.
        missing_bytes: of the save, those that no disk has, all ranks together.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=lambda: {"local": 0, "peer": 0, "cloud": 0})
    seconds: dict[str, float] = field(default_factory=dict)
    missing_bytes: int = 0

    def weight(self, name: str) -> Tensor:
        """The weight of a parameter."""
        return self.tensors[name][f"{name}/weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """How the parameters that a job's ranks need reach them.

    Attributes:
        local: by rank, those on its node's disk.
        cloud: by rank, those that it reads from the cloud, for itself and others.
        peer: by sender and receiver, those that are sent.
    """

    local: Mapping[int, tuple[str, ...]]
    cloud: Mapping[int, tuple[str, ...]]
    peer: Mapping[tuple[int, int], tuple[str, ...]]


def plan_fetch(
    needs: Sequence[Sequence[str]], nodes: Sequence[str], disks: Mapping[str, set[str]], cloud: set[str]
) -> Fetch:
    """Choose the nearest source of each parameter for each rank.

    Args:
        needs: by rank, names of parameters.
        nodes: by rank, its node.
        disks: by node, parameters on its disk.
        cloud: parameters there.
    """
    local: dict[int, list[str]] = {}
    fetched: dict[int, list[str]] = {}
    peer: dict[tuple[int, int], list[str]] = {}
    senders: dict[str, int] = {}
    sent = [0] * len(needs)
    for rank, names in enumerate(needs):
        for name in names:
            if name in disks[nodes[rank]]:
                local.setdefault(rank, []).append(name)
                continue
            able = [other for other in range(len(nodes)) if name in disks[nodes[other]]]
            if able:
                sender = min(able, key=lambda other: (sent[other], other))
            elif name in senders:
                sender = senders[name]
            else:
                assert name in cloud, "a save is taken if all of it is somewhere"
                senders[name] = rank
                fetched.setdefault(rank, []).append(name)
                continue
            sent[sender] += 1
            peer.setdefault((sender, rank), []).append(name)
    return Fetch(
        local={rank: tuple(names) for rank, names in local.items()},
        cloud={rank: tuple(names) for rank, names in fetched.items()},
        peer={pair: tuple(names) for pair, names in sorted(peer.items())},
    )


def restore(
    store: Store, needs: Sequence[str], all_names: Sequence[str], node: str, group: dist.ProcessGroup | None
) -> Restored | None:
    """Restore the newest save of which every parameter is somewhere; None where there is no save at all. All ranks call it.

    Args:
        store: of the job.
        needs: parameters of this rank.
        all_names: of the model.
        node: of this rank.
        group: of all ranks, for tensors in host memory.

    Raises:
        ClusterError: there are saves, and none is complete.
    """
    start = time.perf_counter()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    disk = Place(store.local)
    mine = {save: disk.parts(save) for save in disk.saves()}
    said: list[Any] = [None] * size
    rows = {save: sorted(parts) for save, parts in mine.items()}
    dist.all_gather_object(said, (node, rows, list(needs)), group=group)
    nodes = [row[0] for row in said]
    disks: dict[Save, dict[str, set[str]]] = {}
    for name, saves, _ in said:
        for save, names in saves.items():
            disks.setdefault(save, {}).setdefault(name, set()).update(names)
    chosen, clouds = _chosen(store, disks, set(all_names), rank, group)
    if chosen is None:
        return None
    found = Restored(step=chosen.step)
    found.missing_bytes = sum(entry.num_bytes for name in {*all_names} & {*clouds} for entry in clouds[name][1])
    here = {name: disks.get(chosen, {}).get(name, set()) for name in nodes}
    fetch = plan_fetch([row[2] for row in said], nodes, here, set(clouds))
    found.seconds["look"] = time.perf_counter() - start
    local = fetch.local.get(rank, ())
    _read(found, "local", mine.get(chosen, {}), local)
    _read(found, "cloud", clouds, fetch.cloud.get(rank, ()))
    _exchange(found, fetch, mine.get(chosen, {}), group)
    return found


def _chosen(
    store: Store,
    disks: Mapping[Save, Mapping[str, set[str]]],
    wanted: set[str],
    rank: int,
    group: dist.ProcessGroup | None,
) -> tuple[Save | None, Parts]:
    """The newest complete save, and its parts in the cloud. The first rank looks there, for all."""
    answer: list[Any] = [None]
    if rank == 0:
        answer[0] = _look(store, disks, wanted)
    dist.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[0], str):
        raise ClusterError(answer[0])
    return answer[0]


def _look(
    store: Store, disks: Mapping[Save, Mapping[str, set[str]]], wanted: set[str]
) -> tuple[Save | None, Parts] | str:
    cloud, trouble = None, ""
    try:
        cloud = Place(store.cloud) if store.cloud else None
        there = set(cloud.saves()) if cloud else set()
    except Exception as error:  # a cloud that is down is no reason to stop where disks have everything
        cloud, there, trouble = None, set(), f" The cloud {store.cloud!r} could not be read: {error}."
    saves = sorted({*disks, *there}, reverse=True)
    for save in saves:
        on_disks: set[str] = set().union(*disks.get(save, {}).values())
        if wanted <= on_disks:
            return save, {}
        parts = cloud.parts(save) if cloud and save in there else {}
        if wanted <= on_disks | set(parts):
            return save, {name: row for name, row in parts.items() if name not in on_disks}
    if not saves and not trouble:
        return None, {}
    seen = ", ".join(f"step {save.step}" for save in saves[:5]) or "none"
    return (
        f"the store {store.local!r} has no save of which all parameters are somewhere; incomplete ones: {seen}.{trouble}"
        f" Expected was"
        " a complete one. Give the job the cloud's URL or the nodes that have the rest, or an empty store to begin again"
    )


def _read(found: Restored, source: str, parts: Parts, names: Sequence[str]) -> None:
    start = time.perf_counter()
    found.tensors.update(read_parts(parts, names))
    found.num_bytes[source] += sum(entry.num_bytes for name in names for entry in parts[name][1])
    found.seconds[source] = time.perf_counter() - start


def _exchange(found: Restored, fetch: Fetch, parts: Parts, group: dist.ProcessGroup | None) -> None:
    """Send and receive whatever is sent, pair by pair in one order, so that no rank holds more than its own and one message."""
    start = time.perf_counter()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outgoing = {pair: names for pair, names in fetch.peer.items() if pair[0] == rank}
    missing = {name for names in outgoing.values() for name in names} - set(found.tensors)
    sent = {**found.tensors, **read_parts(parts, sorted(missing))}
    heads: list[Any] = [None] * size
    mine = {
        name: [_entry(key, tensor) for key, tensor in sent[name].items()]
        for names in outgoing.values()
        for name in names
    }
    dist.all_gather_object(heads, mine, group=group)
    for (source, target), names in fetch.peer.items():
        if rank == source:
            for name in names:
                for tensor in sent[name].values():
                    dist.send(tensor.contiguous(), target, group=group)
        elif rank == target:
            for name in names:
                entries: list[Entry] = heads[source][name]
                tensors = {entry.key: entry.empty() for entry in entries}
                for entry in entries:
                    dist.recv(tensors[entry.key], source, group=group)
                    found.num_bytes["peer"] += entry.num_bytes
                found.tensors[name] = tensors
    found.seconds["peer"] = time.perf_counter() - start


def _entry(key: str, tensor: Tensor) -> Entry:
    return Entry(key=key, sizes=tuple(tensor.shape), dtype=tensor.dtype)
