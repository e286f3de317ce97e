"""Collectives of several ranks, as the net lane runs them.

In: a function that starts a collective on the current stream. Out: nothing, when it is done: on a CPU device when all have their
results, on an accelerator when the current stream waits for that.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from autohete_fx.errors import ShardError


class Work(Protocol):
    """A collective under way, as ``torch.distributed`` gives it."""

    def wait(self) -> object:
        """Return when it is done, or make the current stream wait for it."""
        ...


Start = Callable[[], Sequence[Work]]
"""Starts a collective. It holds the tensors that the collective reads and writes."""


def run_collective(start: Start) -> None:
    """Start a collective and wait for it.

    Raises:
        ShardError: another rank has failed or left, or a collective took longer than its process group allows.
    """
    try:
        for work in start():
            work.wait()
    except RuntimeError as error:
        raise ShardError(
            f"a collective over the ranks that hold the model failed: {error}. Expected was that all of them run the same step"
            " until it ends. Look at the other ranks' output for the one that failed first, and start all of them again"
        ) from error
