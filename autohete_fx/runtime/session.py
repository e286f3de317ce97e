"""Sessions: everything mutable that one compiled model owns at run time.

A session is found in two ways. The digest that ops carry (`session_by_digest`) lets code cached by another process work in this
one. The parameters that it places lead to it, too (`autohete_fx.runtime.placement`). It owns the host tier, the lanes, the
copies in flight and the optimizer updates under way. All graphs of one model (graph breaks, recompilations, inference) share
one session; two models never do.
"""

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autohete_fx.ir import Lane
from autohete_fx.runtime.disk import DiskTier
from autohete_fx.runtime.lanes.failures import Group
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.net import Start
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.tiers.host import HostTier, open_tier
from autohete_fx.runtime.wholes import Wholes

_COPY = "_autohete_copy"
"""The attribute of a handle's storage; see `tiers` for how long PyTorch keeps it."""


@dataclass(eq=False)
class _InFlight:
    """One issued copy or collective, until its waits. The storage of its handle owns it: a handle that nobody waits for, which a
    graph leaves that ends with an error in the middle of a backward, takes its copy along."""

    source_addresses: tuple[int, ...]
    source_memories: tuple[int, ...]
    results: list[torch.Tensor | None]
    ticket: Ticket

    @property
    def result(self) -> torch.Tensor | None:
        """The destination of a copy."""
        (result,) = self.results
        return result


class Session:
    """The runtime of one compiled model.

    Args:
        digest: the same in every process for the same model and options.
        device: where the model computes.
        offload_dir: directory for states on disk, and for homes on a CPU device; None for the default.
        host_budget_bytes: limit for homes; None for no limit.

    Attributes:
        wholes: parameters that a plan replicates.
    """

    def __init__(
        self, digest: str, device: torch.device, *, offload_dir: str | None = None, host_budget_bytes: int | None = None
    ) -> None:
        self.digest = digest
        self.device = device
        self._offload_dir = offload_dir
        self._host_budget_bytes = host_budget_bytes
        self._tier: HostTier | None = None
        self._disk: DiskTier | None = None
        self._lanes: Lanes | None = None
        self._updates: Updates | None = None
        # Without a callback: Python would swallow an interrupt that comes in one.
        self._in_flight: dict[int, weakref.ref[_InFlight]] = {}
        self._handles = itertools.count()
        self._lock = threading.Lock()
        self.wholes = Wholes()
        _sessions[digest] = self

    @property
    def tier(self) -> HostTier:
        """Host memory, opened at the first use."""
        with self._lock:
            if self._tier is None:
                self._tier = open_tier(self.device, self._offload_dir, self._host_budget_bytes)
            return self._tier

    @property
    def disk(self) -> DiskTier:
        """For optimizer states on disk, opened at the first use."""
        with self._lock:
            if self._disk is None:
                self._disk = DiskTier(self._offload_dir)
            return self._disk

    @property
    def lanes(self) -> Lanes:
        """The lanes, started at the first use."""
        with self._lock:
            if self._lanes is None:
                self._lanes = Lanes(self.device)
            return self._lanes

    @property
    def updates(self) -> Updates:
        """The optimizer's updates that run on the lanes."""
        lanes = self.lanes
        with self._lock:
            if self._updates is None:
                self._updates = Updates(lanes)
            return self._updates

    @property
    def host_bytes(self) -> int:
        """Bytes of homes in use."""
        return 0 if self._tier is None else self._tier.in_use_bytes

    def issue(
        self, lane: Lane, priority: int, dst: torch.Tensor, src: torch.Tensor, label: str = "copy"
    ) -> torch.Tensor:
        """Start a copy, of a parameter whose update is under way when that is done. Returns its handle, a one-element
        int64 tensor on the CPU."""
        updates = self.updates.tickets_of(src) if lane is Lane.H2D else []
        after = (*updates, self.lanes.now()) if updates else None
        ticket = self.lanes.submit(lane, priority, dst, src, after, label=label)
        return self.note_issued([src], [dst], ticket)

    def issue_collective(
        self,
        label: str,
        start: Start,
        sources: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        *,
        num_bytes: int,
        among: Group | None = None,
    ) -> torch.Tensor:
        """Start a collective of several ranks, which makes one result of each source. Returns its handle."""
        ticket = self.lanes.collective(label, start, num_bytes=num_bytes, among=among)
        return self.note_issued(sources, results, ticket)

    def note_issued(
        self, sources: Sequence[torch.Tensor], results: Sequence[torch.Tensor], ticket: Ticket
    ) -> torch.Tensor:
        """A handle by which nodes wait for a ticket and get one result of each source."""
        number = next(self._handles)
        copy = _InFlight(
            tuple(src.data_ptr() for src in sources),
            tuple(src.untyped_storage().data_ptr() for src in sources),
            list(results),
            ticket,
        )
        self._in_flight[number] = weakref.ref(copy)
        return _handle(number, copy)

    def wait(self, handle: torch.Tensor, src: torch.Tensor, at: int = 0) -> torch.Tensor:
        """Finish the copy or the collective of a handle and return what came of its source at a position."""
        number = int(handle)
        copy = self._in_flight[number]()
        assert copy is not None, "wait must get the handle itself"
        # A compiler that hands the two nodes different copies of `src` could reuse the first one while it is read.
        assert copy.source_addresses[at] == src.data_ptr(), "wait must get the tensor that was copied"
        try:
            self.lanes.wait(copy.ticket)
        except Exception:
            self._in_flight.pop(number, None)
            self.updates.wait_for(src)  # where it is the update that failed, this says so
            raise
        result, copy.results[at] = copy.results[at], None  # the handle may live longer
        if not any(left is not None for left in copy.results):
            del self._in_flight[number]
        assert result is not None
        return result

    def start_update(self, handle: torch.Tensor, edge: int, priority: int) -> torch.Tensor:
        """Start the update of a parameter, by its edge in autograd's graph, or leave it to the step.

        Its gradient is the one that the copy of a handle brings home. Returns the copy's handle from then on.
        """
        early, gradient = self.updates.early, self._in_flight[int(handle)]()
        assert gradient is not None and gradient.result is not None, "start_update must get the handle itself"
        if early.is_armed:
            early.start(edge, gradient.result, gradient.ticket, self._copies_of, priority)
        return _handle(int(handle), gradient)

    def take_norm(self, handle: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Take the norm of a gradient that the copy of a handle brings home. Returns the copy's handle from then on."""
        gradient = self._in_flight[int(handle)]()
        assert gradient is not None and gradient.result is not None, "take_norm must get the handle itself"
        if self.updates.early.is_armed:
            self.updates.early.norms.take(grad, gradient.result)
        return _handle(int(handle), gradient)

    def _copies_of(self, param: torch.Tensor) -> list[Ticket]:
        """What still reads it."""
        memory = param.untyped_storage().data_ptr()
        copies = [reference() for reference in list(self._in_flight.values())]  # another thread may issue one meanwhile
        return [copy.ticket for copy in copies if copy is not None and memory in copy.source_memories]

    def abandon(self) -> list[Exception]:
        """Finish and forget copies whose graph ended with an error before it waited for them; returns what failed."""
        copies, self._in_flight = self._in_flight, {}
        failures = []
        for copy in [found for reference in copies.values() if (found := reference()) is not None]:
            try:
                copy.ticket.wait()
            except Exception as error:
                failures.append(error)
        return failures

    def close(self) -> None:
        """Stop the lanes; compiled code finds the session no longer. Homes live on as long as tensors refer to them."""
        with self._lock:
            if _sessions.get(self.digest) is self:
                del _sessions[self.digest]
            lanes, self._lanes = self._lanes, None
        if self._updates is not None:
            self._updates.close()
        try:
            if lanes is not None:
                lanes.close()
        finally:
            # What is over refers to parameters, whose placements refer to it: nobody else would let go.
            if self._updates is not None:
                self._updates.prune()


def _handle(number: int, copy: _InFlight) -> torch.Tensor:
    handle = torch.tensor([number], device="cpu")  # whatever torch.set_default_device says
    setattr(handle.untyped_storage(), _COPY, copy)
    return handle


_sessions: "weakref.WeakValueDictionary[str, Session]" = weakref.WeakValueDictionary()


def session_by_digest(digest: str) -> Session:
    """The live session with that digest."""
    session = _sessions.get(digest)
    assert session is not None, f"compiled code refers to session {digest}, which no live model owns"
    return session


def is_live(digest: str) -> bool:
    """Whether a session with that digest exists in this process."""
    return digest in _sessions
