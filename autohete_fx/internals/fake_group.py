"""A process group whose collectives reach nobody: one process is a rank of a job that does not run."""

import contextlib
import sys
from collections.abc import Iterator

import torch.distributed as dist

FAKE_BACKEND = "fake"


@contextlib.contextmanager
def fake_default_group(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Within it, this process is a rank of so many."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    shown_by = sys.excepthook
    dist.init_process_group(FAKE_BACKEND, rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = shown_by  # PyTorch's, which names a rank in every traceback, would stay
