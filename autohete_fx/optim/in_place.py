"""The arithmetic of one update, where its tensors are.

In: updates whose parameter, gradient and states one processor can address. Out: parameter, moments, master and step counter
updated in place, by the kernel of the optimizer's rule and the parameter's dtype. Device temporaries: at most a copy of one
oddly laid out parameter and gradient at a time. The workspace of a rule that is not element-wise comes on top. States on disk
pass through RAM, a window of a parameter at a time, or all of it where the rule is not element-wise.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autohete_fx.optim.kernels import reconcile_master, update
from autohete_fx.optim.rule import Group, Rule
from autohete_fx.optim.state import (
    STEP,
    State,
    StatePlacement,
    flat,
    laid_out,
    layout_of,
    needs_master,
    state_dtype,
    state_names,
    uses_fused,
)
from autohete_fx.runtime.disk import Walk

_NONE: Mapping[torch.device, Tensor | None] = {}


@dataclass(frozen=True, slots=True)
class Update:
    """One parameter's part of a step.

    Attributes:
        rule: of its optimizer.
        addend: what the update lane adds to the gradient before it reads it, in a home; None: nothing.
        scale: what it then multiplies the gradient by; None: nothing.
    """

    rule: Rule
    param: Tensor
    grad: Tensor
    state: State
    group: dict[str, Any]
    placement: StatePlacement
    addend: Tensor | None = None
    scale: Tensor | None = None


class Coefficients:
    """The coefficient tensors of one step: one for all parameters of a group that have taken equally many steps."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, float, torch.dtype, torch.device], Tensor] = {}

    def at(self, u: Update, step: float, device: torch.device) -> Tensor:
        """Those of an update."""
        key = (id(u.group), step, state_dtype(u.param), device)
        if key not in self._tensors:
            values = torch.tensor(u.rule.coefficients(u.group, step), dtype=state_dtype(u.param), device="cpu")
            # Out of memory that is not pinned PyTorch would wait until the device has come to the copy.
            on_cpu = device.type == "cpu"
            self._tensors[key] = values if on_cpu else values.pin_memory().to(device, non_blocking=True)
        return self._tensors[key]


def workspace_of(updates: Iterable[Update], device: torch.device) -> Tensor | None:
    """Memory that updates of whole parameters need, one after the other; None where there are none.

    Raises torch.OutOfMemoryError.
    """
    most = max((u.rule.workspace_bytes(u.param) for u in updates if not u.rule.is_elementwise), default=0)
    return torch.empty(most, dtype=torch.uint8, device=device) if most else None


def apply_in_place(updates: Iterable[Update], workspaces: Mapping[torch.device, Tensor | None] = _NONE) -> None:
    """Do all updates, those of plain parameters with a fused kernel in one call of it. ``workspaces``, by device, were taken before
    anything changed."""
    coefs = Coefficients()
    on_disk: list[tuple[Update, Walk]] = []
    batches: defaultdict[tuple[int, torch.device, torch.dtype], list[Update]] = defaultdict(list)
    for u in updates:
        if (walk := walk_of(u)) is not None:
            on_disk.append((u, walk))
        elif not u.rule.is_elementwise:
            _apply_whole(u, u.param, u.grad, u.state, workspaces.get(u.param.device))
        elif not uses_fused(u.rule, u.param):
            _apply_own(u, u.param, u.grad, u.state, coefs)
        elif _plain(u.param, u.grad):
            batches[id(u.group), u.param.device, u.param.dtype].append(u)
        else:
            _apply_fused([u])
    for batch in batches.values():
        _apply_fused(batch)
    for (u, walk), upcoming in itertools.zip_longest(on_disk, (walk for _, walk in on_disk[1:])):
        walk.read_ahead()
        if upcoming is not None:
            upcoming.read_ahead()
        try:
            _apply_in_windows(u, walk, u.param, u.grad, coefs)
        except BaseException as error:  # some of its windows have changed, some have not
            if u.placement.updates is not None:
                u.placement.updates.add_failed(error, u.param, (u.state[name] for name in state_names(u.rule, u.param)))
            raise


def apply_one(u: Update, param: Tensor, grad: Tensor, state: State, walk: Walk | None, coefs: Coefficients) -> None:
    """Do an update on what stands for its parameter, its gradient and its states here."""
    if walk is not None:
        _apply_in_windows(u, walk, param, grad, coefs)
    elif not u.rule.is_elementwise:
        _apply_whole(u, param, grad, state)
    elif not uses_fused(u.rule, u.param):
        _apply_own(u, param, grad, state, coefs)
    else:
        _apply_fused([Update(u.rule, param, grad, state, u.group, u.placement)])


def _plain(param: Tensor, grad: Tensor) -> bool:
    """Whether the kernels can walk both in memory order."""
    return grad.dtype == param.dtype and grad.stride() == param.stride() == layout_of(param)


def _apply_fused(batch: Sequence[Update]) -> None:
    """One call of the fused kernel; a batch of more than one is all plain."""
    rule, params, grads = batch[0].rule, [u.param for u in batch], [u.grad for u in batch]
    assert rule.fused is not None
    if len(batch) == 1 and not _plain(params[0], grads[0]):
        params, grads = [laid_out(params[0], params[0])], [laid_out(grads[0].to(params[0].dtype), params[0])]
    steps, moments = [u.state[STEP] for u in batch], [[u.state[name] for u in batch] for name in rule.moments]
    torch.ops.aten._foreach_add_.Scalar(steps, 1)
    rule.fused(params, grads, moments, steps, batch[0].group)
    if params[0] is not batch[0].param:
        batch[0].param.copy_(params[0])


def walk_of(u: Update) -> Walk | None:
    """Over the states of an update; None where they are not on disk, or there are none."""
    if u.placement.disk is None:
        return None
    homes = [flat(u.state[name]) for name in state_names(u.rule, u.param)]
    return Walk(u.placement.disk, u.placement.lanes, homes, is_cut=u.rule.is_elementwise) if homes else None


def _apply_in_windows(u: Update, walk: Walk, param: Tensor, grad: Tensor, coefs: Coefficients) -> None:
    """Update one window of the elements after another, each as if it were a parameter."""
    weight, gradient = laid_out(param, u.param), laid_out(grad, u.param)
    if not needs_master(u.param):
        gradient = gradient.to(weight.dtype)
    weights, gradients = flat(weight), flat(gradient)
    step = u.state[STEP]

    def update_window(window: slice, states: list[Tensor]) -> None:
        pieces, values = (weights[window], gradients[window]), states
        if not u.rule.is_elementwise:
            pieces, values = (weight, gradient), [t.as_strided(weight.shape, weight.stride()) for t in states]
        state = {STEP: step.clone(), **dict(zip(state_names(u.rule, u.param), values, strict=True))}
        part = Update(u.rule, *pieces, state, u.group, u.placement)
        if not u.rule.is_elementwise:
            _apply_whole(part, part.param, part.grad, state)
        elif uses_fused(u.rule, u.param):
            _apply_fused([part])
        else:
            _apply_own(part, part.param, part.grad, state, coefs)

    walk.run(update_window)
    step += 1
    if weight is not param:
        param.copy_(weight)


def _apply_own(u: Update, param: Tensor, grad: Tensor, state: State, coefs: Coefficients) -> None:
    """By a kernel of ours."""
    weight, gradient = laid_out(param, u.param), laid_out(grad, u.param)
    if not needs_master(u.param):
        gradient = gradient.to(weight.dtype)
    state[STEP] += 1
    at_step = coefs.at(u, float(state[STEP]), param.device)
    tensors = [weight, gradient, *(state[name] for name in state_names(u.rule, u.param))]
    weights, gradients, *states = map(flat, tensors)
    update(u.rule, weights, gradients, states, at_step)
    if weight is not param:
        param.copy_(weight)


def _apply_whole(u: Update, param: Tensor, grad: Tensor, state: State, workspace: Tensor | None = None) -> None:
    """By a rule of whole parameters. It takes its workspace here where it was given none."""
    weight, gradient = laid_out(param, u.param), laid_out(grad, u.param)
    if workspace is None:
        workspace = torch.empty(u.rule.workspace_bytes(u.param), dtype=torch.uint8, device=param.device)
    state[STEP] += 1
    states = [state[name] for name in state_names(u.rule, u.param)]
    update_whole(u.rule, weight.detach(), gradient.detach(), states, u.group, workspace)
    if weight is not param:
        param.copy_(weight)


def update_whole(
    rule: Rule, weight: Tensor, grad: Tensor, states: Sequence[Tensor], group: Group, workspace: Tensor
) -> None:
    """One step of a whole parameter, in place, on tensors of its shape and layout. A 16-bit one has its master first of its states,
    which is made to agree with edits, updated, and rounded to the parameter."""
    assert rule.whole is not None
    if not needs_master(weight):
        rule.whole(weight, grad, states, group, workspace)
        return
    master, *moments = states
    reconcile_master(flat(weight), flat(master))
    rule.whole(master, grad, moments, group, workspace)
    weight.copy_(master)
