"""Restoring a job after its ranks or its plan changed: only what a rank lacks, from the places that give it soonest.

All ranks say which parameters of which saves their node's disk has; the newest save of which everything is somewhere is taken.
`sources` says which rank reads a parameter from its own node's disk, from a peer or from the cloud. Where saves and plans cut
parameters at different places, all of that is said of the pieces between all cuts. The unit of a read is the saved piece.

A part on a disk that cannot be read counts as absent, on all ranks of its node. All ranks then choose again among what is left.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autohete_fx.cluster.model.pieces import Piece, covered, finest
from autohete_fx.cluster.store.about import ALL_NAMES, about_of
from autohete_fx.cluster.store.cloud import Cloud
from autohete_fx.cluster.store.damage import PartError, words_of
from autohete_fx.cluster.store.readable import Readable
from autohete_fx.cluster.store.sources import Fetch, Wanted, quickest
from autohete_fx.cluster.store.store import Entry, Parts, Save, Store, bytes_of, joined, read_pieces
from autohete_fx.errors import ClusterError

log = logging.getLogger(__name__)

_MOST_TROUBLES = 3
"""Of disks, in an error."""
MadeOf = Mapping[Piece, tuple[Piece, ...]]
"""By piece, the finest ones that it is made of."""


@dataclass(slots=True, kw_only=True)
class Restored:
    """The states that a rank restored.

    Attributes:
        save: that they are of.
        tensors: by parameter and key.
        num_bytes: by source: ``local``, ``peer``, ``cloud``.
        seconds: by part: ``look``, ``local``, ``cloud``, and ``peer``, which begins when the last rank has read.
        missing_bytes: of the save, those that no disk has, all ranks together.
        trouble: a sentence on the cloud, where it could not be read; "".
        about: what parts say of the job that wrote them.
    """

    save: Save
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=lambda: {"local": 0, "peer": 0, "cloud": 0})
    seconds: dict[str, float] = field(default_factory=lambda: {"local": 0.0, "peer": 0.0, "cloud": 0.0})
    missing_bytes: int = 0
    trouble: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """That is trained next."""
        return self.save.step

    def weight(self, name: str) -> Tensor:
        """The weight of a parameter, or this rank's part of it."""
        return self.tensors[name][f"{name}/weight"]


def restore(
    store: Store, needs: Sequence[Piece], all_names: Sequence[str], node: str, group: dist.ProcessGroup | None
) -> Restored | None:
    """Restore the newest save of which every parameter is somewhere. All ranks call it.

    None where there is no save at all. None also where the cloud answers, has no complete one, and disks do not make up for it.
    States are then lost, and no step was reported as saved there. Parts that cannot be read are not lost: someone may repair them.

    Args:
        store: of the job.
        needs: pieces of parameters that this rank has, one of each.
        all_names: of the model.
        node: of this rank.
        group: of all ranks, for tensors in host memory.

    Raises:
        ClusterError: there are saves and none is complete, while no cloud is given, or it or a part on a disk cannot be read.
    """
    start, disk = time.perf_counter(), Readable(store.disk)
    while True:
        offers = _offers(disk, needs, node, group)
        chosen, clouds, trouble, about = _chosen(store, offers, set(all_names), group)
        if chosen is None:
            return None
        found = Restored(save=chosen, trouble=trouble, about=about)
        wanted, made_of = _wanted(offers, chosen, clouds)
        near = set().union(*wanted.disks.values())
        found.missing_bytes = sum(
            size
            for key, size in _sizes(clouds).items()
            if not near.issuperset(part.key for part in made_of[Piece.of_key(key)])
        )
        found.seconds["look"] = time.perf_counter() - start
        fetch = _read_own(found, store, disk, clouds, wanted, made_of, group)
        if fetch is not None:
            break
    _exchange(found, fetch, group)
    found.about = _about(found, disk, group)
    found.tensors = {piece.name: joined(piece.name, made_of[piece], found.tensors) for piece in needs}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offers:
    """All that ranks say of their disks.

    Attributes:
        nodes: by rank.
        needs: by rank.
        disks: by save and node, bytes of the pieces on its disk.
        troubles: sentences on what disks have and cannot be read.
    """

    nodes: Sequence[str]
    needs: Sequence[Sequence[Piece]]
    disks: Mapping[Save, Mapping[str, Mapping[str, int]]]
    troubles: Sequence[str]


def _offers(disk: Readable, needs: Sequence[Piece], node: str, group: dist.ProcessGroup | None) -> _Offers:
    said: list[Any] = [None] * dist.get_world_size(group)
    rows = {save: _sizes(parts) for save, parts in disk.saves.items()}
    troubles = [f"{path!r} on node {node} could not be read: {why}." for path, why in disk.troubles.items()]
    dist.all_gather_object(said, (node, rows, [piece.key for piece in needs], troubles), group=group)
    disks: dict[Save, dict[str, dict[str, int]]] = {}
    for name, saves, _, _ in said:
        for save, sizes in saves.items():
            disks.setdefault(save, {}).setdefault(name, {}).update(sizes)
    return _Offers(
        nodes=[row[0] for row in said],
        needs=[[Piece.of_key(key) for key in row[2]] for row in said],
        disks=disks,
        troubles=list(dict.fromkeys(trouble for row in said for trouble in row[3])),
    )


def _wanted(offers: _Offers, chosen: Save, clouds: Parts) -> tuple[Wanted, MadeOf]:
    """Which of the finest pieces each rank needs of a save, and where they are."""
    here = {name: offers.disks.get(chosen, {}).get(name, {}) for name in offers.nodes}
    saved = {key: size for sizes in here.values() for key, size in sizes.items()} | _sizes(clouds)
    made_of = finest([*(piece for row in offers.needs for piece in row), *map(Piece.of_key, saved)])
    wanted = Wanted(
        needs=[_keys(row, made_of) for row in offers.needs],
        nodes=offers.nodes,
        disks={name: set(_keys(map(Piece.of_key, sizes), made_of)) for name, sizes in here.items()},
        cloud={part.key: key for key in clouds for part in made_of[Piece.of_key(key)]},
        sizes=_parts_sizes(saved, made_of),
    )
    return wanted, made_of


def _read_own(
    found: Restored,
    store: Store,
    disk: Readable,
    clouds: Parts,
    wanted: Wanted,
    made_of: MadeOf,
    group: dist.ProcessGroup | None,
) -> Fetch | None:
    """Read all that this rank reads itself, in the cloud last. Returns how the rest moves.

    None, on all ranks, where one could not read its disk: what it has counts as absent then, and all choose again.
    """
    fetch = quickest(wanted, store.bandwidths)
    if not _read_disk(found, disk, fetch, wanted, made_of, group):
        return None
    if fetch.cloud and not _read_cloud(found, store, clouds, fetch, wanted, made_of, group):
        fetch = quickest(replace(wanted, cloud={}), store.bandwidths)
        if not _read_disk(found, disk, fetch, wanted, made_of, group):
            return None
    return fetch


def _read_disk(
    found: Restored, disk: Readable, fetch: Fetch, wanted: Wanted, made_of: MadeOf, group: dist.ProcessGroup | None
) -> bool:
    """Read what this rank reads on its disk, for itself and for others. Returns whether all ranks could."""
    rank, failed = dist.get_rank(group), ""
    own = set(fetch.local.get(rank, ())) - set(found.tensors)
    sent = {key for (sender, _), keys in fetch.peer.items() if sender == rank for key in keys}
    sent -= {*own, *found.tensors, *fetch.cloud.get(rank, ())}
    try:
        parts = disk.saves.get(found.save, {})
        _read(found, "local", parts, sorted(own), made_of)
        _read(found, "local", parts, sorted(sent), made_of, for_others=True)
    except Exception as error:
        failed = disk.failed(found.save, error)
    told: list[Any] = [None] * len(wanted.nodes)
    dist.all_gather_object(told, failed, group=group)
    absent = {name for name, node in zip(told, wanted.nodes, strict=True) if name and node == wanted.nodes[rank]}
    if absent:
        disk.leave_out(found.save, absent)
    return not any(told)


def _read_cloud(
    found: Restored,
    store: Store,
    clouds: Parts,
    fetch: Fetch,
    wanted: Wanted,
    made_of: MadeOf,
    group: dist.ProcessGroup | None,
) -> bool:
    """Read what this rank reads in the cloud. Returns whether all ranks could, or disks have to give all.

    Raises ClusterError, on all ranks, where disks have not all of it.
    """
    rank, trouble = dist.get_rank(group), ""
    try:
        _read(found, "cloud", clouds, fetch.cloud.get(rank, ()), made_of)
    except Exception as error:
        trouble = f"Rank {rank} could not read {store.cloud!r}: {words_of(error)}."
    told: list[Any] = [None] * len(wanted.needs)
    dist.all_gather_object(told, trouble, group=group)
    troubles = [words for words in told if words]
    if not troubles:
        return True
    near = set().union(*wanted.disks.values())
    missing = sorted({key for keys in wanted.needs for key in keys} - near)
    if missing:
        raise ClusterError(
            f"states of {len(missing)} parameters, such as {missing[0]!r}, are in the cloud alone. {troubles[0]} Expected was a"
            " cloud that can be read. Start the job again when it can"
        )
    found.trouble = f"{found.trouble} {troubles[0]}".strip()
    return False


def _about(found: Restored, disk: Readable, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """What a disk says of the save, or the cloud has said; of these, one that names the optimizer, if any does."""
    told: list[Any] = [None] * dist.get_world_size(group)
    mine: dict[str, Any] = {}
    try:
        mine = about_of(disk.saves.get(found.save, {}))
    except PartError as error:
        log.warning("what %s says of its job is not read: %s", error.path, error.cause)
    dist.all_gather_object(told, mine, group=group)
    answers = [said for said in (*told, found.about) if said]
    return next((said for said in answers if said.get("optimizer")), answers[0] if answers else {})


def _sizes(parts: Parts) -> dict[str, int]:
    """Bytes of saved pieces."""
    return {key: bytes_of(entries) for key, (_, entries) in parts.items()}


def _parts_sizes(saved: Mapping[str, int], made_of: MadeOf) -> dict[str, float]:
    """Bytes of saved pieces, and of the finest ones by their share of the elements."""
    found: dict[str, float] = {}
    for key, size in saved.items():
        parts = made_of[Piece.of_key(key)]
        all_of = sum(part.share for part in parts)
        found |= {part.key: size * part.share / all_of for part in parts}
    return {**found, **saved}


def _keys(pieces: Iterable[Piece], made_of: MadeOf) -> list[str]:
    return [part.key for piece in pieces for part in made_of[piece]]


def _chosen(
    store: Store, offers: _Offers, wanted: set[str], group: dist.ProcessGroup | None
) -> tuple[Save | None, Parts, str, dict[str, Any]]:
    """The newest complete save, its pieces in the cloud, a sentence where the cloud could not be read, and what the cloud says of
    the job. The first rank looks there, for all."""
    answer: list[Any] = [None]
    if not dist.get_rank(group):
        answer[0] = _look(store, offers, wanted)
    dist.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[0], str):
        raise ClusterError(answer[0])
    return answer[0]


def _look(store: Store, offers: _Offers, wanted: set[str]) -> tuple[Save | None, Parts, str, dict[str, Any]] | str:
    cloud, disks = Cloud(store), offers.disks
    needing = [(node, {piece.name for piece in row}) for node, row in zip(offers.nodes, offers.needs, strict=True)]
    saves = sorted({*disks, *cloud.saves()}, reverse=True)
    for save in saves:
        nodes = {node: set(map(Piece.of_key, sizes)) for node, sizes in disks.get(save, {}).items()}
        whole = {node: covered(pieces) for node, pieces in nodes.items()}
        own_disks_do = wanted <= set().union(*whole.values()) and all(
            names <= whole.get(node, set()) for node, names in needing
        )
        parts = {} if own_disks_do else cloud.parts(save)
        has = covered([*set().union(*nodes.values()), *map(Piece.of_key, parts)])
        if wanted <= has:
            if more := sorted(has - wanted - {ALL_NAMES}):
                return _of_another_model(f"step {save.step} has {more[0]!r}, which this model has not")
            known = {key: row for key, row in parts.items() if Piece.of_key(key).name in wanted}
            said = max((sizes.get(ALL_NAMES, 0) for sizes in disks.get(save, {}).values()), default=0)
            says_more = _sizes(parts).get(ALL_NAMES, 0) > said  # else a disk says it, which is nearer
            return save, known, cloud.trouble, cloud.about(parts) if says_more else {}
    for save in saves:
        if cloud.is_committed(save):
            has = {Piece.of_key(key).name for key in cloud.parts(save)}
            lacking = sorted(wanted - has)
            what = (
                f"{len(lacking)} parameters of this model, such as {lacking[0]!r}"
                if lacking
                else "a part of the parameters"
            )
            if not cloud.trouble:
                return _of_another_model(f"of step {save.step} the cloud {store.cloud!r} had all, and lacks {what} now")
    if not cloud.trouble and not offers.troubles and (store.cloud is not None or not saves):
        if saves:
            log.warning(
                "disks lack a part of every save (the newest is of step %d), and nothing was saved in the cloud %r yet. Training"
                " begins again at step 0",
                saves[0].step,
                store.cloud,
            )
        return None, {}, "", {}
    seen = ", ".join(f"step {save.step}" for save in saves[:5]) or "none"
    troubles = " ".join([cloud.trouble, *offers.troubles[:_MOST_TROUBLES]]).strip()
    return (
        f"the store {store.disk!r} has no save of which all parameters are somewhere; incomplete ones: {seen}. {troubles}"
        " Expected was a complete one. Give the job the cloud's URL or the nodes that have the rest, or an empty store to begin"
        " again"
    )


def _of_another_model(what: str) -> str:
    return (
        f"the store is not of this model, or damaged: {what}. Expected was a store of the same model. Give the model that it was"
        " saved with, repair the parts that the log names, or give an empty store to begin at step 0. Nothing was removed"
    )


def _read(
    found: Restored, source: str, parts: Parts, keys: Sequence[str], made_of: MadeOf, *, for_others: bool = False
) -> int:
    """Read pieces; returns their bytes, which count by source unless they are for others alone."""
    start = time.perf_counter()
    tensors, num_bytes = read_pieces(parts, [Piece.of_key(key) for key in keys], made_of)
    found.tensors.update(tensors)
    if not for_others:
        found.num_bytes[source] += num_bytes
    found.seconds[source] += time.perf_counter() - start
    return num_bytes


def _exchange(found: Restored, fetch: Fetch, group: dist.ProcessGroup | None) -> None:
    """Send and receive what peers have read, both at once and each in the order of pairs.

    The first pair that is not done can always go on, as its sender and its receiver have no earlier one to do.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outgoing = [(target, keys) for (source, target), keys in fetch.peer.items() if source == rank]
    sent = {key: dict(found.tensors[key]) for _, keys in outgoing for key in keys}
    heads: list[Any] = [None] * size
    mine = {key: [_entry(*item) for item in tensors.items()] for key, tensors in sent.items()}
    dist.all_gather_object(heads, mine, group=group)
    start = time.perf_counter()  # when the last rank has read

    def send() -> None:
        for target, keys in outgoing:
            for key in keys:
                for tensor in sent[key].values():
                    dist.send(tensor.contiguous(), target, group=group)

    with ThreadPoolExecutor(1, thread_name_prefix="autohete-send") as pool:
        sending = pool.submit(send)
        for (source, target), keys in fetch.peer.items():
            if rank == target:
                for key in keys:
                    entries: list[Entry] = heads[source][key]
                    tensors = {entry.key: entry.empty() for entry in entries}
                    for entry in entries:
                        dist.recv(tensors[entry.key], source, group=group)
                        found.num_bytes["peer"] += entry.num_bytes
                    found.tensors[key] = tensors
        sending.result()
    found.seconds["peer"] = time.perf_counter() - start


def _entry(key: str, tensor: Tensor) -> Entry:
    return Entry(key=key, sizes=tuple(tensor.shape), dtype=tensor.dtype)
