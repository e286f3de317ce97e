"""The arguments of optimizers: in come a user's values, out come ours, or an OptimizerStateError that says what was expected."""

import math
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


def refuse(values: Mapping[str, Any], names: Collection[str], optimizer: str) -> None:
    """Refuse what was asked of the implementation, by name, where it is none of these. ``optimizer`` is the name of it."""
    for name in names:
        if values.get(name):
            raise OptimizerStateError(
                f"{name}=True is not supported by autohete_fx.{optimizer}; leave it out, or use torch.optim.{optimizer}, whose "
                "states the plan then counts on the device"
            )


def check_at_least_0(values: Mapping[str, Any], names: Collection[str]) -> None:
    """Numbers that are not negative, by name; ``lr`` may be a tensor of one element."""
    lr = values.get("lr")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptimizerStateError(f"lr is a tensor of {lr.numel()} elements; expected one element")
    for name in names:
        if not (_is_number(values[name]) and values[name] >= 0.0):  # NaN too
            raise OptimizerStateError(f"{name} is {values[name]!r}; expected a number of at least 0")


def check_number(values: Mapping[str, Any], name: str) -> None:
    """A number of either sign, by name."""
    if not (_is_number(values[name]) and abs(float(values[name])) < math.inf):  # NaN too
        raise OptimizerStateError(f"{name} is {values[name]!r}; expected a number")


def checked_betas(betas: Any) -> tuple[float, float]:
    """Two decay rates."""
    if not (isinstance(betas, Collection) and len(betas) == 2 and all(map(_is_number, betas))):
        raise OptimizerStateError(f"betas is {betas!r}; expected two numbers, each at least 0 and less than 1")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise OptimizerStateError(f"betas[{index}] is {float(beta)}; expected at least 0 and less than 1")
    first, second = betas
    return float(first), float(second)


def _is_number(value: object) -> bool:
    """Not a string, which configuration files make of ``1e-3``."""
    return isinstance(value, Real | Tensor)
