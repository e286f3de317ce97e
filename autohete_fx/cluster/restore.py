"""Restoring a job after its ranks or its plan changed: only what a rank lacks, and from the nearest place that has it.

All ranks say which parameters of which saves their node's disk has; the newest save of which everything is somewhere is taken.
A rank reads a parameter from its own node's disk, else from a peer, whose node's disk has it. Else one of the ranks that need
it reads it from the cloud and hands it to the others. Where saves and plans cut parameters at different places, all of that is
said of the pieces between all cuts. The unit of a read is the saved piece.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autohete_fx.cluster.pieces import Piece, covered, finest
from autohete_fx.cluster.store import Entry, Parts, Place, Save, Store, joined, read_pieces
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
        """The weight of a parameter, or this rank's part of it."""
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
    needs: Sequence[Sequence[str]], nodes: Sequence[str], disks: Mapping[str, set[str]], cloud: Mapping[str, str]
) -> Fetch:
    """Choose the nearest source of each parameter for each rank.

    Args:
        needs: by rank, keys of pieces.
        nodes: by rank, its node.
        disks: by node, pieces on its disk.
        cloud: by piece there, the saved piece that it is a part of. One rank reads all that is wanted of a saved piece.
    """
    local: dict[int, list[str]] = {}
    fetched: dict[int, dict[str, None]] = {}
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
            else:
                assert name in cloud, "a save is taken if all of it is somewhere"
                sender = senders.setdefault(cloud[name], rank)
                fetched.setdefault(sender, {})[name] = None
                if sender == rank:
                    continue
            sent[sender] += 1
            peer.setdefault((sender, rank), []).append(name)
    return Fetch(
        local={rank: tuple(names) for rank, names in local.items()},
        cloud={rank: tuple(names) for rank, names in fetched.items()},
        peer={pair: tuple(names) for pair, names in sorted(peer.items())},
    )


def restore(
    store: Store, needs: Sequence[Piece], all_names: Sequence[str], node: str, group: dist.ProcessGroup | None
) -> Restored | None:
    """Restore the newest save of which every parameter is somewhere; None where there is no save at all. All ranks call it.

    Args:
        store: of the job.
        needs: pieces of parameters that this rank has, one of each.
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
    dist.all_gather_object(said, (node, rows, [piece.key for piece in needs]), group=group)
    nodes = [row[0] for row in said]
    disks: dict[Save, dict[str, set[Piece]]] = {}
    for name, saves, _ in said:
        for save, keys in saves.items():
            disks.setdefault(save, {}).setdefault(name, set()).update(map(Piece.of_key, keys))
    chosen, clouds = _chosen(store, disks, set(all_names), rank, group)
    if chosen is None:
        return None
    found = Restored(step=chosen.step)
    found.missing_bytes = sum(entry.num_bytes for _, entries in clouds.values() for entry in entries)
    here = {name: disks.get(chosen, {}).get(name, set()) for name in nodes}
    wanted = [[Piece.of_key(key) for key in row[2]] for row in said]
    made_of = finest(
        [*(piece for row in (*here.values(), *wanted) for piece in row), *(Piece.of_key(key) for key in clouds)]
    )
    fetch = plan_fetch(
        [_keys(row, made_of) for row in wanted],
        nodes,
        {name: set(_keys(row, made_of)) for name, row in here.items()},
        {part.key: key for key in clouds for part in made_of[Piece.of_key(key)]},
    )
    found.seconds["look"] = time.perf_counter() - start
    local = mine.get(chosen, {})
    _read(found, "local", local, fetch.local.get(rank, ()), made_of)
    _read(found, "cloud", clouds, fetch.cloud.get(rank, ()), made_of)
    _exchange(found, fetch, local, made_of, group)
    found.tensors = {piece.name: joined(piece.name, made_of[piece], found.tensors) for piece in needs}
    return found


MadeOf = Mapping[Piece, tuple[Piece, ...]]
"""By piece, the finest ones that it is made of."""


def _keys(pieces: Iterable[Piece], made_of: MadeOf) -> list[str]:
    return [part.key for piece in pieces for part in made_of[piece]]


def _chosen(
    store: Store,
    disks: Mapping[Save, Mapping[str, set[Piece]]],
    wanted: set[str],
    rank: int,
    group: dist.ProcessGroup | None,
) -> tuple[Save | None, Parts]:
    """The newest complete save, and of its pieces in the cloud those that no disk has. The first rank looks there, for all."""
    answer: list[Any] = [None]
    if rank == 0:
        answer[0] = _look(store, disks, wanted)
    dist.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[0], str):
        raise ClusterError(answer[0])
    return answer[0]


def _look(
    store: Store, disks: Mapping[Save, Mapping[str, set[Piece]]], wanted: set[str]
) -> tuple[Save | None, Parts] | str:
    cloud, trouble = None, ""
    try:
        cloud = Place(store.cloud) if store.cloud else None
        there = set(cloud.saves()) if cloud else set()
    except Exception as error:  # a cloud that is down is no reason to stop where disks have everything
        cloud, there, trouble = None, set(), f" The cloud {store.cloud!r} could not be read: {error}."
    saves = sorted({*disks, *there}, reverse=True)
    for save in saves:
        on_disks: set[Piece] = set().union(*disks.get(save, {}).values())
        if wanted <= covered(on_disks):
            return save, {}
        parts = cloud.parts(save) if cloud and save in there else {}
        pieces = {key: Piece.of_key(key) for key in parts}
        if wanted <= covered([*on_disks, *pieces.values()]):
            made_of = finest([*on_disks, *pieces.values()])
            near = {part for piece in on_disks for part in made_of[piece]}
            return save, {
                key: row
                for key, row in parts.items()
                if pieces[key].name in wanted and not near.issuperset(made_of[pieces[key]])
            }
    if not saves and not trouble:
        return None, {}
    seen = ", ".join(f"step {save.step}" for save in saves[:5]) or "none"
    return (
        f"the store {store.local!r} has no save of which all parameters are somewhere; incomplete ones: {seen}.{trouble}"
        f" Expected was"
        " a complete one. Give the job the cloud's URL or the nodes that have the rest, or an empty store to begin again"
    )


def _read(found: Restored, source: str, parts: Parts, keys: Sequence[str], made_of: MadeOf) -> None:
    start = time.perf_counter()
    tensors, num_bytes = read_pieces(parts, [Piece.of_key(key) for key in keys], made_of)
    found.tensors.update(tensors)
    found.num_bytes[source] += num_bytes
    found.seconds[source] = time.perf_counter() - start


def _exchange(found: Restored, fetch: Fetch, parts: Parts, made_of: MadeOf, group: dist.ProcessGroup | None) -> None:
    """Send and receive whatever is sent, pair by pair in one order, so that no rank holds more than its own and one message."""
    start = time.perf_counter()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outgoing = {pair: keys for pair, keys in fetch.peer.items() if pair[0] == rank}
    missing = {key for keys in outgoing.values() for key in keys} - set(found.tensors)
    sent = {**found.tensors, **read_pieces(parts, [Piece.of_key(key) for key in sorted(missing)], made_of)[0]}
    heads: list[Any] = [None] * size
    mine = {key: [_entry(*item) for item in sent[key].items()] for keys in outgoing.values() for key in keys}
    dist.all_gather_object(heads, mine, group=group)
    for (source, target), keys in fetch.peer.items():
        if rank == source:
            for key in keys:
                for tensor in sent[key].values():
                    dist.send(tensor.contiguous(), target, group=group)
        elif rank == target:
            for key in keys:
                entries: list[Entry] = heads[source][key]
                tensors = {entry.key: entry.empty() for entry in entries}
                for entry in entries:
                    dist.recv(tensors[entry.key], source, group=group)
                    found.num_bytes["peer"] += entry.num_bytes
                found.tensors[key] = tensors
    found.seconds["peer"] = time.perf_counter() - start


def _entry(key: str, tensor: Tensor) -> Entry:
    return Entry(key=key, sizes=tuple(tensor.shape), dtype=tensor.dtype)
