"""``SGD``: the parameters of ``torch.optim.SGD``, and its arithmetic (Sutskever et al., "On the importance of initialization and
momentum in deep learning", 2013).

There are two rules: with momentum, and without, where a full-precision parameter has no state but a count of its steps.

* Full precision (fp32 and fp64 parameters): ``torch.ops.aten._fused_sgd_``, the kernel of ``torch.optim.SGD(fused=True)``, so
  results are bitwise its own wherever the tensors live.
* Mixed (bf16 and fp16 parameters): the reference is ``torch.optim.SGD(fused=True)`` on the fp32 master with ``grad.float()``.
  From equal states one step differs from it by units in the last place of fp32, as compilers contract products and sums.

The first step of a momentum takes all of the gradient, whatever the dampening. It is that of a buffer of zeros, at which the
coefficient of the gradient is 1.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autohete_fx.errors import OptimizerStateError
from autohete_fx.optim.adamw import learning_rate
from autohete_fx.optim.arguments import check_at_least_0, check_number, refuse
from autohete_fx.optim.base import PlannedOptimizer
from autohete_fx.optim.rule import Group, Rule
from autohete_fx.optim.state import MOMENTUM


def _checked(group: Group) -> dict[str, Any]:
    refuse(group, ("differentiable",), "SGD")
    check_at_least_0(group, ("lr", "momentum", "weight_decay"))
    check_number(group, "dampening")
    if group["nesterov"] and (group["momentum"] == 0.0 or group["dampening"] != 0.0):
        raise OptimizerStateError(
            f"nesterov=True was given with momentum {group['momentum']} and dampening {group['dampening']}; expected a momentum"
            " above 0 and no dampening: set both, or leave nesterov out"
        )
    return {name: float(group[name]) for name in ("momentum", "dampening", "weight_decay")}


def _foreign(group: Group) -> str | None:
    other = [name for name in ("betas", "eps", "ns_steps") if name in group]
    return f"has {other}, which SGD does not know; expected SGD's: make it with SGD.state_dict()" if other else None


def _coefficients(group: Group, step: float) -> tuple[float, ...]:
    momentum = group["momentum"]
    of_gradient, of_momentum = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
    return (
        *_plain_coefficients(group, step),
        momentum,
        1.0 if step == 1.0 else 1.0 - group["dampening"],
        of_gradient,
        of_momentum,
    )


def _advance(
    value: Tensor, grad: Tensor, moments: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    sign, decay, lr, momentum, taken, of_gradient, of_momentum = coefficients
    gradient = sign * (
        grad + decay * value
    )  # one product and one sum: there is one way to contract them, which is torch's
    buffer = momentum * moments[0] + taken * gradient
    return value - lr * (of_gradient * gradient + of_momentum * buffer), (buffer,)


def _plain_coefficients(group: Group, step: float) -> tuple[float, ...]:
    del step
    sign = -1.0 if group["maximize"] else 1.0
    return sign, sign * group["weight_decay"], float(group["lr"])


def _plain_advance(
    value: Tensor, grad: Tensor, moments: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    del moments
    sign, decay, lr = coefficients
    return value - lr * (sign * (grad + decay * value)), ()


def _fused(
    params: list[Tensor], grads: list[Tensor], moments: Sequence[list[Tensor]], steps: list[Tensor], group: Group
) -> None:
    """Parameters that step first, and others: the kernel takes one kind at a time. Counts of steps are on the CPU."""
    is_first = [bool(moments) and float(step) == 1.0 for step in steps]
    lr = learning_rate(group, params[0].device)
    # Left to itself PyTorch takes the overload of numbers for either, and waits for the device to read the tensor.
    kernel = torch.ops.aten._fused_sgd_.tensor_lr if isinstance(lr, Tensor) else torch.ops.aten._fused_sgd_.default
    for first in sorted(set(is_first)):
        mine = [at for at, each in enumerate(is_first) if each == first]
        kernel(
            [params[at] for at in mine],
            [grads[at] for at in mine],
            [buffers[at] for buffers in moments for at in mine],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=lr,
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=first,
        )


SGD_WITH_MOMENTUM = Rule(
    name="SGD",
    moments=(MOMENTUM,),
    hyperparameters=(
        ("lr", 0.01),
        ("momentum", 0.9),
        ("dampening", 0.1),
        ("weight_decay", 0.1),
        ("nesterov", False),
        ("maximize", False),
    ),
    checked=_checked,
    coefficients=_coefficients,
    advance=_advance,
    # Fewer operations, and what the fused kernel of torch does.
    may_contract=True,
    fused=_fused,
    counts_steps=False,
    may_lack_moments=True,
    # What torch.optim.SGD keeps in its groups to choose an implementation; as for AdamW.
    implementation=(("foreach", None), ("differentiable", False), ("fused", True)),
    foreign=_foreign,
)

PLAIN_SGD = dataclasses.replace(
    SGD_WITH_MOMENTUM,
    moments=(),
    idle=(MOMENTUM,),  # torch.optim.SGD keeps it where a schedule takes the momentum away for a while
    hyperparameters=tuple(
        (n, 0.0 if n in ("momentum", "dampening") else v) for n, v in SGD_WITH_MOMENTUM.hyperparameters
    ),
    coefficients=_plain_coefficients,
    advance=_plain_advance,
)


class SGD(PlannedOptimizer):
    """``torch.optim.SGD``, with states and update on the device, on the host or on disk, as the plan says.

    With gradient ``g``, parameter ``p`` and, where there is momentum, the state ``momentum_buffer``::

        g = g + weight_decay * p
        momentum_buffer = momentum * momentum_buffer + (1 - dampening) * g     # the first time: momentum_buffer = g
        p = p - lr * (g + momentum * momentum_buffer if nesterov else momentum_buffer)

    and without momentum ``p = p - lr * g``. Full-precision parameters then have no state as large as they are, so that plans
    have only gradients and parameters to move.

    Results, wherever states and parameters live:

    * fp32 and fp64 parameters: bitwise those of ``torch.optim.SGD(fused=True)`` on the processor that does the update
      (the CPU for host states, the device for streamed ones).
    * bf16 and fp16 parameters: an fp32 master weight, named ``master``, and momentum in fp32. They are within fp32 rounding of
      ``torch.optim.SGD(fused=True)`` on the master with ``grad.float()``; the parameter is the master, rounded.

    `autohete_fx.optim.base.PlannedOptimizer` says what ``step()`` takes in memory, what ``overlap`` allows, and what an edit of a
    parameter does.

    Attributes:
        grad_norm: the norm of all gradients before the last step clipped them, a tensor without dimensions; None where no
            step has.

    Args:
        params: parameters, named parameters, or groups, as for ``torch.optim.SGD``.
        lr: learning rate; a one-element tensor is allowed.
        momentum: what the momentum keeps of itself.
        dampening: what the momentum does not take of a gradient, but for the first.
        weight_decay: of the parameter, added to the gradient (L2).
        nesterov: step by the gradient and the momentum that comes of it. Needs a momentum, and no dampening.
        maximize: ascend instead.
        foreach, fused: accepted for compatibility; they choose an implementation, and there is only this one.
        differentiable: must be False.
        overlap: ``"step"``, ``"backward"``, or None: updates on the host are done when ``step()`` returns.
        max_grad_norm: in ``step()``, clip all gradients by their total norm first, as ``torch.nn.utils.clip_grad_norm_`` does.
            The result is bitwise so where one processor takes all norms, else within the rounding of norms. None: do not.

    Raises:
        OptimizerStateError: a hyperparameter out of range, an option that is not supported, a parameter to train whose dtype is
            none of float32, float64, bfloat16, float16.
    """

    rule = SGD_WITH_MOMENTUM

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        overlap: str | None = "step",
        max_grad_norm: float | None = None,
    ) -> None:
        del foreach, fused
        hyperparameters = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        flags = {"nesterov": nesterov, "maximize": maximize, "differentiable": differentiable}
        super().__init__(params, {**hyperparameters, **flags}, overlap=overlap, max_grad_norm=max_grad_norm)

    def rule_of_group(self, group: Group) -> Rule:
        """Plain where the group's momentum is 0 now."""
        return SGD_WITH_MOMENTUM if group["momentum"] else PLAIN_SGD
