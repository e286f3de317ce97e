"""Updates that the device does of states that live on the host: they pass through it in pieces.

In: updates whose states are homes and whose gradients are on the device. Out: what the device's own update gives, bit by bit; the
states at home again. An element-wise rule works on each element alone, so any piece of a tensor can be updated by itself. Another
rule has one piece, which is all of the parameter::

    h2d      states of piece 1 | states of piece 2, kernel of piece 1 | ...       into memory of a few slots on the device
    kernel   after the copies, on their stream: the gradient is read where it is
    d2h                          states of piece 1 | states of piece 2 | ...      after which that part of it is free

A parameter that lives on the device is updated where it is. One that lives in host memory passes through with its states. A
kernel that reads and writes across the link would hold up the copies after it.

The device orders all of that: what fills a slot comes after what emptied it. The program gives the first pieces to the lanes.
Whatever another thread did in Python meanwhile, the program could not do. A stream takes so much work and then holds whoever gives
it more. The rest is therefore given by a thread, which waits for earlier pieces. Pieces are few and large, each one ticket up and
one down. Blocks come in the order in which the next forward needs them. The slots are taken before any parameter changes. Gradients
and slots are given back when somebody has waited for an update, or has seen that it is over.
"""

import contextlib
import dataclasses
import functools
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autohete_fx.ir import Lane, staging_bytes
from autohete_fx.ir.decision import MOST_STAGING_BYTES, STAGING_SLOTS
from autohete_fx.optim.in_place import Update, update_whole, workspace_of
from autohete_fx.optim.kernels import update
from autohete_fx.optim.state import (
    STEP,
    State,
    StatePlacement,
    flat,
    layout_of,
    needs_master,
    state_bytes,
    state_dtype,
    state_names,
    uses_fused,
)
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.ticket import Settled, Ticket
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.tiers.host import host_view, is_home

AHEAD = 1 << 20
"""Priorities less this come before those of all blocks."""
WHOLE_SLOTS = 2
"""Where a slot takes all states of a matrix: one is updated while the next comes."""
_PIECES_AHEAD = 64
"""Most that are given to the lanes and not seen to be done. Each is some ten entries in queues of a thousand."""
_GRAIN = 64
"""Elements of which pieces are multiples, so that a kernel's vectors are those that it takes of the whole tensor."""
_ALIGNMENT_BYTES = 512


def can_stream(u: Update) -> bool:
    """Whether there are states, and pieces of the parameter, its gradient and its states lie alike. Others are updated in their
    homes, which the device reads and writes across the link."""
    is_alike = u.param.stride() == u.grad.stride() == layout_of(u.param)
    return is_alike and state_bytes(u.rule, u.param) > 0 and (needs_master(u.param) or u.grad.dtype == u.param.dtype)


class Staging:
    """Memory that the updates of one step need beside parameters, gradients and states: it is allocated here or not at all.

    Device memory for pieces of states, a few slots of it. A piece is at most a slot, and lies where the one before it ends, or
    again at the begin. It also holds the workspace of updates of whole parameters, which kernels use one after the other. The
    coefficients of the step for kernels of ours are there, too, and come out of homes so that nothing waits for them.

    Attributes:
        last: what copied the piece before up: none is to come before it.
        coefs: by identity of the parameter, what a kernel of ours reads.
        workspace: None where no parameter is updated whole.

    Raises:
        torch.OutOfMemoryError, HostMemoryError: no room; nothing has changed.
    """

    def __init__(self, updates: Sequence[Update]) -> None:
        by_block: Counter[int] = Counter()
        for u in updates:
            by_block[u.placement.block] += state_bytes(u.rule, u.param)
        a_third = min(sum(map(staging_bytes, by_block.values())), MOST_STAGING_BYTES) // STAGING_SLOTS
        least = max(_least_bytes(u) for u in updates)
        self._slot_bytes = max(a_third // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES, _aligned(least))
        device = updates[0].param.device
        self.workspace = workspace_of(updates, device)
        count = STAGING_SLOTS if self.workspace is None else WHOLE_SLOTS
        self._memory = torch.empty(count * self._slot_bytes, dtype=torch.uint8, device=device)
        self._filled: list[tuple[range, Ticket]] = []  # which part of it is free when what is complete
        self._taken = range(0)
        self.last: tuple[Ticket, ...] = ()
        self._ahead: deque[Ticket] = deque()
        self._views: dict[tuple[int, int, tuple[torch.dtype, ...]], list[Tensor]] = {}
        self.coefs: dict[int, Tensor] = {}
        self._homes: list[Tensor] = []
        made: dict[tuple[int, float, torch.dtype], Tensor] = {}
        for u in updates:
            if u.rule.is_elementwise and not uses_fused(u.rule, u.param):
                key = id(u.group), float(u.state[STEP]) + 1, state_dtype(u.param)
                if key not in made:
                    made[key] = self._on_device(u.rule.coefficients(u.group, key[1]), key[2], u.placement)
                self.coefs[id(u.param)] = made[key]

    def _on_device(self, values: Sequence[float], dtype: torch.dtype, placement: StatePlacement) -> Tensor:
        assert placement.tier is not None
        home = placement.tier.empty_strided((len(values),), (1,), dtype)
        host_view(home).copy_(torch.tensor(values, dtype=dtype, device="cpu"))
        self._homes.append(home)
        return home.clone()

    def pieces(self, u: Update) -> list[slice]:
        """Where a parameter is cut, into pieces of about one size. None is shorter than a grain, unless the parameter is. A
        parameter that is updated whole is one piece."""
        if not u.rule.is_elementwise:
            return [slice(0, u.param.numel())]
        grains, most = -(-u.param.numel() // _GRAIN), self._slot_bytes // _bytes_per_element(u) // _GRAIN - 1
        length, size = u.param.numel(), -(-grains // -(-grains // most)) * _GRAIN
        begins = list(range(0, length, size))
        if len(begins) > 1 and length - begins[-1] < _GRAIN:
            begins.pop()
        return [slice(begin, end) for begin, end in zip(begins, [*begins[1:], length], strict=True)]

    def has_room_for(self, u: Update) -> bool:
        """Whether `take` waits for none of its pieces."""
        return len(self._ahead) + len(self.pieces(u)) <= _PIECES_AHEAD

    def take(self, u: Update, length: int) -> tuple[list[Tensor], Sequence[Ticket]]:
        """Memory for so many elements of each state of a parameter, and of itself where it lives on the host. With it comes what
        its next use must follow. Waits where too many pieces are ahead."""
        while len(self._ahead) >= _PIECES_AHEAD:
            with contextlib.suppress(Exception):  # told by the update that it belongs to
                self._ahead.popleft().synchronize()
        dtypes, aligned = _staged_dtypes(u), -(-length // _GRAIN) * _GRAIN  # compiled kernels copy what is not
        num_bytes, begin = aligned * _bytes_per_element(u), _aligned(self._taken.stop)
        begin = begin if begin + num_bytes <= len(self._memory) else 0
        self._taken = range(begin, begin + num_bytes)
        if (key := (begin, length, dtypes)) not in self._views:
            parts = self._memory[begin : begin + num_bytes].split([aligned * t.itemsize for t in dtypes])
            self._views[key] = [part.view(dtype)[:length] for part, dtype in zip(parts, dtypes, strict=True)]
        freed = [Settled(ticket) for part, ticket in self._filled if _overlap(part, self._taken)]
        self._filled = [(rest, ticket) for part, ticket in self._filled for rest in _without(part, self._taken)]
        return self._views[key], freed

    def give_back(self, freed_by: Ticket) -> None:
        """The pieces taken are free when this is complete."""
        self._ahead.append(freed_by)
        self._filled.append((self._taken, freed_by))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _without(one: range, other: range) -> list[range]:
    """What is left of one."""
    rests = range(one.start, min(one.stop, other.start)), range(max(one.start, other.stop), one.stop)
    return [rest for rest in rests if rest]


def _staged_dtypes(u: Update) -> tuple[torch.dtype, ...]:
    """Of what passes through the device: the parameter's states, and where it lives on the host itself."""
    return (state_dtype(u.param),) * len(state_names(u.rule, u.param)) + (u.param.dtype,) * is_home(u.param)


def _bytes_per_element(u: Update) -> int:
    return sum(dtype.itemsize for dtype in _staged_dtypes(u))


def _least_bytes(u: Update) -> int:
    """The smallest slot that an update can do with."""
    grains = 2 if u.rule.is_elementwise else -(-u.param.numel() // _GRAIN)
    return grains * _GRAIN * _bytes_per_element(u)


class Stream:
    """The streamed updates of a step on the same lanes. ``pending`` learns which are under way."""

    def __init__(self, lanes: Lanes, updates: Sequence[Update], staging: Staging, pending: Updates | None) -> None:
        self.lanes = lanes
        self.updates = updates
        self.staging = staging
        self.pending = pending

    def begin(self) -> None:
        """Count the step and take hyperparameters as they are. The updates follow what the device was given so far."""
        torch.ops.aten._foreach_add_.Scalar([u.state[STEP] for u in self.updates], 1)
        self.groups = {id(u.group): {**u.group, "lr": _as_it_is(u.group["lr"])} for u in self.updates}
        self.after = self.lanes.now()

    def give(self) -> list[Ticket]:
        """Give them to the lanes. Returns their tickets, for which the caller waits, where nobody learns of them."""
        tickets, here = [], True
        for u in sorted(self.updates, key=lambda each: each.placement.block):
            as_it_is = dataclasses.replace(u, state=dict(u.state), group=self.groups[id(u.group)])
            here = here and self.staging.has_room_for(u)
            issue = _Streamed(as_it_is, self.staging, self.lanes, self.after).issue
            ticket = self.lanes.stream(u.placement.block, issue, here=here)
            if self.pending is None:
                tickets.append(ticket)
            else:
                self.pending.add(ticket, u.param, _states(u.state), lent=(u.grad,))
            if ticket.error is not None and not isinstance(ticket.error, Exception):
                raise ticket.error  # an interrupt that came while this thread issued
        return tickets


def _states(state: State) -> list[Tensor]:
    return [t for t in state.values() if isinstance(t, Tensor)]


def _as_it_is(rate: Any) -> Any:
    """A learning rate now: a scheduler may change it before the update runs."""
    return rate.clone() if isinstance(rate, Tensor) else rate


class _Streamed:
    """One update as copies and kernels on the lanes."""

    def __init__(self, update: Update, staging: Staging, lanes: Lanes, after: Ticket) -> None:
        self.update = update
        self.staging = staging
        self.lanes = lanes
        self.after = after

    def issue(self, copies: list[Ticket]) -> None:
        """Give all pieces to the lanes, and put their tickets into a list."""
        u = self.update
        block, states = u.placement.block, [u.state[name] for name in state_names(u.rule, u.param)]
        homes = [host_view(flat(t)) for t in (*states, *([u.param] if is_home(u.param) else []))]
        param, grad = flat(u.param), flat(u.grad)
        copy = functools.partial(self.lanes.submit_all, label="states", streamed=True)
        for at in self.staging.pieces(u):
            parts = [home[at] for home in homes]
            staged, freed = self.staging.take(u, len(parts[0]))
            kernel = functools.partial(self.update_piece, param[at], grad[at], staged)
            after = self.after, *freed, *self.staging.last
            up = copy(Lane.H2D, block, tuple(zip(staged, parts, strict=True)), after, then=kernel)
            self.staging.last = (Settled(up),)
            # What goes home makes room for what comes up: it goes before activations that leave.
            down = copy(Lane.D2H, block - AHEAD, tuple(zip(parts, staged, strict=True)), (up,))
            self.staging.give_back(down)
            copies += (up, down)

    def update_piece(self, param: Tensor, grad: Tensor, staged: Sequence[Tensor]) -> None:
        """Behind the copies up, on their lane: no allocation, which would be of that stream."""
        u = self.update
        count = len(state_names(u.rule, u.param))
        states, passing = staged[:count], staged[count:]
        param = passing[0] if passing else param
        if not u.rule.is_elementwise:
            assert self.staging.workspace is not None
            param, grad, *states = (t.as_strided(u.param.shape, u.param.stride()) for t in (param, grad, *states))
            update_whole(u.rule, param, grad, states, u.group, self.staging.workspace)
            return
        if uses_fused(u.rule, u.param):
            assert u.rule.fused is not None
            u.rule.fused([param], [grad], [[state] for state in states], [u.state[STEP]], u.group)
        else:
            update(u.rule, param, grad, states, self.staging.coefs[id(u.param)])
