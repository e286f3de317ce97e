"""The ranks that hold a model together, found by the digest that graphs carry.

In: a `DeviceMesh`. Out: `Ranks`, with the process group. The digest is made of the ranks' numbers alone, so that the code which
one process compiled finds the group of the process that it runs in.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autohete_fx.errors import ShardError
from autohete_fx.internals.fake_group import FAKE_BACKEND
from autohete_fx.internals.modes import disable_current_modes, no_python_dispatcher
from autohete_fx.internals.versions import timeout_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """The members of a mesh.

    Attributes:
        digest: of their numbers, the same on each.
        mesh: as the user gave it.
        group: of all of them.
        control: likewise, for values that are no tensors, on the CPU. It waits as long for the others as ``group`` does.
        rank: this process among them.
        count: how many they are.
    """

    digest: str
    mesh: DeviceMesh
    group: dist.ProcessGroup
    control: dist.ProcessGroup
    rank: int
    count: int

    def exchange(self, value: Any) -> list[Any]:
        """The values that each of them gives, in their order. Values are pickled."""
        found: list[Any] = [None] * self.count
        # Compilers exchange in the middle of tracing, whose dispatcher calls gloo without letting go of the GIL. Gloo's thread may
        # be waiting for that, with gloo locked, to forget the exchange before.
        with disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            dist.all_gather_object(found, value, group=self.control)
        return found

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor by that of the first of them."""
        dist.broadcast(tensor, group=self.group, group_src=0)


_known: dict[str, Ranks] = {}


def ranks_of(mesh: object) -> Ranks:
    """The ranks of a mesh, which ops find from now on.

    Raises:
        ShardError: it is no mesh of one dimension with this process in it.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ShardError(
            f"mesh is a {type(mesh).__name__}; expected a torch.distributed.device_mesh.DeviceMesh. Make one after"
            " init_process_group: init_device_mesh(device_type, (num_ranks,))"
        )
    if mesh.ndim != 1:
        raise ShardError(
            f"the mesh has {mesh.ndim} dimensions, {tuple(mesh.shape)}; expected one, over which parameters are sharded. Copies of"
            " shards over a second dimension are not supported: give one dimension of it, mesh[name]"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ShardError(
            f"rank {dist.get_rank()} is not in the mesh {mesh}; expected a mesh with this process in it. Call shard on its ranks"
            " alone"
        )
    members = dist.get_process_group_ranks(mesh.get_group())
    digest, group = f"{len(members)}-{hashlib.sha256(repr(members).encode()).hexdigest()[:8]}", mesh.get_group()
    known = _known.get(digest)
    if known is None or known.group is not group:
        # Ranks that do not run have no host to meet on.
        how: dict[str, Any] = {"backend": FAKE_BACKEND}
        if dist.get_backend(group) != FAKE_BACKEND:
            how = {"backend": "gloo", "timeout": timeout_of(group, mesh.device_type)}
        control = dist.new_group(members, use_local_synchronization=True, **how)
        assert isinstance(control, dist.ProcessGroup)
        rank, count = coordinate[0], len(members)
        known = Ranks(digest=digest, mesh=mesh, group=group, control=control, rank=rank, count=count)
        _known[digest] = known
    return known


def ranks_by_digest(digest: str) -> Ranks:
    """Those that `ranks_of` has made. Raises ShardError where this process has made none."""
    if digest not in _known:
        raise ShardError(
            f"compiled code gathers over the ranks {digest}, and this process has sharded nothing over them; expected was a model"
            " that it has sharded. Call autohete_fx.shard first"
        )
    return _known[digest]
