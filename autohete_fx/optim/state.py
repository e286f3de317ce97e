"""The states of one parameter: which there are, how they lie, and where.

In: a parameter, its optimizer's rule, its state dictionary (``torch.optim``'s ``optimizer.state[param]``) and its placement.
Out: the same dictionary with every state present, in fp32 (fp64 for fp64 parameters). States are laid out as the parameter is,
in the place that the placement asks for. States move without loss whenever the placement has changed, one tensor at a time.

A host state is a home of the tier. It presents itself on the compute device, so ``state_dict()``, ``torch.save`` and eager code
read it as any other tensor. A state on disk is a tensor on the CPU (`autohete_fx.runtime.disk`), which they read too. It is
made, moved and updated window by window, so that little of it is in RAM.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autohete_fx.errors import OptimizerStateError
from autohete_fx.graph.ops import contiguous_stride, is_dense
from autohete_fx.ir import Optimizer
from autohete_fx.optim.kernels import HALF, comparing_bytes, reconcile_master
from autohete_fx.optim.rule import Rule
from autohete_fx.runtime.disk import DiskTier, Walk
from autohete_fx.runtime.held import held
from autohete_fx.runtime.lanes.lanes import Lanes, lanes_of
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import placement_of
from autohete_fx.runtime.shard.parts import dtensor_part_of, part_of
from autohete_fx.runtime.shard.state import to_shard
from autohete_fx.runtime.shard.tensor_parallel import is_part
from autohete_fx.runtime.shard.unreadable import Unreadable
from autohete_fx.runtime.tiers.host import HostTier, is_home

MASTER = "master"
MOMENTUM = "momentum_buffer"
STEP = "step"

_MEASURED_MOMENTS = 2
"""AdamW's, whose updates `machine.measure` times."""

_FULL = (torch.float32, torch.float64)

State = dict[str, Any]


def check_param(param: Tensor) -> None:
    """Raise OptimizerStateError for a parameter that there is no exact update for."""
    if isinstance(param, Unreadable):
        raise OptimizerStateError(
            f"a parameter of shape {tuple(param.shape)} was given, as an attribute of a sharded module answers for it; expected the"
            " parameter itself, of which this rank holds a shard. Take it from model.named_parameters()"
        )
    if param.dtype not in _FULL + HALF:
        raise OptimizerStateError(
            f"a parameter of shape {tuple(param.shape)} has dtype {param.dtype}; expected float32, float64, bfloat16 "
            "or float16. Give parameters of other dtypes (complex ones as torch.view_as_real) to another optimizer"
        )


def check_whole(rule: Rule, param: Tensor) -> None:
    """Raise OptimizerStateError for a parameter that is to be updated whole and is not whole here."""
    if rule.is_elementwise:
        return
    part, mine = part_of(param), held(param)
    if is_part(param):
        size = tuple(param.shape) if part is None else part.full_size
        raise OptimizerStateError(
            f"a parameter of shape {size}, of which this rank holds {tuple(mine.shape)}, was given to {rule.name}, which updates"
            " matrices whole; expected a parameter that ranks hold no shards of: train with autohete_fx.AdamW, or on one device"
        )


def check_grad(param: Tensor, grad: Tensor) -> None:
    """Raise OptimizerStateError for a gradient that no update can use exactly."""
    if grad.layout is not torch.strided:
        raise OptimizerStateError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is sparse ({grad.layout}); expected a dense "
            "one. Build the embedding with sparse=False, or give this parameter to torch.optim.SparseAdam"
        )
    if not grad.is_floating_point():
        raise OptimizerStateError(
            f"the gradient of a parameter of shape {tuple(param.shape)} has dtype {grad.dtype}; expected a real "
            "floating point one. Give this parameter to another optimizer"
        )


def needs_master(param: Tensor) -> bool:
    """Whether the parameter is 16-bit, so that its exact value lives in an fp32 master."""
    return param.dtype in HALF


def state_dtype(param: Tensor) -> torch.dtype:
    """The dtype of the parameter's moments and master."""
    return torch.float32 if needs_master(param) else param.dtype


def state_names(rule: Rule, param: Tensor) -> tuple[str, ...]:
    """The states as large as the parameter, in the order in which kernels take them."""
    return (MASTER, *rule.moments) if needs_master(param) else rule.moments


def state_bytes(rule: Rule, param: Tensor) -> int:
    """Bytes of the states that the parameter will have: moments, and master for a 16-bit one."""
    return len(state_names(rule, param)) * state_dtype(param).itemsize * param.numel()


def update_share(rule: Rule, param: Tensor) -> float:
    """Bytes that an update of the parameter reads and writes, over those of an AdamW update, whose rates are measured."""
    return _updated_bytes(param, len(rule.moments)) / _updated_bytes(param, _MEASURED_MOMENTS)


def _updated_bytes(param: Tensor, num_moments: int) -> int:
    """The gradient and a 16-bit weight are read, all else is read and written."""
    states = num_moments + needs_master(param)
    return 2 * states * state_dtype(param).itemsize + 3 * param.element_size()


def update_workspace_bytes(rule: Rule, param: Tensor) -> int:
    """Bytes that an update needs beside parameter, gradient and states where the parameter is updated whole.

    They are the rule's own workspace, and for a 16-bit parameter that of comparing it with its master.
    """
    own = rule.workspace_bytes(param)
    return own + (comparing_bytes(param.numel()) if own and needs_master(param) else 0)


def uses_fused(rule: Rule, param: Tensor) -> bool:
    """Whether PyTorch's own kernel updates the parameter. Else coefficients are needed, and a kernel of ours."""
    return rule.fused is not None and not needs_master(param)


def uses_mixed(rule: Rule, param: Tensor) -> bool:
    """Whether our kernel for 16-bit parameters with fp32 masters updates the parameter (`kernels`)."""
    return rule.is_elementwise and needs_master(param)


def layout_of(param: Tensor) -> tuple[int, ...]:
    """Strides of the parameter's states: its own where it is dense, so that all may be walked in memory order."""
    if param.is_contiguous() or is_dense(param.shape, param.stride()):
        return param.stride()
    return contiguous_stride(param.shape)


@dataclass(frozen=True, slots=True)
class StatePlacement:
    """Where a parameter's states belong: homes of ``disk``, else of ``tier``, or memory of ``device`` where there is neither.

    ``tier`` is also where gradients and copies of parameters that the host updates are; states on disk need it for those.

    ``block`` is the index of the parameter's block, smaller where the next forward needs it sooner; -1 where unknown.
    ``updates`` is where updates of host states run without the caller; None where they never do.
    ``is_streamed`` says that the device updates states of the tier, to which they are copied for that.
    """

    device: torch.device
    tier: HostTier | None = None
    block: int = -1
    updates: Updates | None = None
    is_streamed: bool = False
    disk: DiskTier | None = None

    def empty(self, param: Tensor) -> Tensor:
        """An uninitialised state of ``param`` here. Raises HostMemoryError."""
        dtype, tier = state_dtype(param), self.disk or self.tier
        if tier is not None:
            return tier.empty_strided(param.shape, layout_of(param), dtype)
        return torch.empty_strided(param.shape, layout_of(param), dtype=dtype, device=self.device)

    def fill(self, state: Tensor, values: Tensor | None) -> Tensor:
        """Set a state that lies here to the values of a tensor of its shape, or to zero, and return it."""
        if self.disk is None:
            return state.zero_() if values is None else state.copy_(values)
        walk = Walk(self.disk, self.lanes, [flat(state)], reads=False)
        if values is None:
            walk.run(lambda _, parts: parts[0].zero_())
        else:
            source = flat(laid_out(values, state))
            walk.run(lambda window, parts: parts[0].copy_(source[window]))
        return state

    @property
    def lanes(self) -> Lanes:
        """The model's lanes, or its own."""
        return self.updates.lanes if self.updates is not None else lanes_of(self.device)

    def holds(self, t: Tensor) -> bool:
        """Whether ``t`` lies here."""
        if self.disk is not None:
            return self.disk.owns(t)
        return t.device == self.device and (not is_home(t) if self.tier is None else self.tier.owns(t))

    def step_device(self, rule: Rule, param: Tensor) -> torch.device:
        """The step counter's: an accelerator's fused kernel reads it there, everything else on the CPU."""
        is_on_device = self.tier is None or self.is_streamed
        reads_it = is_on_device and rule.reads_step_on_device and uses_fused(rule, param)
        return self.device if reads_it else torch.device("cpu")


def state_placement_of(param: Tensor) -> StatePlacement:
    """Where the states of ``param`` belong now. A user who moved it off the tier's device gets states beside it."""
    placement = placement_of(param)
    if placement is None:
        return StatePlacement(param.device)
    leaves = placement.optimizer is not Optimizer.DEVICE and placement.tier.device == param.device
    return StatePlacement(
        param.device,
        placement.tier if leaves else None,
        placement.block,
        placement.updates,
        is_streamed=leaves and placement.optimizer is Optimizer.STREAMED,
        disk=placement.disk if leaves and placement.optimizer is Optimizer.DISK else None,
    )


def settle(rule: Rule, param: Tensor, state: State, placement: StatePlacement) -> None:
    """Bring the states that exist to ``placement``, values kept. Drops a master that the parameter no longer needs.

    Raises:
        HostMemoryError: the tier has no room; states that have moved stay moved, nothing is lost.
        OptimizerStateError: the parameter has another shape than its states.
    """
    if not needs_master(param):
        state.pop(MASTER, None)
    for name in state_names(rule, param):
        t = state.get(name)
        if t is None or _is_as_wanted(t, param, placement):
            continue
        if t.shape != param.shape and (part := dtensor_part_of(param)) is not None and t.shape == part.full_size:
            t = to_shard(t, part)  # it is older than the shard
        if t.shape != param.shape:
            raise OptimizerStateError(
                f"a parameter has shape {tuple(param.shape)} and its state {name!r} has {tuple(t.shape)}: it was "
                "resized after a step. Build a new optimizer, or clear optimizer.state[param]"
            )
        state[name] = placement.fill(placement.empty(param), t)
    step = state.get(STEP)
    if step is not None and step.device != placement.step_device(rule, param):
        state[STEP] = step.to(placement.step_device(rule, param))


def is_settled(rule: Rule, param: Tensor, state: State, placement: StatePlacement) -> bool:
    """Whether `settle` and `complete` have nothing to do."""
    step, states = state.get(STEP), [state.get(name) for name in state_names(rule, param)]
    is_there = (
        step is not None
        and step.device == placement.step_device(rule, param)
        and needs_master(param) == (MASTER in state)
    )
    return is_there and all(t is not None and _is_as_wanted(t, param, placement) for t in states)


def _is_as_wanted(t: Tensor, param: Tensor, placement: StatePlacement) -> bool:
    is_alike = t.shape == param.shape and t.stride() == layout_of(param) and t.dtype == state_dtype(param)
    return is_alike and placement.holds(t)


def complete(rule: Rule, param: Tensor, state: State, placement: StatePlacement) -> bool:
    """Add the states that are missing: zero moments and step, and the parameter's own value as master. New moments begin with their
    first step, also those of a parameter that has stepped without.

    They are allocated before any is added, so HostMemoryError leaves the state as it was.

    Returns:
        Whether a parameter that has stepped got states that it did without.
    """
    missing = [name for name in state_names(rule, param) if name not in state]
    grows = STEP in state and bool(missing)
    made = {name: placement.empty(param) for name in missing}
    for name, t in made.items():
        placement.fill(t, param if name == MASTER else None)
    if STEP not in state or not made.keys() <= {MASTER}:
        made = {STEP: torch.zeros((), dtype=torch.float32, device=placement.step_device(rule, param)), **made}
    state.update(made)
    return grows


def reconcile(param: Tensor, master: Tensor, placement: StatePlacement) -> None:
    """Make a 16-bit parameter's master, which lies at ``placement``, agree with edits of the parameter."""
    weight, home = flat(laid_out(param, master)), flat(master)
    if placement.disk is None:
        reconcile_master(weight, home)
    else:
        walk = Walk(placement.disk, placement.lanes, [home])
        walk.run(lambda window, parts: reconcile_master(weight[window].to(home.device), parts[0]))


def laid_out(t: Tensor, param: Tensor) -> Tensor:
    """``t`` itself, or a copy with the layout of the parameter's states where it has another."""
    if t.stride() == layout_of(param):
        return t
    return torch.empty_strided(t.shape, layout_of(param), dtype=t.dtype, device=t.device).copy_(t)


def flat(t: Tensor) -> Tensor:
    """The elements of a dense tensor in memory order, one-dimensional, over the same memory."""
    return t.detach().as_strided((t.numel(),), (1,), t.storage_offset())
