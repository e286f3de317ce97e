"""``Adam``: the parameters of ``torch.optim.Adam``, and its arithmetic: Kingma and Ba, "Adam: A Method for Stochastic Optimization"
(arXiv 1412.6980). It is AdamW's but for the weight decay, which is a part of the gradient (L2), and so of the moments.

* Full precision (fp32 and fp64 parameters): ``torch.ops.aten._fused_adam_``, the kernel of ``torch.optim.Adam(fused=True)``, so
  results are bitwise its own wherever the tensors live.
* Mixed (bf16 and fp16 parameters): the reference is ``torch.optim.Adam(fused=True)`` on the fp32 master with ``grad.float()``.
  From equal states one step differs from it by a few units in the last place of fp32, as AdamW's does.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autohete_fx.errors import OptimizerStateError
from autohete_fx.optim.adamw import coefficients_with, run_fused
from autohete_fx.optim.arguments import check_at_least_0, checked_betas, refuse
from autohete_fx.optim.base import PlannedOptimizer
from autohete_fx.optim.rule import Group, Rule


def _checked(group: Group) -> dict[str, Any]:
    refuse(group, ("amsgrad", "capturable", "differentiable"), "Adam")
    if group.get("decoupled_weight_decay"):
        raise OptimizerStateError(
            "decoupled_weight_decay=True was given; expected False, Adam's own L2 weight decay: AdamW decouples, take"
            " autohete_fx.AdamW"
        )
    check_at_least_0(group, ("lr", "eps", "weight_decay"))
    return {"betas": checked_betas(group["betas"])}


def _foreign(group: Group) -> str | None:
    if group.get("amsgrad"):
        return "has amsgrad=True, which is not supported: use torch.optim.Adam"
    if group.get("decoupled_weight_decay"):
        return "is of AdamW (decoupled_weight_decay=True); expected Adam's: make it with Adam.state_dict()"
    return None


def _coefficients(group: Group, step: float) -> tuple[float, ...]:
    decay = float(group["weight_decay"])
    return coefficients_with(group, step, -decay if group["maximize"] else decay)


def _advance(
    value: Tensor, grad: Tensor, moments: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    sign, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, eps = coefficients
    exp_avg, exp_avg_sq = moments
    gradient = sign * (
        grad + decay * value
    )  # one product and one sum: there is one way to contract them, which is torch's
    first = exp_avg + one_minus_beta1 * (gradient - exp_avg)
    second = beta2 * exp_avg_sq + one_minus_beta2 * gradient * gradient
    return value - step_size * first / (second.sqrt() + eps), (first, second)


def _fused(
    params: list[Tensor], grads: list[Tensor], moments: Sequence[list[Tensor]], steps: list[Tensor], group: Group
) -> None:
    run_fused(torch.ops.aten._fused_adam_, params, grads, moments, steps, group)


ADAM = Rule(
    name="Adam",
    moments=("exp_avg", "exp_avg_sq"),
    hyperparameters=(
        ("lr", 0.01),
        ("betas", (0.9, 0.999)),
        ("eps", 1e-8),
        ("weight_decay", 0.1),
        ("maximize", False),
    ),
    checked=_checked,
    coefficients=_coefficients,
    advance=_advance,
    # Fewer operations, and what the fused kernel of torch does.
    may_contract=True,
    fused=_fused,
    reads_step_on_device=True,
    # What torch.optim.Adam keeps in its groups to choose an implementation; as for AdamW.
    implementation=(
        ("amsgrad", False),
        ("foreach", None),
        ("capturable", False),
        ("differentiable", False),
        ("fused", True),
        ("decoupled_weight_decay", False),
    ),
    foreign=_foreign,
)


class Adam(PlannedOptimizer):
    """``torch.optim.Adam``, with states and update on the device, on the host or on disk, as the plan says.

    With gradient ``g``, parameter ``p`` and step ``t``::

        g = g + weight_decay * p
        exp_avg = beta1 * exp_avg + (1 - beta1) * g
        exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g**2
        p = p - lr * (exp_avg / (1 - beta1**t)) / (sqrt(exp_avg_sq / (1 - beta2**t)) + eps)

    Results, wherever states and parameters live:

    * fp32 and fp64 parameters: bitwise those of ``torch.optim.Adam(fused=True)`` on the processor that does the update
      (the CPU for host states, the device for streamed ones).
    * bf16 and fp16 parameters: fp32 moments and an fp32 master weight, named ``master``. They are within fp32 rounding of
      ``torch.optim.Adam(fused=True)`` on the master with ``grad.float()``; the parameter is the master, rounded.

    `autohete_fx.optim.base.PlannedOptimizer` says what ``step()`` takes in memory, what ``overlap`` allows, and what an edit of a
    parameter does.

    Attributes:
        grad_norm: the norm of all gradients before the last step clipped them, a tensor without dimensions; None where no
            step has.

    Args:
        params: parameters, named parameters, or groups, as for ``torch.optim.Adam``.
        lr: learning rate; a one-element tensor is allowed.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: of the parameter, added to the gradient (L2). `autohete_fx.AdamW` decays parameters themselves.
        amsgrad: must be False.
        maximize: ascend instead.
        foreach, fused: accepted for compatibility; they choose an implementation, and there is only this one.
        overlap: ``"step"``, ``"backward"``, or None: updates on the host are done when ``step()`` returns.
        max_grad_norm: in ``step()``, clip all gradients by their total norm first, as ``torch.nn.utils.clip_grad_norm_`` does.
            The result is bitwise so where one processor takes all norms, else within the rounding of norms. None: do not.
        capturable, differentiable, decoupled_weight_decay: must be False.

    Raises:
        OptimizerStateError: a hyperparameter out of range, an option that is not supported, a parameter to train whose dtype is
            none of float32, float64, bfloat16, float16.
    """

    rule = ADAM

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        overlap: str | None = "step",
        max_grad_norm: float | None = None,
    ) -> None:
        del foreach, fused
        hyperparameters = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        asked = {
            "amsgrad": amsgrad,
            "capturable": capturable,
            "differentiable": differentiable,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, {**hyperparameters, **asked}, overlap=overlap, max_grad_norm=max_grad_norm)
