"""The ranks that hold a model together, found by the digest that graphs carry.

In: a `DeviceMesh`, of one dimension or of two. Out: `Ranks`, with the process groups. Along the last dimension ranks hold
shards of one whole. Along the first one of two they hold the same shards: they are replicas of each other. The digest is made
of the ranks' numbers alone. Code that one process compiled therefore finds the groups of the process that it runs in.
"""

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from autohete_fx.errors import ShardError
from autohete_fx.internals.fake_group import FAKE_BACKEND
from autohete_fx.internals.modes import disable_current_modes, no_python_dispatcher
from autohete_fx.internals.versions import timeout_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """The members of a mesh, as one of them sees them.

    Attributes:
        digest: of their numbers, the same on each.
        mesh: as the user gave it.
        group: of those that hold the shards of one whole.
        rank: this process among those.
        count: how many those are.
        replicas: of those that hold the same shards; None where no other rank does.
        num_replicas: how many those are.
        everyone: of all members.
        control: likewise, for values that are no tensors, on the CPU. It waits as long for the others as ``group`` does.
        number: this process among all members.
        total: how many all members are.
    """

    digest: str
    mesh: DeviceMesh
    group: dist.ProcessGroup
    rank: int
    count: int
    replicas: dist.ProcessGroup | None
    num_replicas: int
    everyone: dist.ProcessGroup
    control: dist.ProcessGroup
    number: int
    total: int

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How a shard is placed as a DTensor over the mesh."""
        return (*(Replicate(),) * (self.mesh.ndim - 1), Shard(0))

    def exchange(self, value: Any) -> list[Any]:
        """The values that each member gives, in the order of their numbers. Values are pickled."""
        found: list[Any] = [None] * self.total
        # Compilers exchange in the middle of tracing, whose dispatcher calls gloo without letting go of the GIL. Gloo's thread may
        # be waiting for that, with gloo locked, to forget the exchange before.
        with disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            dist.all_gather_object(found, value, group=self.control)
        return found

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor by that of the first member."""
        dist.broadcast(tensor, group=self.everyone, group_src=0)


_known: dict[str, Ranks] = {}


def ranks_of(mesh: object) -> Ranks:
    """The ranks of a mesh, which ops find from now on.

    Raises:
        ShardError: it is no mesh of one or two dimensions with this process in it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ShardError(
            f"mesh is a {type(mesh).__name__}; expected a torch.distributed.device_mesh.DeviceMesh. Make one after"
            " init_process_group: init_device_mesh(device_type, (num_ranks,))"
        )
    if mesh.ndim not in (1, 2):
        raise ShardError(
            f"the mesh has {mesh.ndim} dimensions, {tuple(mesh.shape)}; expected one, over which parameters are sharded, or two, of"
            " which the first has copies of the shards. Give those dimensions of it, such as mesh['replicate', 'shard']"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ShardError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}; expected a mesh with this process in it. Call shard on its ranks"
            " alone"
        )
    with disable_current_modes():  # a mesh keeps numbers in a tensor, which a model without memory is not to meet
        numbers = mesh.mesh.tolist()
    digest = f"{'x'.join(map(str, mesh.shape))}-{hashlib.sha256(repr(numbers).encode()).hexdigest()[:8]}"
    known, group = _known.get(digest), mesh.get_group(mesh.ndim - 1)
    if known is None or known.group is not group:
        known = _known[digest] = _ranks(digest, mesh, group, numbers)
    return known


def _ranks(digest: str, mesh: DeviceMesh, group: dist.ProcessGroup, numbers: list[Any]) -> Ranks:
    coordinate, members = mesh.get_coordinate(), sorted(numbers if mesh.ndim == 1 else itertools.chain(*numbers))
    rank, count = dist.get_rank(group), mesh.shape[-1]
    if coordinate is None or coordinate[-1] != rank:
        raise ShardError(
            f"the mesh has its ranks in the order {numbers}; expected ascending numbers along its last dimension, in"
            " which process groups count. Make it by init_device_mesh"
        )
    # Ranks that do not run have no host to meet on.
    how: dict[str, Any] = {"backend": FAKE_BACKEND}
    if dist.get_backend(group) != FAKE_BACKEND:
        how = {"backend": "gloo", "timeout": timeout_of(group, mesh.device_type)}
    control = dist.new_group(members, use_local_synchronization=True, **how)
    assert isinstance(control, dist.ProcessGroup)
    everyone, replicas, num_replicas = group, None, mesh.shape[0] if mesh.ndim > 1 else 1
    if num_replicas > 1:
        replicas = mesh.get_group(0)
        everyone = replicas if count == 1 else _of_both(mesh, members, group)
    return Ranks(
        digest=digest,
        mesh=mesh,
        group=group,
        rank=rank,
        count=count,
        replicas=replicas,
        num_replicas=num_replicas,
        everyone=everyone,
        control=control,
        number=dist.get_rank(control),
        total=len(members),
    )


def _of_both(mesh: DeviceMesh, members: list[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of all members of a mesh, which waits as long as that of one dimension."""
    backend = dist.get_backend(group)
    how: dict[str, Any] = {} if backend == FAKE_BACKEND else {"timeout": timeout_of(group, mesh.device_type)}
    everyone = dist.new_group(members, backend=backend, use_local_synchronization=True, **how)
    assert isinstance(everyone, dist.ProcessGroup)
    return everyone


def ranks_by_digest(digest: str) -> Ranks:
    """Those that `ranks_of` has made. Raises ShardError where this process has made none."""
    if digest not in _known:
        raise ShardError(
            f"compiled code gathers over the ranks {digest}, and this process has sharded nothing over them; expected was a model"
            " that it has sharded. Call autohete_fx.shard first"
        )
    return _known[digest]
