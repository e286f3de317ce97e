"""The differences between optimizers: their states, hyperparameters and arithmetic.

A `Rule` is a value. All else is the same for all optimizers. `base` and `updates` say when and where updates run, `state` where
states lie. `kernels` pass over the memory once, and `loading` reads checkpoints. A further optimizer is a file with a rule and
a constructor, beside `adamw` and `lion`, and two lines that export it. An optimizer may have a rule for each group of
parameters (`base.PlannedOptimizer.rule_of_group`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Group = Mapping[str, Any]
"""Hyperparameters, as in ``torch.optim``'s ``param_groups``."""


class Advance(Protocol):
    """One step of a parameter, without a change of what it is given: the new value and the new moments.

    All tensors are flat, of any piece of a parameter, and of one dtype, fp32 or fp64. It is traced and compiled, so it must not
    read a value. Coefficients have no dimension.
    """

    def __call__(
        self, value: Tensor, grad: Tensor, moments: Sequence[Tensor], coefficients: Sequence[Tensor], /
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...


class Fused(Protocol):
    """PyTorch's own kernel, in place, over lists of tensors of one dtype and device. ``steps`` count this step already."""

    def __call__(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        moments: Sequence[list[Tensor]],
        steps: list[Tensor],
        group: Group,
        /,
    ) -> None: ...


class Whole(Protocol):
    """One step of a whole parameter in place, in eager operations, of a rule of which no element's update can be told alone.

    The value, or its master, and the moments are fp32 or fp64, of the parameter's shape and layout. The gradient has that shape
    and layout, too, but may have another dtype. The workspace is flat, of bytes, and where they are: nothing else of that size
    may be allocated.
    """

    def __call__(
        self, value: Tensor, grad: Tensor, moments: Sequence[Tensor], group: Group, workspace: Tensor, /
    ) -> None: ...


def _no_advance(
    value: Tensor, grad: Tensor, moments: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    raise AssertionError("the rule updates parameters whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An optimizer's own part.

    Attributes:
        name: of the optimizer, in messages.
        moments: names of the states as large as a parameter. A 16-bit parameter has an fp32 master weight besides.
        idle: names of further states, of other hyperparameters' rule, which are kept as they are until that one needs them.
        hyperparameters: names of those that an update computes with, and values that kernels are checked with.
        checked: hyperparameters of a user, defaults included, to those that must be changed into ours. Raises
            OptimizerStateError, which says what was expected.
        coefficients: hyperparameters and the step, 1 for the first, to the numbers that ``advance`` gets.
        advance: the arithmetic of an element-wise rule.
        may_contract: a CPU may take a product and a sum in one rounding. No where a last bit can turn a whole step, as a sign does:
            then compiled and eager operations agree bit by bit.
        fused: in the place of ``advance`` for fp32 and fp64 parameters; None where PyTorch has no such kernel.
        reads_step_on_device: ``fused`` reads how many steps were taken where the parameter is. Else, and for every other kernel,
            that is a number on the CPU.
        counts_steps: in dicts of ``torch.optim`` a parameter that has stepped says how often. Else that it has stepped is all that
            matters, and what such dicts tell.
        may_lack_moments: a parameter may have stepped without, with other hyperparameters, and then begins anew.
        whole: the arithmetic of a rule by which an element's update depends on others: a parameter is never cut, but updated whole,
            on one processor. There are no coefficients then.
        workspace_bytes: memory that ``whole`` needs for a parameter.
        product_flops: floating point operations of bf16 matrix products in an update of a parameter, given its group.
        implementation: further keys of groups, with our values, which no state dict changes.
        foreign: hyperparameters of a state dict to the end of a sentence about the group: why they are not this optimizer's and
            what to do. None stands where they may be.
    """

    name: str
    moments: tuple[str, ...]
    hyperparameters: tuple[tuple[str, Any], ...]
    checked: Callable[[Group], dict[str, Any]]
    coefficients: Callable[[Group, float], tuple[float, ...]] = lambda group, step: ()
    advance: Advance = _no_advance
    may_contract: bool = False
    fused: Fused | None = None
    reads_step_on_device: bool = False
    counts_steps: bool = True
    may_lack_moments: bool = False
    idle: tuple[str, ...] = ()
    whole: Whole | None = None
    workspace_bytes: Callable[[Tensor], int] = lambda param: 0
    product_flops: Callable[[Tensor, Group], float] = lambda param, group: 0.0
    implementation: tuple[tuple[str, Any], ...] = ()
    foreign: Callable[[Group], str | None] = lambda group: None

    @property
    def is_elementwise(self) -> bool:
        """An element's update depends on no other element."""
        return self.whole is None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the hyperparameters that an update computes with."""
        return tuple(name for name, _ in self.hyperparameters)
