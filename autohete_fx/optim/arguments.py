"""The arguments of `AdamW`: in come a user's values, out come ours, or an OptimizerStateError that says what was expected."""

from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from autohete_fx.errors import OptimizerStateError
from autohete_fx.ir import Overlap


def overlap_named(overlap: str | None) -> Overlap:
    """The argument ``overlap``."""
    if overlap not in (None, "step", "backward"):
        raise OptimizerStateError(f"overlap is {overlap!r}; expected 'step', 'backward' or None")
    return Overlap.NONE if overlap is None else Overlap(overlap)


def checked_norm(norm: float | None) -> float | None:
    """The argument ``max_grad_norm``."""
    if norm is not None and not (_is_number(norm) and norm > 0.0):  # NaN too
        raise OptimizerStateError(f"max_grad_norm is {norm!r}; expected a number above 0, or None")
    return None if norm is None else float(norm)


def as_floats(betas: tuple[float | Tensor, float | Tensor]) -> tuple[float, float]:
    """Betas that were checked."""
    return float(betas[0]), float(betas[1])


def check_hyperparameters(values: Mapping[str, Any]) -> None:
    """Those of a group, with what was asked of the implementation."""
    for name in ("amsgrad", "capturable", "differentiable"):
        if values.get(name):
            raise OptimizerStateError(
                f"{name}=True is not supported by autohete_fx.AdamW; leave it out, or use torch.optim.AdamW, whose "
                "states the plan then counts on the device"
            )
    lr = values["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptimizerStateError(f"lr is a tensor of {lr.numel()} elements; expected one element")
    for name in ("lr", "eps", "weight_decay"):
        if not (_is_number(values[name]) and values[name] >= 0.0):  # NaN too
            raise OptimizerStateError(f"{name} is {values[name]!r}; expected a number of at least 0")
    betas = values["betas"]
    if not (isinstance(betas, Collection) and len(betas) == 2 and all(map(_is_number, betas))):
        raise OptimizerStateError(f"betas is {betas!r}; expected two numbers, each at least 0 and less than 1")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise OptimizerStateError(f"betas[{index}] is {float(beta)}; expected at least 0 and less than 1")


def _is_number(value: object) -> bool:
    """Not a string, which configuration files make of ``1e-3``."""
    return isinstance(value, Real | Tensor)
