"""Optimizers of ``torch.optim`` that become ours, where that trains the same.

In: an optimizer that its constructor has just finished. Out: the same object with our class, or the reason why it stays. An
optimizer that was made with ``fused=True`` computes by the kernels that ours computes by, bit by bit. One for which PyTorch chooses
the implementation may round an update otherwise, as two of PyTorch's own implementations do. One that names another implementation
stays, and so do options and dtypes for which ours trains otherwise.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from autohete_fx.errors import AutoHeteError, OptimizerStateError
from autohete_fx.optim import SGD, Adam, AdamW
from autohete_fx.optim.base import PlannedOptimizer
from autohete_fx.optim.owners import forget_owner

OURS: dict[type[torch.optim.Optimizer], type[PlannedOptimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: Adam,
    torch.optim.SGD: SGD,
}

_WHOLE = (torch.float32, torch.float64)
_SAME_KERNELS = "its fused kernels, bit by bit"
_OTHER_ROUNDING = (
    "PyTorch's fused kernels, where PyTorch would have chosen an implementation: an update may differ in its last bits"
)


class Kept(Exception):
    """The optimizer stays; the text says why."""


def replace(optimizer: torch.optim.Optimizer, *, only_same_kernels: bool) -> str:
    """Give the optimizer our class, its parameters and hyperparameters as they are. Returns how exact that is.

    Args:
        only_same_kernels: keep an optimizer for which PyTorch chooses the implementation, too.

    Raises:
        Kept: it does not train the same, and nothing has changed.
    """
    ours = OURS[type(optimizer)]
    _check(optimizer)
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if only_same_kernels and not is_fused:
        raise Kept("it was not made with fused=True, whose kernels alone are those of ours, bit by bit")
    theirs, before = type(optimizer), dict(vars(optimizer))
    names = inspect.signature(ours.__init__).parameters
    how = {name: value for name, value in optimizer.defaults.items() if name in names}
    groups = [_with_names(group) for group in optimizer.param_groups]
    vars(optimizer).clear()  # of what says that gradient scalers need not unscale, too
    optimizer.__class__ = ours
    try:
        ours.__init__(optimizer, groups, **how)  # type: ignore[misc]
    except AutoHeteError as error:
        vars(optimizer).clear()
        vars(optimizer).update(before)
        optimizer.__class__ = theirs
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            forget_owner(param, optimizer)  # of groups before the one that was refused
        raise Kept(str(error)) from error
    _check_dtypes_at_steps(optimizer)
    return _SAME_KERNELS if is_fused else _OTHER_ROUNDING


def _check(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise Kept("it has states already")
    for group in optimizer.param_groups:
        for name in ("amsgrad", "capturable", "differentiable", "foreach"):
            if group.get(name):
                raise Kept(f"it was made with {name}=True, which ours does not have")
        if group.get("fused") is False:
            raise Kept("it was made with fused=False, which asks for another implementation than that of ours")
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            raise Kept("its betas are tensors, which ours would read once")
        for param in group["params"]:
            if type(param) not in (Tensor, torch.nn.Parameter):
                raise Kept(f"a parameter is a {type(param).__name__}, which no plan moves")
            if param.requires_grad and param.dtype not in _WHOLE:
                raise Kept(
                    f"a parameter is {str(param.dtype).removeprefix('torch.')}, for which ours holds fp32 states and an fp32 master"
                    " weight, and so trains otherwise"
                )


def _with_names(group: dict[str, Any]) -> dict[str, Any]:
    """The group as a constructor takes it, with the names of parameters beside them where they have some."""
    names = group.get("param_names")
    if names is None:
        return group
    return {**group, "params": list(zip(names, group["params"], strict=True))}


def _check_dtypes_at_steps(optimizer: torch.optim.Optimizer) -> None:
    def check(stepping: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        for param in (p for group in stepping.param_groups for p in group["params"]):
            if param.requires_grad and param.dtype not in _WHOLE:
                raise OptimizerStateError(
                    f"a parameter of {param.dtype} came to torch.optim.{type(stepping).__name__} after it was made, and"
                    " `autohete run` had replaced that. Expected were parameters of 32 or 64 bits, for which both train the same."
                    " Cast the model before its optimizer is made, or make the optimizer with fused=False, which is not replaced"
                )

    optimizer.register_step_pre_hook(check)
