"""Nodes that are told to leave, by SIGTERM: the step ends, and state that only they have goes to the disks of others."""

import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.model.pieces import Held, Owners, Piece
from autohete_fx.cluster.store.states import states_of
from autohete_fx.cluster.store.store import Entry, Place, Save, Store, taken


class Notice:
    """Whether this process was sent SIGTERM, while it listens. Outside of the main thread no signal is heard.

    The handler from before would end a step that others take part in. It is therefore not called until `end`.
    """

    def __init__(self) -> None:
        self._given = threading.Event()
        self._before: Any = signal.SIG_DFL

    @property
    def given(self) -> bool:
        """It was."""
        return self._given.is_set()

    def listen(self) -> None:
        """Hear SIGTERM from now on."""
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._hear)
            earlier = getattr(before, "__self__", None)  # a job's that did not finish
            self._before = earlier._before if isinstance(earlier, Notice) else before

    def end(self) -> None:
        """Leave SIGTERM to the handler from before, which gets one that was heard now. By default that ends the process, with 0."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        heard = self.given
        self._given.clear()
        if heard and callable(self._before):
            self._before(signal.SIGTERM, None)
        elif heard and self._before != signal.SIG_IGN:
            sys.exit(0)

    def _hear(self, *_: object) -> None:
        self._given.set()


def hand_over(
    store: Store,
    save: Save,
    owners: Owners,
    members: Sequence[Member],
    leaving: Collection[str],
    params: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    held: Held,
    group: dist.ProcessGroup | None,
) -> int:
    """Add a part to a save, on disks that stay, of all that only leaving nodes own. All ranks call it, where any node stays.

    Returns:
        Bytes that were sent, of all ranks.
    """
    rank = dist.get_rank(group)
    stay = [other for other, member in enumerate(members) if member.node not in leaving]
    moved: dict[int, list[Piece]] = {}
    for piece, ranks in owners.items():
        if all(members[other].node in leaving for other in ranks):
            moved.setdefault(ranks[0], []).append(piece)
    states = states_of(params, optimizer, held) if rank in moved else {}
    tensors: dict[str, Tensor] = {}
    for piece in moved.get(rank, ()):
        tensors |= taken(states[held[piece.name]], held[piece.name], piece)
    heads: list[Any] = [None] * len(members)
    mine = [Entry(key=key, sizes=tuple(tensor.shape), dtype=tensor.dtype) for key, tensor in tensors.items()]
    dist.all_gather_object(heads, mine, group=group)
    sent = 0
    for index, source in enumerate(sorted(moved)):
        target = stay[index % len(stay)]
        entries: list[Entry] = heads[source]
        sent += sum(entry.num_bytes for entry in entries)
        if rank == source:
            for entry in entries:
                dist.send(tensors[entry.key].contiguous(), target, group=group)
        elif rank == target:
            received = {entry.key: entry.empty() for entry in entries}
            for entry in entries:
                dist.recv(received[entry.key], source, group=group)
            Place(store.disk).write(save, len(members) + source, received)
    dist.barrier(group=group)
    return sent
