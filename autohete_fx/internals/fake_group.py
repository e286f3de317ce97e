"""A process group whose collectives reach nobody: one process is a rank of a job that does not run."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

FAKE_BACKEND = "fake"


@contextlib.contextmanager
def fake_default_group(num_ranks: int) -> Iterator[None]:
    """Within it, this process is rank 0 of so many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group(FAKE_BACKEND, rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
