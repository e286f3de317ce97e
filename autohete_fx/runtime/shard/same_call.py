"""Calls of one compiled graph by the ranks that hold its model: all of them have to run the same graph at a time.

In: the ranks, and what the graph is. Out: a context around each call. Collectives are paired by their order alone. Where one rank
evaluates while the others train, or has a batch of another size, each would take what others meant for another graph. No error
would tell where sizes agree. A message to all ranks goes beside each forward, and is read when that has ended.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autohete_fx.errors import ShardError
from autohete_fx.internals.modes import disable_current_modes
from autohete_fx.runtime.lanes.net import run_collective
from autohete_fx.runtime.pending.fence import tensors_in
from autohete_fx.runtime.shard.ranks import Ranks


class SameCall:
    """Sees that all ranks run a graph at a time.

    Args:
        ranks: that have compiled it.
        graph: what it is: a text that is the same on all of them, and another for another graph.
        kind: of graph, in an error's words.
    """

    def __init__(self, ranks: Ranks, graph: str, kind: str) -> None:
        self._ranks, self._kind = ranks, kind
        self._number = int.from_bytes(hashlib.sha256(graph.encode()).digest()[:7], "big")

    @contextlib.contextmanager
    def checked(self, inputs: Sequence[object]) -> Iterator[None]:
        """Around a forward with these inputs.

        Raises:
            ShardError: another rank ran another graph meanwhile, or has failed. The forward has ended by then.
        """
        sizes = [
            tuple(t.shape) for t in tensors_in(inputs) if not isinstance(t, torch.nn.Parameter)
        ]  # code may empty the list
        with disable_current_modes():
            found = torch.tensor([self._number, -self._number])
            message: Any = dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._ranks.calls, async_op=True)
        yield
        with disable_current_modes():
            run_collective(lambda: [message], on_cpu=True)
            most, least = int(found[0]), -int(found[1])
        if most != least:
            everywhere = self._ranks.exchange(f"{self._kind} of inputs of sizes {sizes}")
            ran = "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(everywhere))
            raise ShardError(
                f"ranks that hold a model ran different graphs of it at a time: {ran}."
                " Expected was the same on all ranks, whose collectives are of one graph. Give all of them as many batches, of the"
                " same sizes, and let all of them train or evaluate at a time; text is generated with synced_gpus=True"
            )
