"""Ranks that are not there: a mesh for a model that is traced sharded and never run.

In: a number of ranks, and of replicas among them, and which rank this process is. Out: a mesh. Exchanges over it give this rank's
values for all of them, and collectives move nothing.
"""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autohete_fx.errors import ShardError
from autohete_fx.internals.fake_group import fake_default_group

__all__ = ["DeviceMesh", "imagined_mesh"]


@contextlib.contextmanager
def imagined_mesh(num_ranks: int, rank: int = 0, num_replicas: int = 1) -> Iterator[DeviceMesh]:
    """A mesh of ranks on CPUs, of which this process is one, within the context alone. It has two dimensions where there are
    several replicas, which divide the ranks evenly.

    Raises:
        ShardError: this process is a rank of a job that does run.
    """
    if dist.is_initialized():
        raise ShardError(
            f"a plan for {num_ranks} ranks was asked of a process that has a process group. Expected was a process of its own,"
            " which imagines them. Plan before init_process_group, or without torchrun"
        )
    with fake_default_group(num_ranks, rank):
        shape = (num_ranks,) if num_replicas == 1 else (num_replicas, num_ranks // num_replicas)
        yield init_device_mesh("cpu", shape)
