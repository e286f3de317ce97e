"""Ranks that restore what damaged disks have left: two nodes of one rank each, or one node of two."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autohete_fx import cluster
from autohete_fx.cluster.model.pieces import Piece
from autohete_fx.cluster.store.restore import restore
from autohete_fx.cluster.store.store import Place, Save
from autohete_fx.errors import AutoHeteError

Way = tuple[Sequence[str], Sequence[str], Sequence[int], Sequence[str]]


def restored(root: str, nodes: Sequence[str], names: Sequence[str], in_cloud: Sequence[int], cut: Sequence[str]) -> Any:
    """Two saves whose part of a rank has the parameters in ``names``; the cloud has steps, and files in ``cut`` are half as long.

    Returns the step that is restored, bytes by source, and values; or an error's words.
    """
    rank, cloud = dist.get_rank(), f"{root}/cloud"
    store = cluster.Store(local=f"{root}/{nodes[rank]}", cloud=cloud if in_cloud else None, every=1, cloud_every=1)
    for step in (1, 2):
        save = Save(step=step, generation="g")
        tensors = {f"{name}/weight": torch.full((8,), float(step)) for name in names[rank]}
        Place(store.local).write(save, rank, tensors)
        if step in in_cloud:
            Place(cloud).write(save, rank, tensors)
    dist.barrier()
    for path in (path for pattern in cut if rank == 0 for path in Path(root).glob(pattern)):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    dist.barrier()
    try:
        found = restore(store, [Piece(name) for name in "xy"], list("xy"), nodes[rank], None)
    except AutoHeteError as error:
        return str(error)
    assert found is not None
    return [found.step, found.num_bytes, sorted({float(value) for name in "xy" for value in found.weight(name)})]


def every_way(root: str, ways: dict[str, Way]) -> dict[str, Any]:
    return {name: restored(f"{root}/{name}", *way) for name, way in ways.items()}
