"""Updates that run without the caller, and who waits for them.

In: for each update a ticket and the tensors that it reads or writes. Out: a wait for whoever needs those tensors. A node of
compiled code, the `fence` around eager code, or the next step asks for them. Tensors are known by the memory that they lie in,
so a view of a parameter is the parameter.

An update that fails leaves its parameter undefined: every later use of it raises, until `forget_failures`.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import Tensor

from autohete_fx.errors import OptimizerStateError
from autohete_fx.ir import Lane, Schedule
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.ticket import Failed, Ticket
from autohete_fx.runtime.pending.addresses import address_of
from autohete_fx.runtime.pending.backward import Early
from autohete_fx.runtime.pending.fence import Fence, raise_fences


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """An update under way. The tensors stay referenced, so that their addresses name nothing else."""

    ticket: Ticket
    owner: int  # identity of the parameter
    tensors: tuple[Tensor, ...]

    @property
    def is_over(self) -> bool:
        return self.ticket.is_complete and self.ticket.error is None

    def wait(self, lanes: Lanes, *, on_cpu: bool = False) -> None:
        try:
            if on_cpu:
                self.ticket.synchronize()
            else:
                lanes.wait(self.ticket)
        except BaseException as error:
            if not isinstance(error, Exception) and error is not self.ticket.error:
                raise  # an interrupt of the wait
            raise OptimizerStateError(
                f"the update of a parameter of shape {tuple(self.tensors[0].shape)} failed with {error!r}; it and its"
                " optimizer states are undefined. Load the last checkpoint: the optimizer's state dict first, then the"
                " model's"
            ) from error


class Updates:
    """The pending updates of one model. Thread safe.

    Attributes:
        lanes: where updates run.
        schedule: what updates may overlap with, and whether the next forward's order is theirs. Compiled code that waits for
            what it reads sets it; until then a step returns when its updates are done.
        early: the updates that started in backward, until a step takes them over.
        shortage: says of an error, where the device's memory ran out, how the model's plan relates to it; None before the model
            has trained.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.schedule = Schedule()
        self.early = Early()
        self.shortage: Callable[[BaseException], str] | None = None
        self._fence = Fence(self)
        # Reentrant: a garbage collection inside a locked region may run code that reads a parameter. Who reads the
        # dictionary without the lock may see updates that are over, never miss one that this thread has added.
        self._lock = threading.RLock()
        # By address. Tensors may share memory, as the gradients in a bucket do.
        self._pending: dict[int, tuple[_Pending, ...]] = {}
        _live.add(self)

    @property
    def is_pending(self) -> bool:
        """Whether any update may be under way."""
        return bool(self._pending)

    def add(
        self,
        ticket: Ticket,
        param: Tensor,
        others: Iterable[Tensor] = (),
        *,
        made_by: Ticket | None = None,
        lent: Iterable[Tensor] = (),
    ) -> None:
        """Note an update of ``param``, which is complete with ``ticket``.

        Args:
            others: what else it reads or writes: the gradient, the states.
            made_by: the ticket with which the others are complete, where that is another.
            lent: likewise, but held by the update alone, which lets go of it when it is done: device memory.
        """
        rest = tuple(others)
        made, updated = _Pending(made_by or ticket, id(param), (param, *rest)), _Pending(ticket, id(param), (param,))
        with self._lock:
            for pending, tensors in ((made, (*rest, *lent)), (updated, (param,))):
                for address in {address_of(t) for t in tensors}:
                    if address is not None:
                        self._pending[address] = (*self._pending.get(address, ()), pending)

    def add_failed(self, error: BaseException, param: Tensor, others: Iterable[Tensor]) -> None:
        """Note an update of ``param``, and of others, that the caller began and could not end."""
        self.add(Failed(Lane.UPDATE, "update", error), param, others)

    def close(self) -> None:
        """The model is gone: steps that its optimizer still takes are over when they return, on lanes of their own."""
        self.schedule = Schedule()
        self.lanes = Lanes(self.lanes.device, is_host=self.lanes.is_host)

    @property
    def needs_fence(self) -> bool:
        """Whether the program must be watched: something is pending, or a backward may start something, or has."""
        return bool(self._pending) or self.early.is_expected or self.early.is_open

    @property
    def fence(self) -> Fence:
        """The fence that watches the program."""
        return self._fence

    def guard(self) -> None:
        """Raise the fence in this thread, if it is needed."""
        self.prune()
        if self.needs_fence:
            raise_fences([self._fence])

    def tickets_of(self, t: Tensor) -> list[Ticket]:
        """The updates that the memory of ``t`` waits for."""
        address = address_of(t) if self._pending else None
        found = () if address is None else self._pending.get(address, ())
        for pending in found:
            if pending.is_over:  # nobody is going to wait for it
                pending.ticket.let_go()
        return [pending.ticket for pending in found if not pending.is_over]

    def wait_for(self, t: Tensor) -> None:
        """Wait until the memory of ``t`` is up to date: on the CPU, or on the current stream. Raises OptimizerStateError."""
        if not self._pending or not t.numel():
            return
        address = address_of(t)
        if address is None:
            self.wait_all()
        else:
            for pending in self._pending.get(address, ()):
                pending.wait(self.lanes)

    def wait_all(self, but: Collection[int] = (), *, on_cpu: bool = False) -> None:
        """Wait for every update, except those of parameters whose identities are given. Raises OptimizerStateError,
        once all are over.

        Args:
            on_cpu: return when they are done on the device too. Else the current stream waits there.
        """
        if not self._pending:
            return
        failure: OptimizerStateError | None = None
        for pending in self._all():
            if pending.owner not in but:
                try:
                    pending.wait(self.lanes, on_cpu=on_cpu)
                except OptimizerStateError as error:
                    failure = failure or error
        self.prune()
        if failure is not None:
            raise failure

    def settle(self, *, on_cpu: bool = False) -> None:
        """Wait for every update. Failures stay on record, for whoever reads what they left."""
        with contextlib.suppress(OptimizerStateError):
            self.wait_all(on_cpu=on_cpu)

    def forget_failures(self) -> None:
        """Let parameters whose update failed be used again, as they are loaded. All updates are over, as `settle` leaves them."""
        self._keep(lambda pending: pending.ticket.error is None)
        self.early.forget()

    def prune(self) -> None:
        """Let go of updates that are over, and of what they hold."""
        over = {id(pending): pending for pending in self._all() if pending.is_over}
        for pending in over.values():
            pending.ticket.let_go()
        self._keep(lambda pending: id(pending) not in over)

    def _all(self) -> list[_Pending]:
        with self._lock:
            return [pending for found in self._pending.values() for pending in found]

    def _keep(self, is_kept: Callable[[_Pending], bool]) -> None:
        with self._lock:
            kept = ((address, tuple(filter(is_kept, found))) for address, found in self._pending.items())
            self._pending = {address: found for address, found in kept if found}


_live: "weakref.WeakSet[Updates]" = weakref.WeakSet()


def _settle_all() -> None:
    """A child of this process has its memory but none of its lanes: what is under way ends before there is one."""
    for updates in list(_live):
        updates.settle(on_cpu=True)


os.register_at_fork(before=_settle_all)
