"""One step over many parameters: which tensors go to which kernel, in which order, and who does it.

In: one ``Update`` a parameter, with its states in place. Out: parameters, moments, masters and step counters updated in
place, now or when they are needed.

* Device states, and on a CPU device host states too, go to the kernels as they are: one processor can address everything.
  No device temporaries, except for a parameter or gradient of an unusual layout or dtype: one copy of that one tensor
  at a time.
* Host states of an accelerator are updated by the CPU on host views, as work of the update lane (`_HostUpdate`). A parameter
  that lives on the device is updated in the host's copy of it (`host_copy`), and goes up. Any edit of the parameter reaches the
  copy first. Gradients that do not live in homes are copied through homes (`staging`); what the next update needs comes while
  one is computed. No device memory but fingerprints.
* Streamed states pass through the device, which updates them (`streamed`).
* States on disk are updated in RAM, a window of a parameter at a time. On every device, the states of the next update come
  while one is computed.
* Where the schedule lets updates overlap, those of host states are work of the update lane on every device. The step returns
  before they are done (`autohete_fx.runtime.pending.updates` has who waits). The block that the next forward needs first comes
  first.
"""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autohete_fx.ir import Lane, Overlap
from autohete_fx.optim import clipping
from autohete_fx.optim.host_copy import Edits, HostCopies, HostCopy
from autohete_fx.optim.in_place import Coefficients, Update, apply_in_place, apply_one, walk_of, workspace_of
from autohete_fx.optim.kernels import prepare
from autohete_fx.optim.staging import GradientBuffers, shaped
from autohete_fx.optim.state import STEP, layout_of, needs_master, uses_fused
from autohete_fx.optim.streamed import Staging, Stream, can_stream
from autohete_fx.runtime.lanes.lanes import Lanes, lanes_of
from autohete_fx.runtime.lanes.team import let_go_of_team
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.tiers.host import HostTier, host_view


def apply(
    updates: Sequence[Update], host_copies: HostCopies, *, may_overlap: bool, scale: Tensor | None = None
) -> None:
    """Do all updates, or start those that may overlap with what follows.

    Args:
        scale: multiply every gradient by it first, in place.

    Raises:
        HostMemoryError: no room for staging or for the host's copy of a parameter; no parameter has changed.
        torch.OutOfMemoryError: likewise for staging of streamed states.
    """
    _prepare_kernels(updates)
    here, started, streams, waited = _divided(updates, host_copies, may_overlap=may_overlap)
    # All that may be refused is taken before anything changes.
    workspaces = {d: workspace_of((u for u in here if u.param.device == d), d) for d in {u.param.device for u in here}}
    on_device = [*here, *(u for each in streams for u in each.updates)]
    for u in on_device:
        host_copies.discard(u.param)
    if scale is not None:
        clipping.scale((u.grad for u in on_device), scale)
        started = [(_scaled(ready, scale), pending) for ready, pending in started]
    # These wait for the gradients, and must not wait for the device's updates too.
    for each in streams:
        each.begin()
    moments = {lanes: lanes.now() for lanes in (ready.lanes for ready, _ in started)}
    begin = [each.give for each in streams]
    begin += [functools.partial(start, ready, pending, ready_at=moments[ready.lanes]) for ready, pending in started]
    # A device is given its updates in no time, while no thread of ours competes for the interpreter; a CPU does them.
    is_given = "cpu" not in {u.param.device.type for u in here}
    if is_given:
        apply_in_place(here, workspaces)
    tickets: list[Ticket] = []
    for give in begin:
        try:
            tickets += give()
        except BaseException:  # an interrupt may come between giving an update to the lanes and noting it
            for lanes in {*moments, *(each.lanes for each in streams)}:
                lanes.drain()
            raise
    if not is_given:
        apply_in_place(here, workspaces)
    for ticket in tickets:
        ticket.synchronize()
    for pending in waited:
        pending.wait_all(on_cpu=True)
    # No kernel tells autograd, which must refuse a backward through a parameter that it saved before the step.
    torch.autograd.graph.increment_version([u.param for u in updates])


@dataclass(frozen=True, slots=True)
class Prepared:
    """Updates of host states on the same lanes, with all that may be refused: from here on nothing is.

    Attributes:
        updates: each with the host's copy of its parameter, None where the CPU updates the parameter itself.
        edits: which of the parameters on the device were edited.
        staging: for gradients that do not live in homes; None where there are none.
    """

    lanes: Lanes
    updates: tuple[tuple[Update, HostCopy | None], ...]
    edits: Edits
    staging: GradientBuffers | None


def _prepare_kernels(updates: Sequence[Update]) -> None:
    """Compile the kernels that the updates need and this process has not, before any of them begins."""
    for u in updates:
        if u.rule.is_elementwise and not uses_fused(u.rule, u.param):
            on_device = u.placement.tier is None or u.placement.is_streamed
            processor = u.param.device if on_device else torch.device("cpu")
            grad_dtype = u.grad.dtype if needs_master(u.param) else u.param.dtype
            prepare(u.rule, u.param.dtype, grad_dtype, processor, u.param.numel())


def _divided(
    updates: Sequence[Update], host_copies: HostCopies, *, may_overlap: bool
) -> tuple[list[Update], list[tuple[Prepared, Updates | None]], list[Stream], set[Updates]]:
    """Updates that are done here, those of the update lane, and streams, with the host memory that they need.

    Beside those of a lane stand the updates under way that they join, if there is a model that has any. Last come those for which
    this step waits.
    """
    here = [u for u in updates if u.placement.tier is None]
    by_pending: defaultdict[Updates | None, list[Update]] = defaultdict(list)
    for u in updates:
        if u.placement.tier is not None:
            by_pending[u.placement.updates].append(u)
    started: list[tuple[Prepared, Updates | None]] = []
    streams: list[Stream] = []
    waited: set[Updates] = set()
    for pending, mine in by_pending.items():
        lanes = pending.lanes if pending is not None else lanes_of(mine[0].param.device)
        overlaps = may_overlap and pending is not None and pending.schedule.overlap is not Overlap.NONE
        if lanes.is_host and not (overlaps and lanes.in_background):
            here += mine
            continue
        if pending is not None and not overlaps:
            waited.add(pending)
        streamed = [] if lanes.is_host else [u for u in mine if u.placement.is_streamed]
        here += [u for u in streamed if not can_stream(u)]
        on_host = [u for u in mine if lanes.is_host or not u.placement.is_streamed]
        if on_host:
            started.append((prepared(on_host, lanes, host_copies), pending))
        if streamed := [u for u in streamed if can_stream(u)]:
            streams.append(Stream(lanes, streamed, Staging(streamed), pending))
    return here, started, streams, waited


def prepared(updates: Sequence[Update], lanes: Lanes, host_copies: HostCopies) -> Prepared:
    """Take the host memory that the updates need. Raises HostMemoryError; no parameter has changed."""
    tier = updates[0].placement.tier
    assert tier is not None
    with_copies = []
    for u in updates:
        is_there = lanes.is_host or _at_home(u.param, u.param, tier)
        if is_there:
            host_copies.discard(u.param)
        with_copies.append((u, None if is_there else host_copies.of(u.param, u.placement)))
    staged = [u.grad.nbytes for u in updates if not is_read_in_place(u, lanes)]
    staging = GradientBuffers(tier, staged, lanes.num_update_workers) if staged else None
    edits = Edits([(u.param, copy) for u, copy in with_copies if copy is not None], lanes, tier)
    return Prepared(lanes, tuple(with_copies), edits, staging)


def _scaled(ready: Prepared, scale: Tensor) -> Prepared:
    """Let the update lane scale the gradients that it reads where they are, and scale the others here."""
    updates = ready.updates
    memories = Counter(u.grad.data_ptr() for u, _ in updates)
    there = [memories[u.grad.data_ptr()] == 1 and is_read_in_place(u, ready.lanes) for u, _ in updates]
    clipping.scale((u.grad for (u, _), is_there in zip(updates, there, strict=True) if not is_there), scale)
    on_cpu = scale.cpu() if any(there) else scale
    if any(there) and on_cpu == 1:  # multiplying would change no bit
        return ready
    scaled = (
        (dataclasses.replace(u, scale=on_cpu) if is_there else u, copy)
        for (u, copy), is_there in zip(updates, there, strict=True)
    )
    return dataclasses.replace(ready, updates=tuple(scaled))


def is_read_in_place(u: Update, lanes: Lanes) -> bool:
    """Whether the CPU updates from the gradient itself, not from a copy."""
    assert u.placement.tier is not None
    return lanes.is_host or _at_home(u.grad, u.param, u.placement.tier)


def start(
    ready: Prepared,
    pending: Updates | None,
    *,
    ready_at: Ticket | None = None,
    after: Sequence[Ticket] = (),
    priority: int | None = None,
) -> list[Ticket]:
    """Give updates to the lanes, after the tickets and ``ready_at``, by default what the device was given so far.

    ``pending`` learns which are under way; without one the caller waits for these tickets. Without a priority the schedule's
    order is that of the blocks. Copies up always go in their order.
    """
    if ready.lanes.device.type != "cpu":
        let_go_of_team()
    first, coefs = (ready_at or ready.lanes.now(), *after), Coefficients()
    groups = {id(u.group): frozen(u.group) for u, _ in ready.updates}
    has_priority = pending is None or pending.schedule.priority
    # Gradients come from the last block to the first.
    ordered = sorted(ready.updates, key=lambda each: each[0].placement.block, reverse=not has_priority)
    tickets = []
    for u, copy in ordered:
        as_it_is = dataclasses.replace(u, state=dict(u.state), group=groups[id(u.group)])
        rank = priority if priority is not None else u.placement.block if has_priority else 0
        updated, uploaded = _HostUpdate(as_it_is, rank, ready, first, coefs, copy).submit()
        if pending is None:
            tickets.append(uploaded)
        else:
            others = (u.grad, *(t for t in u.state.values() if isinstance(t, Tensor)))
            pending.add(uploaded, u.param, others, made_by=updated)
    return tickets


def frozen(group: dict[str, Any]) -> dict[str, Any]:
    """The group's hyperparameters now: a scheduler may change them before the update runs."""
    return {**group, "lr": float(group["lr"])}


class _HostUpdate:
    """One update as work of the lanes: bring what is on the device, update on the CPU, send the parameter back."""

    def __init__(
        self,
        update: Update,
        priority: int,
        ready: Prepared,
        after: Sequence[Ticket],
        coefs: Coefficients,
        copy: HostCopy | None,
    ) -> None:
        self.update = update
        self.priority = priority
        self.lanes = ready.lanes
        self.after = after
        self.coefs = coefs
        self.copy = copy
        self.edits = ready.edits
        self.staging = None if is_read_in_place(update, ready.lanes) else ready.staging
        self.arrivals: list[Ticket] = []
        self.buffer: Tensor | None = None
        self.is_prepared = False
        self.walk = walk_of(update)

    def submit(self) -> tuple[Ticket, Ticket]:
        """Tickets of the update and of the updated parameter."""
        param, copy = self.update.param, self.copy
        updated = self.lanes.update(
            self.priority, self.run, prepare=self.prepare, begin=self.begin, num_bytes=param.nbytes, after=self.after
        )
        if copy is None:
            return updated, updated
        uploaded = self.lanes.submit(
            Lane.H2D,
            self.update.placement.block,
            param.detach(),
            copy.home,
            (updated, *self.after),
            label="upload",
            then=lambda: copy.note_sent(param),
            for_update=True,
        )
        return updated, uploaded

    def prepare(self) -> None:
        """Start what must arrive before the update can run, if there is room for it now."""
        if self.staging is not None:
            self.buffer = self.staging.take_ahead()
            if self.buffer is None:
                return
        self._bring()

    def begin(self) -> None:
        """The lane is at it: there is room."""
        if self.staging is not None and self.buffer is not None:
            self.staging.note_begun()
        elif self.staging is not None:
            self.buffer = self.staging.take()
        if not self.is_prepared:
            self._bring()

    def _bring(self) -> None:
        self.is_prepared = True
        if self.buffer is not None:
            self._download(self._gradient(), self.update.grad.detach())
        if self.copy is not None and self.edits.has(self.copy):
            self._download(self.copy.home, self.update.param.detach())
        if self.walk is not None:
            self.walk.read_ahead()

    def _gradient(self) -> Tensor:
        """What the CPU updates from."""
        grad = self.update.grad
        if self.buffer is None:
            return grad
        return shaped(self.buffer, grad.shape, layout_of(self.update.param), grad.dtype)

    def _download(self, home: Tensor, t: Tensor) -> None:
        ticket = self.lanes.submit(Lane.D2H, self.priority, home, t, self.after, label="download", for_update=True)
        self.arrivals.append(ticket)

    def run(self) -> None:
        """Update, when everything has arrived."""
        try:
            for ticket in (*self.after, *self.arrivals):
                ticket.synchronize()
            self._update()
        finally:
            if self.staging is not None and self.buffer is not None:
                buffer, self.buffer = self.buffer, None
                self.staging.give_back(buffer)

    def _update(self) -> None:
        u, grad, param, state = self.update, self._gradient(), self.update.param, self.update.state
        if not self.lanes.is_host:
            grad, state = host_view(grad), {n: t if n == STEP else host_view(t) for n, t in state.items()}
        if u.addend is not None:
            grad.add_(u.addend if self.lanes.is_host else host_view(u.addend))
        if u.scale is not None:
            grad.mul_(u.scale)
        if self.copy is not None:
            self.copy.is_current = False  # until the result has gone up
            param = host_view(self.copy.home)
        elif not self.lanes.is_host:
            param = host_view(param)
        apply_one(u, param, grad, state, self.walk, self.coefs)


def _at_home(t: Tensor, param: Tensor, tier: HostTier) -> bool:
    """Whether the CPU can update from ``t`` itself."""
    return tier.owns(t) and t.stride() == layout_of(param)
