"""The arithmetic of one update, where its tensors are.

In: updates whose parameter, gradient and states one processor can address. Out: parameter, moments, master and step counter
updated in place, by the kernel of the parameter's dtype (`kernels`). Device temporaries: at most a copy of one oddly laid out
parameter and gradient at a time. States on disk pass through RAM, a window of a parameter at a time.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autohete_fx.optim.kernels import coefficients, update_full_precision, update_mixed
from autohete_fx.optim.state import (
    MASTER,
    MOMENTS,
    STEP,
    Place,
    State,
    flat,
    laid_out,
    layout_of,
    needs_master,
    state_names,
)
from autohete_fx.runtime.disk import Walk


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter's part of a step.

    Attributes:
        addend: what the update lane adds to the gradient before it reads it, in a home; None: nothing.
        scale: what it then multiplies the gradient by; None: nothing.
    """

    param: Tensor
    grad: Tensor
    state: State
    group: dict[str, Any]
    place: Place
    addend: Tensor | None = None
    scale: Tensor | None = None


class Coefficients:
    """The coefficient tensors of one step: one for all parameters of a group that have taken equally many steps."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, float, torch.device], Tensor] = {}

    def at(self, group: dict[str, Any], step: float, device: torch.device) -> Tensor:
        key = (id(group), step, device)
        if key not in self._tensors:
            values = torch.tensor(coefficients(group, step), dtype=torch.float32, device="cpu")
            # Out of memory that is not pinned PyTorch would wait until the device has come to the copy.
            on_cpu = device.type == "cpu"
            self._tensors[key] = values if on_cpu else values.pin_memory().to(device, non_blocking=True)
        return self._tensors[key]


def apply_in_place(updates: Iterable[Update]) -> None:
    """Do all updates, those of plain parameters in one call of a kernel."""
    coefs = Coefficients()
    on_disk: list[tuple[Update, Walk]] = []
    batches: defaultdict[tuple[int, torch.device, torch.dtype], list[Update]] = defaultdict(list)
    for u in updates:
        if (walk := walk_of(u)) is not None:
            on_disk.append((u, walk))
        elif needs_master(u.param):
            _apply_mixed(u, u.param, u.grad, u.state, coefs)
        elif _plain(u.param, u.grad):
            batches[id(u.group), u.param.device, u.param.dtype].append(u)
        else:
            _apply_full([u])
    for batch in batches.values():
        _apply_full(batch)
    for (u, walk), upcoming in itertools.zip_longest(on_disk, (walk for _, walk in on_disk[1:])):
        walk.read_ahead()
        if upcoming is not None:
            upcoming.read_ahead()
        _apply_in_windows(u, walk, u.param, u.grad, coefs)


def apply_one(u: Update, param: Tensor, grad: Tensor, state: State, walk: Walk | None, coefs: Coefficients) -> None:
    """Do an update on what stands for its parameter, its gradient and its states here."""
    if walk is not None:
        _apply_in_windows(u, walk, param, grad, coefs)
    elif needs_master(u.param):
        _apply_mixed(u, param, grad, state, coefs)
    else:
        _apply_full([Update(param, grad, state, u.group, u.place)])


def _plain(param: Tensor, grad: Tensor) -> bool:
    """Whether the kernels can walk both in memory order."""
    return grad.dtype == param.dtype and grad.stride() == param.stride() == layout_of(param)


def _apply_full(batch: Sequence[Update]) -> None:
    """One call of the fused kernel; a batch of more than one is all plain."""
    params, grads = [u.param for u in batch], [u.grad for u in batch]
    if len(batch) == 1 and not _plain(params[0], grads[0]):
        params, grads = [laid_out(params[0], params[0])], [laid_out(grads[0].to(params[0].dtype), params[0])]
    exp_avgs, exp_avg_sqs, steps = ([u.state[name] for u in batch] for name in (*MOMENTS, STEP))
    update_full_precision(params, grads, exp_avgs, exp_avg_sqs, steps, batch[0].group)
    if params[0] is not batch[0].param:
        batch[0].param.copy_(params[0])


def walk_of(u: Update) -> Walk | None:
    """Over the states of an update; None where they are not on disk."""
    if u.place.disk is None:
        return None
    return Walk(u.place.disk, u.place.lanes, [flat(u.state[name]) for name in state_names(u.param)])


def _apply_in_windows(u: Update, walk: Walk, param: Tensor, grad: Tensor, coefs: Coefficients) -> None:
    """Update one window of the elements after another, each as if it were a parameter."""
    weight, gradient = laid_out(param, u.param), laid_out(grad, u.param)
    if not needs_master(u.param):
        gradient = gradient.to(weight.dtype)
    weights, gradients = flat(weight), flat(gradient)
    step = u.state[STEP]

    def update(window: slice, states: list[Tensor]) -> None:
        state = {STEP: step.clone(), **dict(zip(state_names(u.param), states, strict=True))}
        part = Update(weights[window], gradients[window], state, u.group, u.place)
        if needs_master(u.param):
            _apply_mixed(part, part.param, part.grad, state, coefs)
        else:
            _apply_full([part])

    walk.run(update)
    step += 1
    if weight is not param:
        param.copy_(weight)


def _apply_mixed(u: Update, param: Tensor, grad: Tensor, state: State, coefs: Coefficients) -> None:
    weight, gradient = laid_out(param, u.param), laid_out(grad, u.param)
    state[STEP] += 1
    master, exp_avg, exp_avg_sq = (flat(state[name]) for name in (MASTER, *MOMENTS))
    at_step = coefs.at(u.group, float(state[STEP]), param.device)
    update_mixed(flat(weight), flat(gradient), master, exp_avg, exp_avg_sq, at_step)
    if weight is not param:
        param.copy_(weight)
