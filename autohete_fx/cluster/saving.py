"""Saves of a running job: copied to host memory between two steps, written by a thread while training goes on.

A save is *committed* once all ranks have written their parts, which they tell each other when the next save begins. Older saves
are removed after that, never before. A disk that is full or a cloud that is down ends that save with an error in the log.
Training goes on, and the next save is tried again.
"""

import logging
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autohete_fx.cluster.pieces import Held, Piece
from autohete_fx.cluster.store import Place, Save, States, Store, names_entry, taken

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Newest committed steps, -1 before the first: on the disks of all nodes, and in the cloud."""

    local: int = -1
    cloud: int = -1


class Saver:
    """Saves of one rank. All ranks make one, and call each method together.

    Attributes:
        saved: the newest steps that all ranks had written when the last save began.
        last: the newest save that began.
        error: of the newest save that failed; None: none did.

    Args:
        store: of the job.
        generation: of this start of the job.
        group: of all ranks, for tensors in host memory.
        owned: pieces whose first owner this rank is; it saves them in the cloud.
        held: pieces that this rank has.
        all_names: parameters of the model.
        cleans: this rank is the first of its node, and removes old saves from the disk.
    """

    def __init__(
        self,
        store: Store,
        generation: str,
        group: dist.ProcessGroup | None,
        *,
        owned: Collection[Piece],
        held: Held,
        all_names: Collection[str],
        cleans: bool,
    ) -> None:
        self._store, self._generation, self._group = store, generation, group
        self._owned, self._held = tuple(owned), held
        self._names, self._cleans = names_entry(all_names), cleans
        self._rank = dist.get_rank(group)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autohete-save")
        self._running: Future[None] | None = None
        self._lock = threading.Lock()
        self._written = Saved()
        self._committed: dict[bool, list[Save]] = {False: [], True: []}
        self.saved = Saved()
        self.last = Save(step=0, generation=generation)
        self.error: str | None = None

    def save(self, step: int, states: States, *, cloud: bool) -> None:
        """Begin to write the state before ``step``; waits for the save before it.

        Args:
            step: that would be trained next.
            states: of `store.states_of`; not changed after.
            cloud: to the cloud as well.
        """
        self.settle()
        save = self.last = Save(step=step, generation=self._generation)
        self._running = self._thread.submit(self._write, save, states, cloud)

    def settle(self) -> Saved:
        """Wait for this rank's save, hear of the others', remove what is old. Returns the committed steps."""
        if self._running is not None:
            self._running.result()
            self._running = None
        with self._lock:
            mine = [self._written.local, self._written.cloud]
        steps = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(steps, dist.ReduceOp.MIN, group=self._group)
        self.saved = Saved(local=int(steps[0]), cloud=int(steps[1]))
        for in_cloud, step in ((False, self.saved.local), (True, self.saved.cloud)):
            kept = self._committed[in_cloud]
            if step >= 0 and (not kept or kept[-1].step < step):
                kept.append(Save(step=step, generation=self._generation))
                self._remove_older(in_cloud, kept)
        return self.saved

    def close(self) -> Saved:
        """Wait until all ranks have written everything."""
        saved = self.settle()
        self._thread.shutdown()
        return saved

    def _write(self, save: Save, states: States, cloud: bool) -> None:
        tensors = {**self._names, **{key: tensor for mine in states.values() for key, tensor in mine.items()}}
        if self._try(self._store.local, save, tensors):
            with self._lock:
                self._written = Saved(local=save.step, cloud=self._written.cloud)
        if cloud and self._store.cloud is not None:
            own = dict(self._names)
            for piece in self._owned:
                held = self._held[piece.name]
                own |= states[held] if piece == held else taken(states[held], held, piece)
            if self._try(self._store.cloud, save, own):
                with self._lock:
                    self._written = Saved(local=self._written.local, cloud=save.step)

    def _try(self, path: str, save: Save, tensors: Mapping[str, Tensor]) -> bool:
        """Write a part; whether it worked. `CheckpointException` is no Exception."""
        try:
            Place(path).write(save, self._rank, tensors)
        except BaseException as error:
            cause = next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__)
            self.error = (
                f"rank {self._rank} could not save step {save.step} to {path!r}: {cause}. Expected was a place that can be written."
                " Training goes on; the next save is tried again"
            )
            log.error(self.error)
            try:
                Place(path).remove_part(save, self._rank)
            except Exception as second:
                log.warning("rank %d could not remove its part of step %d: %s", self._rank, save.step, second)
            return False
        return True

    def _remove_older(self, in_cloud: bool, kept: list[Save]) -> None:
        """Of the saves up to the newest committed one, keep the last committed ones."""
        path = self._store.cloud if in_cloud else self._store.local
        if path is None or not (self._rank == 0 if in_cloud else self._cleans):
            return
        newest = kept[-self._store.keep :]
        if len(newest) < self._store.keep:
            return
        try:
            place = Place(path)
            for save in place.saves():
                if save.step <= newest[-1].step and save not in newest:
                    place.remove(save)
        except Exception as error:
            log.warning("old saves in %s could not be removed: %s", path, error)
