"""Saves of a running job: copied to host memory between two steps, written by threads while training goes on.

A save is *committed* once all ranks have written their parts of it, which they tell each other when the next save begins. Older
saves are removed after that, never before. A disk that is full or a cloud that is down ends that save with an error in the log.
Training goes on, and the next save is tried again. A cloud that is slow is never waited for. While any rank still writes there,
all leave out the next save to it, and say so.

Each place keeps its last ``keep`` committed saves, whichever start of the job made them: a file in each marks it. The save that a
start began from counts on disks as well, since it was whole then. Disks also keep the newest save that is whole in the cloud. If a
node is lost, the others then read from the cloud that node's part alone. Other saves up to the newest committed one are removed.
Newer ones of earlier starts lacked a part when this start began. The last ``keep`` of them stay until they are passed, because a
node that vanished may bring that part back.

A file in each place names the start that saves there. One that finds another's name there ends, for each would remove the other's
saves.

While one rank cannot write, no save is committed there. Each other rank then removes its parts of such saves of this start, but for
the newest one. A full disk of one node fills neither the others nor the cloud.
"""

import itertools
import logging
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autohete_fx.cluster.model.pieces import Held, Piece
from autohete_fx.cluster.store.about import about_entry
from autohete_fx.cluster.store.damage import words_of
from autohete_fx.cluster.store.states import States
from autohete_fx.cluster.store.store import COMMITTED, IN_CLOUD, Place, Save, Store, taken
from autohete_fx.errors import ClusterError

log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""Between two looks whether the cloud has everything, when a job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Newest committed steps, -1 before the first: on the disks of all nodes, and in the cloud."""

    local: int = -1
    cloud: int = -1


class _Writer:
    """Writes a rank's parts to one place, one at a time.

    Args:
        path: of the place.
        rank: this one.
        daemon: the process may end while a part is written, which then stays incomplete.
        looks: this rank sees to it that no other start of the job saves there.

    Attributes:
        is_taken: a later start of the job saves there.
    """

    def __init__(self, path: str, rank: int, *, daemon: bool, looks: bool) -> None:
        self.path, self._rank, self._daemon, self._looks = path, rank, daemon, looks
        self.is_taken, self._has_taken = False, False
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self.save = Save(step=-1, generation="")
        self.written = -1
        self.error: str | None = None
        self._loose: list[Save] = []

    @property
    def writes(self) -> bool:
        """Something is being written or removed there."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def since_s(self) -> float:
        """Seconds since the newest part was begun."""
        return time.perf_counter() - self._began_s

    def begin(self, save: Save, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Write a part, whose step then is ``written`` if that worked. The part before it is done.

        A part that is whole is not written over: cut off then, it would seem whole, and a failure would remove it.
        """
        if self.written == save.step:
            return
        self.save, self.written, self._began_s = save, -1, time.perf_counter()
        self._loose = [*(other for other in self._loose if other != save), save]
        self.then(lambda: self._write(save, tensors))

    def then(self, work: Callable[[], None]) -> None:
        """Do something there after all that has begun."""
        before = self._thread

        def run() -> None:
            if before is not None:
                before.join()
            work()

        self._thread = threading.Thread(target=run, name="autohete-save", daemon=self._daemon)
        self._thread.start()

    def try_it(self, generation: str) -> None:
        """See whether the place can be written, long before the first save perhaps. No save waits for one that may not answer."""
        if self._daemon:
            threading.Thread(target=self._try, args=(generation,), name="autohete-try", daemon=True).start()
        else:
            self.then(lambda: self._try(generation))

    def note_committed(self, save: Save) -> None:
        """All ranks have written that save."""
        self._loose = [other for other in self._loose if other != save]

    def remove_loose(self, spared: Collection[Save]) -> None:
        """Remove this rank's parts of saves that not all ranks could write, after all that has begun. The newest one stays.

        Args:
            spared: saves that stay, too.
        """
        old = [save for save in self._loose if save != self.save and save not in spared]
        if old:
            self._loose = [save for save in self._loose if save not in old]
            self.then(lambda: self._remove(old))

    def wait(self) -> None:
        """Until that is done."""
        if self._thread is not None:
            self._thread.join()

    def _try(self, generation: str) -> None:
        try:
            Place(self.path).check_writable(f"written-by-{generation}-{self._rank}")
        except Exception as error:
            log.error(
                "rank %d cannot write to %r: %s. Expected was a place that can be written. Training goes on, and saves are tried",
                self._rank,
                self.path,
                words_of(error),
            )

    def _write(self, save: Save, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """`CheckpointException` is no Exception."""
        try:
            place = Place(self.path)
            if self._looks:
                owner = place.owner() if self._has_taken else ""
                if owner not in ("", save.generation):
                    self.is_taken = True
                    return
                if not owner:  # none yet, or somebody has removed the file
                    place.take(save.generation)
                    self._has_taken = True
            place.write(save, self._rank, tensors())
        except BaseException as error:
            self.error = (
                f"rank {self._rank} could not save step {save.step} to {self.path!r}: {words_of(error)}. Expected was a place that"
                " can be written. Training goes on; the next save is tried again"
            )
            log.error(self.error)
            try:
                Place(self.path).remove_part(save, self._rank)
            except Exception as second:
                log.warning("rank %d could not remove its part of step %d: %s", self._rank, save.step, second)
        else:
            self.written = save.step

    def _remove(self, saves: Iterable[Save]) -> None:
        for save in saves:
            try:
                Place(self.path).remove_part(save, self._rank, with_empty_save=True)
            except Exception as error:
                self._loose.append(save)  # until the next save begins
                log.warning("rank %d could not remove its part of step %d: %s", self._rank, save.step, error)


class Saver:
    """Saves of one rank. All ranks make one, and call each method together.

    Attributes:
        saved: the newest steps that all ranks had written when they last told each other.
        last: the newest save that began.

    Args:
        store: of the job.
        generation: of this start of the job.
        group: of all ranks, for tensors in host memory.
        owned: pieces whose first owner this rank is; it saves them in the cloud.
        held: pieces that this rank has.
        all_names: parameters of the model.
        facts: others of the job, which parts say (`about`).
        cleans: this rank is the first of its node, and removes old saves from the disk.
        began: the save that this start of the job goes on from; None: from none.
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
        facts: Mapping[str, object] = types.MappingProxyType({}),
        cleans: bool,
        began: Save | None = None,
    ) -> None:
        self._store, self._generation, self._group = store, generation, group
        self._owned, self._held = tuple(owned), held
        self._about, self._cleans = about_entry(all_names, facts), cleans
        self._rank = dist.get_rank(group)
        self._disk = _Writer(store.disk, self._rank, daemon=False, looks=cleans)
        self._cloud = None
        if store.cloud is not None:
            self._cloud = _Writer(store.cloud, self._rank, daemon=True, looks=not self._rank)
        self._cloud_is_free = True
        self._committed: dict[bool, tuple[Save, ...]] = {False: (began,) if began else (), True: ()}
        self.saved = Saved()
        self.last = Save(step=0, generation=generation)
        if self._cloud is not None and not self._rank:
            self._cloud.try_it(generation)
        if cleans:
            self._disk.try_it(generation)
            if began is not None:
                self._disk.then(lambda: _remove_old(store.disk, (began,), store.keep, generation))

    @property
    def error(self) -> str | None:
        """The newest failure of this rank to save, in the cloud before one on its disk; None: none."""
        return (self._cloud.error if self._cloud else None) or self._disk.error

    def save(self, step: int, states: States, *, cloud: bool) -> None:
        """Begin to write the state before ``step``; waits for the save on the disk before it.

        Args:
            step: that would be trained next.
            states: of `states.states_of`; not changed after.
            cloud: to the cloud as well, unless a rank still writes there.
        """
        self.settle()
        save = self.last = Save(step=step, generation=self._generation)
        self._disk.begin(save, lambda: {**self._about, **_tensors(states.values())})
        begins = cloud and self._cloud_is_free
        if begins and self._cloud is not None:
            self._cloud.begin(save, lambda: self._own(states))
        self._remove_loose(in_cloud=begins)
        if cloud and not begins and self._cloud is not None and not self._rank:
            log.warning(
                "the cloud %r is slow: step %d is still being written there after %.0f s, and step %d is left out. Training goes"
                " on",
                self._store.cloud,
                self._cloud.save.step,
                self._cloud.since_s,
                step,
            )

    def settle(self) -> Saved:
        """Wait for this rank's save on its disk, hear of the others', remove what is old. Returns the committed steps.

        Raises:
            ClusterError: another start of the job saves in the store.
        """
        self._disk.wait()
        # a cloud that is free has the same newest save on all ranks, since all left out the same ones
        free = self._cloud is None or not self._cloud.writes
        is_ours = not (self._disk.is_taken or (self._cloud is not None and self._cloud.is_taken))
        mine = [self._disk.written, self._cloud.written if self._cloud else -1, free, is_ours]
        told = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MIN, group=self._group)
        if not told[3]:
            where = " or ".join(repr(path) for path in (self._store.disk, self._store.cloud) if path)
            raise ClusterError(
                f"another job, or a later start of this one, has begun to save in {where}. Expected was one at a time, as each"
                " removes what the other has saved. End one of them, and its torchrun, or give each a store"
            )
        local, cloud, self._cloud_is_free = int(told[0]), int(told[1]), bool(told[2])
        self.saved = Saved(
            local=max(self.saved.local, local),
            cloud=max(self.saved.cloud, cloud) if self._cloud_is_free else self.saved.cloud,
        )
        for in_cloud, step in ((False, self.saved.local), (True, self.saved.cloud)):
            newest = Save(step=step, generation=self._generation)
            if step >= 0 and self._committed[in_cloud][-1:] != (newest,):
                self._commit(in_cloud, newest)
        return self.saved

    def drain(self) -> Saved:
        """Wait until all ranks have written everything, to the cloud too. No rank waits for another's bytes in a collective, which
        would end by its timeout."""
        while True:
            saved = self.settle()
            if self._cloud_is_free:
                for writer in (self._disk, self._cloud):
                    if writer is not None:
                        writer.wait()  # what it removes
                return saved
            time.sleep(_LOOK_S)

    def _remove_loose(self, *, in_cloud: bool) -> None:
        """Remove this rank's parts of saves that are not committed, as `settle` has said, once newer ones are tried."""
        disk, cloud = self._disk, self._cloud
        being_written = (cloud.save,) if cloud else ()
        disk.remove_loose((*self._committed[False], *self._committed[True][-1:], *being_written))
        if in_cloud and cloud is not None:
            cloud.remove_loose(self._committed[True])

    def _own(self, states: States) -> dict[str, Tensor]:
        own = dict(self._about)
        for piece in self._owned:
            held = self._held[piece.name]
            own |= states[held] if piece == held else taken(states[held], held, piece)
        return own

    def _commit(self, in_cloud: bool, newest: Save) -> None:
        """Mark a save of which all parts are written, and remove those that it makes old."""
        keep, generation = self._store.keep, self._generation
        committed = self._committed[in_cloud] = (*self._committed[in_cloud], newest)[-keep:]
        disk, cloud = self._disk, self._cloud
        writer = cloud if in_cloud else disk
        if writer is not None:
            writer.note_committed(newest)
        if not in_cloud and self._cleans:
            spared = (cloud.save,) if cloud else ()  # what is being written there, if anything
            disk.then(lambda: _mark(disk.path, newest, COMMITTED))
            disk.then(lambda: _remove_old(disk.path, committed, keep, generation, spared))
        elif in_cloud and cloud is not None:
            if self._cleans:
                disk.then(lambda: _mark(disk.path, newest, IN_CLOUD))
            if not self._rank:
                cloud.then(lambda: _mark(cloud.path, newest, COMMITTED))
                cloud.then(lambda: _remove_old(cloud.path, committed, keep, generation))


def _tensors(rows: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {key: tensor for mine in rows for key, tensor in mine.items()}


def _mark(path: str, save: Save, mark: str) -> None:
    try:
        Place(path).mark(save, mark)
    except Exception as error:
        log.warning("step %d in %s could not be marked as whole: %s", save.step, path, error)


def _remove_old(
    path: str, committed: Sequence[Save], keep: int, generation: str, spared: Collection[Save] = ()
) -> None:
    """Remove the saves in a place that no start of the job needs any more.

    Args:
        path: of the place.
        committed: the last committed saves that this start knows, the newest last.
        keep: how many stay; marked ones that are older make up the number.
        generation: of this start, whose newer saves are still being written.
        spared: saves that stay, too.
    """
    try:
        place = Place(path)
        saves, kept = place.saves(), list(committed)
        passed = [save for save in reversed(saves) if save.step <= committed[-1].step]
        for save in passed:
            if len(kept) < keep and save.step < committed[0].step and place.is_marked(save, COMMITTED):
                kept.append(save)
        kept += [*spared, *itertools.islice((save for save in passed if place.is_marked(save, IN_CLOUD)), 1)]
        ahead = [save for save in saves if save.step > committed[-1].step and save.generation != generation]
        for save in (*(save for save in passed if save not in kept), *ahead[:-keep]):
            place.remove(save)
    except Exception as error:
        log.warning("old saves in %s could not be removed: %s", path, error)
