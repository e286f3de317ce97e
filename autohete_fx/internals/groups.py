"""Process groups that their members alone make, under names that all of them find alike; meshes of groups.

PyTorch names such a group by its ranks and by how many groups the process is in. Ranks of a job are in unlike numbers of groups:
two of them would then wait for each other under two names, until the timeout.
"""

import hashlib
import itertools
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from autohete_fx.internals.fake_group import FAKE_BACKEND

_made: Counter[tuple[int, ...]] = Counter()


def new_group_of(members: Sequence[int], **how: Any) -> dist.ProcessGroup:
    """A process group that its members make together, each in the same order as its other groups of the same members.

    Args:
        members: numbers of ranks in the default group.
        how: further arguments of ``torch.distributed.new_group``.
    """
    _made[tuple(members)] += 1
    text = f"autohete_fx {' '.join(map(str, members))}: {_made[tuple(members)]}"
    name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    named_by = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        made = dist.new_group(list(members), use_local_synchronization=True, **how)
    finally:
        distributed_c10d._hash_ranks_to_str = named_by
    assert isinstance(made, dist.ProcessGroup)
    return made


def device_types_of(group: dist.ProcessGroup) -> list[str]:
    """The kinds of devices on whose tensors a process group has collectives."""
    return sorted(device.type for device in group._device_types)


def meeting() -> Any:
    """The store in which the ranks of the default process group have met; None where there are no others."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == FAKE_BACKEND:
        return None
    return distributed_c10d._get_default_store()


def mesh_of(
    groups: Mapping[str, dist.ProcessGroup], device_type: str, numbers: Sequence[Any] | None = None
) -> DeviceMesh:
    """A mesh that is equal to no mesh of other groups of this process, those included that were destroyed.

    PyTorch compares meshes by the ranks' numbers and the names of dimensions. It caches how an operator's result is laid out, and
    with it the first equal mesh. Later jobs' collectives would go over process groups of the first job.

    Args:
        groups: by the name of a dimension. In the mesh a number of its group in this process follows.
        device_type: of the mesh.
        numbers: of ranks in the default group, nested; needed where there are several groups.

    Returns:
        A mesh of as many dimensions as groups.
    """
    names = tuple(f"{along}_{_number_of(group)}" for along, group in groups.items())
    given: Any = list(groups.values())
    if numbers is None:
        (given,) = given
    return DeviceMesh.from_group(given, device_type, numbers, mesh_dim_names=names)


def _number_of(group: dist.ProcessGroup) -> int:
    """Its own for as long as there is this process. Names come again when the default group was destroyed and is made anew."""
    if group not in _numbers:
        _numbers[group] = next(_counted)
    return _numbers[group]


_numbers: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()
_counted = itertools.count()
