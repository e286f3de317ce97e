"""The saves of a place that can be read, such as the disk of a rank's node. A part that cannot be read counts as absent, as a crash
may have cut it off."""

import logging
from collections.abc import Collection, Mapping

from autohete_fx.cluster.store.damage import PartError, words_of
from autohete_fx.cluster.store.store import Entry, Parts, Place, Save, add_part

log = logging.getLogger(__name__)

WHOLE = "all parts"
"""Stands for all parts of a save, where nobody knows which one cannot be read."""


class Readable:
    """Saves on the disk of this rank's node, or in another place.

    Attributes:
        saves: by save, the pieces of parameters in the parts that can be read.

    Args:
        path: of the store on the disk, or a URL.
    """

    def __init__(self, path: str) -> None:
        self._path, self._place = path, Place(path)
        self._troubles: dict[str, str] = {}
        self._absent: dict[Save, set[str]] = {}
        self.saves: dict[Save, Parts] = {}
        try:
            saves = self._place.saves()
        except Exception as error:
            self._note(path, words_of(error))
            saves = []
        for save in saves:
            self.saves[save] = self._parts(save)

    @property
    def troubles(self) -> Mapping[str, str]:
        """By path of a folder that could not be read, the reason."""
        return self._troubles

    def failed(self, save: Save, error: Exception) -> str:
        """Note that pieces of a save could not be read. Returns the part that they are in, or `WHOLE`."""
        if isinstance(error, PartError):
            self._note(error.path, words_of(error))
            return error.path.rpartition("/")[2]
        self._note(f"{self._path}/{save.folder}", words_of(error))
        return WHOLE

    def leave_out(self, save: Save, names: Collection[str]) -> None:
        """Parts of a save count as absent from now on. All ranks of the node call it."""
        self._absent.setdefault(save, set()).update(names)
        self.saves[save] = self._parts(save)

    def _parts(self, save: Save) -> Parts:
        found: dict[str, tuple[str, tuple[Entry, ...]]] = {}
        absent = self._absent.get(save, set())
        try:
            names = [] if WHOLE in absent else self._place.part_names(save)
        except Exception as error:
            self._note(f"{self._path}/{save.folder}", words_of(error))
            names = []
        for name in names:
            if name in absent:
                continue
            try:
                add_part(found, self._place.part(save, name))
            except Exception as error:
                self._note(f"{self._path}/{save.folder}/{name}", words_of(error))
        return found

    def _note(self, path: str, reason: str) -> None:
        if path not in self._troubles:
            log.warning("%s cannot be read and counts as absent: %s", path, reason)
        self._troubles[path] = reason
