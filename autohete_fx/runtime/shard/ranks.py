"""The ranks that hold a model together, found by the digest that graphs carry.

In: a `DeviceMesh`, of one dimension or of two. Out: `Ranks`, with the process groups. Along the last dimension ranks hold
shards of one whole. Along the first one of two they hold the same shards: they are replicas of each other. Where the model is
under tensor parallelism, too, the ranks of its mesh have such groups each, and agree with one another. The digest is made of the
ranks' numbers alone. Code that one process compiled therefore finds the groups of the process that it runs in.
"""

import atexit
import dataclasses
import hashlib
import itertools
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autohete_fx.errors import ShardError
from autohete_fx.internals.fake_group import FAKE_BACKEND
from autohete_fx.internals.groups import device_types_of, mesh_of, new_group_of
from autohete_fx.internals.modes import disable_current_modes, no_python_dispatcher
from autohete_fx.internals.versions import timeout_of
from autohete_fx.runtime.lanes.failures import named_failures, tell_failures
from autohete_fx.runtime.lanes.positions import are_alike
from autohete_fx.runtime.lanes.team import cores, ranks_by_torchrun, share_cores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """The members of a mesh, as one of them sees them.

    Attributes:
        digest: of their numbers, the same on each.
        mesh: as the user gave it; under tensor parallelism with that one's dimension before.
        group: of those that hold the shards of one whole, which gathers go over.
        reduces: of the same ranks, for reduces: collectives of one group follow each other.
        rank: this process among those.
        count: how many those are.
        replicas: of those that hold the same shards; None where no other rank does.
        num_replicas: how many those are.
        everyone: of those that hold shards or the same shards.
        control: of all members, for values that are no tensors, on the CPU. It waits as long for the others as ``group`` does.
        calls: likewise, for what they run (`same_call`), whatever is exchanged meanwhile.
        number: this process among all members.
        total: how many all members are.
        hosts: of each member, the first member on the same host.
        num_sharing_cores: how many processes of the job update on cores of this one's, it among them.
        tensor_parallel: of those that have other parts of the layers, for each of which there are such groups; None without any.
        numbers: for what all members make in one order: parameters that are shared out, and graphs that are compiled.
    """

    digest: str
    mesh: DeviceMesh
    group: dist.ProcessGroup
    reduces: dist.ProcessGroup
    rank: int
    count: int
    replicas: dist.ProcessGroup | None
    num_replicas: int
    everyone: dist.ProcessGroup
    control: dist.ProcessGroup
    calls: dist.ProcessGroup
    number: int
    total: int
    hosts: tuple[int, ...]
    num_sharing_cores: int
    tensor_parallel: dist.ProcessGroup | None = None
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @property
    def num_on_host(self) -> int:
        """How many members share this one's host."""
        return self.hosts.count(self.hosts[self.number])

    def exchange(self, value: Any) -> list[Any]:
        """The values that each member gives, in the order of their numbers. Values are pickled."""
        return _exchanged(value, self.control)

    def broadcast(self, tensor: torch.Tensor, *, is_of_all: bool) -> None:
        """Overwrite a tensor by that of the first of those that hold it, or of all members, whose parts of layers do not matter."""
        # Collectives take memory as it lies: of a view with gaps they would write what is between.
        own = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
        sent = own if own.is_contiguous() else own.contiguous()
        with named_failures(self.control):
            dist.broadcast(sent, group=self.everyone, group_src=0)
            if is_of_all and self.tensor_parallel is not None:
                dist.broadcast(sent, group=self.tensor_parallel, group_src=0)
        if sent is not own:
            own.copy_(sent)

    def check_device(self, device_type: str, what: str) -> None:
        """Raise ShardError where the process groups have no collectives on tensors of a device."""
        _check_device(self.group, device_type, what)


_known: dict[str, Ranks] = {}


def _exchanged(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The values that each member of a group gives."""
    found: list[Any] = [None] * dist.get_world_size(group)
    # Compilers exchange in the middle of tracing, whose dispatcher calls gloo without letting go of the GIL. Gloo's thread may
    # be waiting for that, with gloo locked, to forget the exchange before.
    with disable_current_modes(), no_python_dispatcher(), torch.no_grad(), named_failures(group):
        dist.all_gather_object(found, value, group=group)
    return found


def _places(control: dist.ProcessGroup) -> dict[str, Any]:
    """The hosts of members, and how many of them share this one's cores.

    Where a process may use all cores of its host, so do at least as many as torchrun has started there, of other meshes, too.
    """
    mine = (platform.node(), cores())
    everywhere = _exchanged(mine, control)
    hosts = [host for host, _ in everywhere]
    sharing = sum(host == mine[0] and not mine[1].isdisjoint(theirs) for host, theirs in everywhere)
    if len(mine[1]) == os.cpu_count():
        sharing = max(sharing, ranks_by_torchrun())
    return {"hosts": tuple(map(hosts.index, hosts)), "num_sharing_cores": sharing}


def _num_sharing_cores() -> int | None:
    """Of the ranks whose process groups there still are; None where this process is none of any."""
    return max((each.num_sharing_cores for each in _known.values() if _is_there(each.group)), default=None)


share_cores(_num_sharing_cores)


def _is_there(group: dist.ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:  # it was destroyed
        return False


def ranks_of(mesh: object) -> Ranks:
    """The ranks of a mesh, which ops find from now on.

    Raises:
        ShardError: it is no mesh of one or two dimensions with this process in it, or its process groups are gone.
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
    digest = _digest_of(mesh, numbers)
    known, group = _known.get(digest), _group_of(mesh, numbers if mesh.ndim == 1 else numbers[coordinate[0]])
    if known is None or known.group is not group:
        known = _known[digest] = _ranks(digest, mesh, group, numbers)
    return known


def _group_of(mesh: DeviceMesh, numbers: list[int]) -> dist.ProcessGroup:
    """That of the last dimension, whose ranks have these numbers.

    Parameters may be on an earlier mesh than was given: PyTorch keeps the first of equal ones, and finds groups by name. Either's
    group will do while it lives: it has the same ranks in the same order. All models on equal meshes go over the latest one's.
    """
    try:
        group = mesh.get_group(mesh.ndim - 1)
        found = dist.get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError) as error:
        found, reason = [], error
    else:
        reason = f"a group of that name has ranks {found}"
        if found == numbers:
            return group
    if sorted(found) == sorted(numbers):
        raise ShardError(
            f"the mesh {mesh} has ranks in the order {numbers}, and its process group in the order {found}. Expected was one order."
            " Give the mesh its ranks in ascending order"
        )
    raise ShardError(
        f"parameters are on a mesh whose process group is not there: {mesh}, {reason}. Expected was one with groups that there are."
        " PyTorch keeps the first of equal meshes. If its groups were destroyed, give the new one other names:"
        ' init_device_mesh(..., mesh_dim_names=("tp_2",))'
    )


@atexit.register
def forget_ranks() -> None:
    """Let go of all process groups. Their threads must not outlive the interpreter, which would abort."""
    _known.clear()


def _digest_of(mesh: DeviceMesh, numbers: list[Any]) -> str:
    return f"{'x'.join(map(str, mesh.shape))}-{hashlib.sha256(repr(numbers).encode()).hexdigest()[:8]}"


def _check_device(group: dist.ProcessGroup, device_type: str, what: str) -> None:
    known = device_types_of(group)
    if device_type not in known:
        raise ShardError(
            f"{what} is on {device_type}, and the process group of the mesh has the backend {dist.get_backend(group)}, for"
            f" {', '.join(known)} alone. Expected was a backend for that device. Call torch.distributed.init_process_group()"
            f" without a backend, which has one for each device, and move the model after shard, by model.to({known[0]!r})"
        )


def _ranks(digest: str, mesh: DeviceMesh, group: dist.ProcessGroup, numbers: list[Any]) -> Ranks:
    coordinate, members = mesh.get_coordinate(), sorted(numbers if mesh.ndim == 1 else itertools.chain(*numbers))
    rank, count = dist.get_rank(group), mesh.shape[-1]
    if coordinate is None or coordinate[-1] != rank:
        raise ShardError(
            f"the mesh has its ranks in the order {numbers}; expected ascending numbers along its last dimension, in"
            " which process groups count. Make it by init_device_mesh"
        )
    _check_device(group, mesh.device_type, "the mesh")
    everyone, replicas, num_replicas = group, None, mesh.shape[0] if mesh.ndim > 1 else 1
    if num_replicas > 1:
        replicas = mesh.get_group(0)
        everyone = replicas if count == 1 else _another(members, group, mesh.device_type)
    reduces = group if count == 1 else _another(dist.get_process_group_ranks(group), group, mesh.device_type)
    return Ranks(
        digest=digest,
        mesh=mesh,
        group=group,
        reduces=reduces,
        rank=rank,
        count=count,
        replicas=replicas,
        num_replicas=num_replicas,
        everyone=everyone,
        **_controls(members, group, mesh.device_type, has_replicas=num_replicas > 1),
    )


def _controls(members: list[int], group: dist.ProcessGroup, device_type: str, *, has_replicas: bool) -> dict[str, Any]:
    """The groups for values of all members, and what these are among them."""
    control = _for_values(members, group, device_type)
    tell_failures(control)
    if has_replicas:
        are_alike(control, dist.get_process_group_ranks(group))
    return {
        "control": control,
        "calls": _for_values(members, group, device_type),
        "number": dist.get_rank(control),
        "total": len(members),
        **_places(control),
    }


def _for_values(members: list[int], like: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """A group on the CPU, which waits as long as another."""
    # Ranks that do not run have no host to meet on.
    how: dict[str, Any] = {"backend": FAKE_BACKEND}
    if dist.get_backend(like) != FAKE_BACKEND:
        how = {"backend": "gloo", "timeout": timeout_of(like, device_type)}
    return new_group_of(members, **how)


def _another(members: list[int], like: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """A group of the same kind, which waits as long as the other."""
    backend = dist.get_backend(like)
    how: dict[str, Any] = {} if backend == FAKE_BACKEND else {"timeout": timeout_of(like, device_type)}
    return new_group_of(members, backend=backend, **how)


def parallel_ranks_of(mesh: object, tensor_parallel: DeviceMesh) -> Ranks:
    """Likewise, where each member has other parts of layers than its peers in a mesh of tensor parallelism, which call it, too.

    Raises:
        ShardError: meshes that are not two dimensions of one.
    """
    along = ranks_of(mesh)
    with disable_current_modes():
        peers = tensor_parallel.mesh.tolist()
        numbers = along.mesh.mesh.tolist()
    everywhere = _exchanged(numbers, tensor_parallel.get_group())
    members = [
        member for theirs in everywhere for member in (theirs if along.mesh.ndim == 1 else itertools.chain(*theirs))
    ]
    if len(set(members)) < len(members):
        raise ShardError(
            f"the model is under tensor parallelism over ranks {peers}, and was to be sharded over {numbers}, which peers in the"
            " first mesh have, too. Expected were two dimensions of one mesh. Make both by"
            " init_device_mesh(device_type, (n, t), mesh_dim_names=('dp', 'tp')), and take mesh['tp'] and mesh['dp']"
        )
    digest = f"tp{len(peers)}x{_digest_of(along.mesh, everywhere)}"
    known, across = _known.get(digest), tensor_parallel.get_group()
    if known is None or known.group is not along.group or known.tensor_parallel is not across:
        data = {f"data_{dim}": along.mesh.get_group(dim) for dim in range(along.mesh.ndim)}
        with disable_current_modes():
            both = mesh_of({"tensor_parallel": across, **data}, tensor_parallel.device_type, everywhere)
        has_replicas = along.replicas is not None
        known = _known[digest] = dataclasses.replace(
            along,
            digest=digest,
            mesh=both,
            tensor_parallel=across,
            **_controls(sorted(members), along.group, tensor_parallel.device_type, has_replicas=has_replicas),
        )
    return known


def ranks_by_digest(digest: str) -> Ranks:
    """Those that `ranks_of` has made. Raises ShardError where this process has made none."""
    if digest not in _known:
        raise ShardError(
            f"compiled code gathers over the ranks {digest}, and this process has sharded nothing over them; expected was a model"
            " that it has sharded. Call autohete_fx.shard first"
        )
    return _known[digest]
