"""One step over many parameters: which tensors go to which kernel, and in which order.

In: one ``Update`` a parameter, with its states in place. Out: parameters, moments, masters and step counters updated in
place. Two ways:

* ``apply_in_place``: everything that one processor can address goes to the kernels as it is. That is all device
  states, and on a CPU device host states too: a home there is a memory-mapped file that the CPU reads and writes like
  any memory. No device temporaries, except for a parameter or gradient of an unusual layout or dtype: one copy of
  that one tensor at a time.
* ``apply_on_host``: host states of an accelerator are updated by the CPU on host views. Gradients and parameters that
  do not live in homes are copied through homes, a window at a time; downloads of a window run while the one before is
  computed. No device memory at all; host memory for staging is bounded by two windows. The parameter is read from the
  device at every step, never from a copy of the last one, so any edit of it is honoured.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autohete_fx.optim.kernels import coefficients, prepare_mixed, update_full_precision, update_mixed
from autohete_fx.optim.state import MASTER, MOMENTS, STEP, Place, State, flat, layout_of, needs_master
from autohete_fx.runtime.tiers import HostTier, host_view

_WINDOW_BYTES = 64 * 2**20
"""Bytes of parameters and gradients that are staged at a time; a window may exceed it by one parameter."""


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter's part of a step."""

    param: Tensor
    grad: Tensor
    state: State
    group: dict[str, Any]
    place: Place


def apply(updates: Sequence[Update]) -> None:
    """Do all updates. Blocks that the next forward needs first come first among those on the host."""
    for u in updates:
        if needs_master(u.param):
            processor = u.param.device if u.place.tier is None else torch.device("cpu")
            prepare_mixed(u.param.dtype, u.grad.dtype, processor)
    in_place = [u for u in updates if u.place.tier is None or _addressable(u.param)]
    on_host = [u for u in updates if u.place.tier is not None and not _addressable(u.param)]
    windows = list(_windows(sorted(on_host, key=lambda u: u.place.block)))
    _reserve(windows)
    apply_in_place(in_place)
    apply_on_host(windows)
    # No kernel tells autograd, which must refuse a backward through a parameter that it saved before the step.
    torch.autograd.graph.increment_version([u.param for u in updates])


def _addressable(t: Tensor) -> bool:
    """Whether the CPU can work on the tensor as it is."""
    return t.device.type == "cpu"


def apply_in_place(updates: Iterable[Update]) -> None:
    """Update where the tensors are. Device temporaries: at most a copy of one oddly laid out parameter and gradient."""
    coefs = _Coefficients()
    batches: defaultdict[tuple[int, torch.device, torch.dtype], list[Update]] = defaultdict(list)
    for u in updates:
        if needs_master(u.param):
            _apply_mixed(u, u.param, u.grad, u.state, coefs)
        elif _plain(u.param, u.grad):
            batches[id(u.group), u.param.device, u.param.dtype].append(u)
        else:
            _apply_full([u])
    for batch in batches.values():
        _apply_full(batch)


def apply_on_host(windows: Iterable[Sequence[Update]]) -> None:
    """Update on the CPU, through host views, in the order given."""
    coefs = _Coefficients()
    staged: list[_Staged] = []
    for window in windows:
        ahead = [_Staged(u) for u in window]
        arrived = _record(window[0].param.device)
        _finish(staged, coefs)
        _synchronize(arrived)
        staged = ahead
    _finish(staged, coefs)


class _Staged:
    """One update whose gradient and parameter are in, or on their way to, memory that the CPU can address."""

    def __init__(self, update: Update) -> None:
        tier = update.place.tier
        assert tier is not None
        self.update = update
        self.uploads = not _at_home(update.param, update.param, tier)
        self.param = _download(update.param.detach(), update.param, tier)
        self.grad = _download(update.grad.detach(), update.param, tier)

    def finish(self, coefs: "_Coefficients") -> None:
        u = self.update
        state = {name: t if name == STEP else host_view(t) for name, t in u.state.items()}
        if needs_master(u.param):
            _apply_mixed(u, self.param, self.grad, state, coefs)
        else:
            _apply_full([Update(self.param, self.grad, state, u.group, u.place)])
        if self.uploads:
            u.param.detach().copy_(self.param, non_blocking=True)


def _download(t: Tensor, param: Tensor, tier: HostTier) -> Tensor:
    """A CPU tensor with the values of ``t``, now or when the stream gets there, laid out as the parameter's states."""
    if _at_home(t, param, tier):
        return host_view(t)
    return host_view(tier.empty_strided(t.shape, layout_of(param), t.dtype)).copy_(t, non_blocking=True)


def _at_home(t: Tensor, param: Tensor, tier: HostTier) -> bool:
    """Whether the CPU can update from ``t`` itself."""
    return tier.owns(t) and t.stride() == layout_of(param)


def _finish(staged: Iterable[_Staged], coefs: "_Coefficients") -> None:
    for s in staged:
        s.finish(coefs)


def _windows(updates: Iterable[Update]) -> Iterator[list[Update]]:
    window: list[Update] = []
    used = 0
    for u in updates:
        window.append(u)
        used += u.param.nbytes + u.grad.nbytes
        if used >= _WINDOW_BYTES:
            yield window
            window, used = [], 0
    if window:
        yield window


def _reserve(windows: Sequence[Sequence[Update]]) -> None:
    """Take the host memory that staging will need while a refusal still finds every parameter unchanged."""
    needs: defaultdict[HostTier, list[int]] = defaultdict(list)
    for window in windows:
        for tier in {u.place.tier for u in window if u.place.tier is not None}:
            mine = [u for u in window if u.place.tier is tier]
            tensors = [(t, u.param) for u in mine for t in (u.param, u.grad)]
            needs[tier].append(sum(t.nbytes for t, param in tensors if not _at_home(t, param, tier)))
    for tier, sizes in needs.items():
        tier.reserve(tier.in_use_bytes + max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True)))


def _record(device: torch.device) -> torch.Event | None:
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _synchronize(event: torch.Event | None) -> None:
    if event is not None:
        event.synchronize()


class _Coefficients:
    """The coefficient tensors of one step: one for all parameters of a group that have taken equally many steps."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, float, torch.device], Tensor] = {}

    def at(self, group: dict[str, Any], step: float, device: torch.device) -> Tensor:
        key = (id(group), step, device)
        if key not in self._tensors:
            self._tensors[key] = torch.tensor(coefficients(group, step), dtype=torch.float32, device=device)
        return self._tensors[key]


def _plain(param: Tensor, grad: Tensor) -> bool:
    """Whether the kernels can walk both in memory order."""
    return grad.dtype == param.dtype and grad.stride() == param.stride() == layout_of(param)


def _apply_full(batch: Sequence[Update]) -> None:
    """One call of the fused kernel; a batch of more than one is all plain."""
    params, grads = [u.param for u in batch], [u.grad for u in batch]
    if len(batch) == 1 and not _plain(params[0], grads[0]):
        params, grads = [_laid_out(params[0], params[0])], [_laid_out(grads[0].to(params[0].dtype), params[0])]
    exp_avgs, exp_avg_sqs, steps = ([u.state[name] for u in batch] for name in (*MOMENTS, STEP))
    update_full_precision(params, grads, exp_avgs, exp_avg_sqs, steps, batch[0].group)
    if params[0] is not batch[0].param:
        batch[0].param.copy_(params[0])


def _apply_mixed(u: Update, param: Tensor, grad: Tensor, state: State, coefs: _Coefficients) -> None:
    weight, gradient = _laid_out(param, u.param), _laid_out(grad, u.param)
    state[STEP] += 1
    master, exp_avg, exp_avg_sq = (flat(state[name]) for name in (MASTER, *MOMENTS))
    at_step = coefs.at(u.group, float(state[STEP]), param.device)
    update_mixed(flat(weight), flat(gradient), master, exp_avg, exp_avg_sq, at_step)
    if weight is not param:
        param.copy_(weight)


def _laid_out(t: Tensor, param: Tensor) -> Tensor:
    """``t`` itself, or a copy with the layout of the parameter's states where it has another."""
    if t.stride() == layout_of(param):
        return t
    return torch.empty_strided(t.shape, layout_of(param), dtype=t.dtype, device=t.device).copy_(t)
