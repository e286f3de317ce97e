"""The cloud of a store when a job is restored: each question has a time limit, and where it fails the cloud counts as empty."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from autohete_fx.cluster.store.about import about_of
from autohete_fx.cluster.store.store import COMMITTED, Parts, Place, Save, Store

_Answer = TypeVar("_Answer")


class Cloud:
    """The cloud of a store, which may be down: then it has nothing, and ``trouble`` says so."""

    def __init__(self, store: Store) -> None:
        self._url, self._timeout_s = store.cloud, store.cloud_timeout_s
        self._saves: list[Save] = []
        self.trouble = ""

    def saves(self) -> list[Save]:
        """All saves there."""
        url = self._url
        self._saves = [] if url is None else self._asked(lambda: Place(url).saves(), [])
        return self._saves

    def parts(self, save: Save) -> Parts:
        """Parts of a save."""
        url = self._url
        return self._asked(lambda: Place(url).parts(save), {}) if url is not None and save in self._saves else {}

    def about(self, parts: Parts) -> dict[str, Any]:
        """The facts that parts there say of the job that wrote them."""
        return self._asked(lambda: about_of(parts), {}) if parts else {}

    def is_committed(self, save: Save) -> bool:
        """Whether all parts of a save were there."""
        url = self._url
        known = url is not None and save in self._saves
        return known and self._asked(lambda: Place(str(url)).is_marked(save, COMMITTED), False)

    def _asked(self, ask: Callable[[], _Answer], nothing: _Answer) -> _Answer:
        """The answer to a question that a thread asks, since a client may try again for minutes."""
        answers: SimpleQueue[_Answer | Exception] = SimpleQueue()

        def run() -> None:
            try:
                answers.put(ask())
            except Exception as error:  # a cloud that is down is no reason to stop where disks have everything
                answers.put(error)

        if self.trouble:
            return nothing
        threading.Thread(target=run, name="autohete-cloud", daemon=True).start()
        try:
            answer = answers.get(timeout=self._timeout_s)
        except Empty:
            answer = TimeoutError(f"it did not answer within {self._timeout_s:g} s")
        if isinstance(answer, Exception):
            self.trouble = f"The cloud {self._url!r} could not be read: {str(answer) or type(answer).__name__}."
            return nothing
        return answer
