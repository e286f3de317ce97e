"""The ranks of a job meet: each says on which node it is, and what GPU it has.

Enter a device and a timeout; leaves a `Rendezvous`. torchrun's ranks make the process group that they need, where there is none.
"""

import contextlib
import os
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from autohete_fx.cluster.deploy import Member
from autohete_fx.errors import ClusterError

_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The ranks of a job, as one of them met the others.

    Attributes:
        rank: this one.
        device: of this rank.
        members: all ranks, in order.
        agents: by rank, torchrun's agent on its host.
        generation: a name that no other start of the job has.
        group: of all ranks, for values in host memory; None: the default one.
        timeout: after which a rank that does not answer is an error.
    """

    rank: int
    device: torch.device
    members: list[Member]
    agents: list[str]
    generation: str
    group: dist.ProcessGroup | None
    timeout: timedelta

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks, in order. All ranks call it."""
        said: list[Any] = [None] * len(self.members)
        dist.all_gather_object(said, value, group=self.group)
        return said

    def on_each(self, make: Callable[[], _Made]) -> _Made:
        """Make something without the others, and wait until all have. Where one fails, none waits for it: each raises its words."""
        try:
            made = make()
        except Exception as error:
            with contextlib.suppress(Exception):  # what is wrong here is what this rank has to say
                self.gather(f"{type(error).__name__}: {error}")
            raise
        for rank, words in enumerate(self.gather("")):
            if words:
                raise ClusterError(
                    f"rank {rank}, on node {self.members[rank].node}, could not begin its part of the job. Expected was that all"
                    f" ranks can. Mend what it says, and start all of them again: {words}"
                )
        return made


def meet(device: torch.device | str | None, member: Member | None, timeout_s: float) -> Rendezvous:
    """Meet the other ranks. All ranks call it.

    Args:
        device: of this rank; None: its CUDA device, else the CPU.
        member: this rank; None: by the host's name and the device.
        timeout_s: after which a rank that does not answer is an error.
    """
    device = torch.device(device) if device is not None else _own_device()
    timeout = timedelta(seconds=timeout_s)
    group = _connect(device, timeout)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (member or this_member(device), uuid.uuid4().hex[:8], _agent()), group=group)
    return Rendezvous(
        rank=dist.get_rank(),
        device=device,
        members=[row[0] for row in said],
        agents=[row[2] for row in said],
        generation=said[0][1],
        group=group,
        timeout=timeout,
    )


def this_member(device: torch.device) -> Member:
    """This rank's node and GPU."""
    node = f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', '0')}"
    return Member(node=node, gpu="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device))


def _connect(device: torch.device, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make the process group where there is none, of torchrun's ranks or of this process alone. Returns the group for tensors in
    host memory; None: the default group can."""
    if not dist.is_initialized():
        kind = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "RANK" in os.environ:
            dist.init_process_group(kind, timeout=timeout)
        else:
            dist.init_process_group(kind, timeout=timeout, store=HashStore(), rank=0, world_size=1)
        return None
    if "gloo" in str(dist.get_backend_config()):
        return None
    group: Any = dist.new_group(backend="gloo", timeout=timeout)
    return group


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")


def _agent() -> str:
    """The parent of this process on its host: torchrun's agent, which stays the same when ranks begin again."""
    return f"{socket.gethostname()}/{os.getppid()}"
