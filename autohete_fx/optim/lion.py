"""``Lion``: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), whose updates are signs of a moment.

With momentum ``m``, gradient ``g`` and parameter ``p``, in the parameter's fp32 or fp64, or in fp32 on the master of a 16-bit one::

    p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
    m = beta2 * m + (1 - beta2) * g

A rounding can turn a sign, and so a whole step. A CPU therefore takes no product and sum in one rounding: results are bitwise those
of these operations one by one.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from autohete_fx.optim.arguments import check_at_least_0, checked_betas
from autohete_fx.optim.base import PlannedOptimizer
from autohete_fx.optim.rule import Group, Rule


def _checked(group: Group) -> dict[str, Any]:
    check_at_least_0(group, ("lr", "weight_decay"))
    return {"betas": checked_betas(group["betas"])}


def _foreign(group: Group) -> str | None:
    other = [name for name in ("eps", "amsgrad", "momentum") if name in group]
    return f"has {other}, which Lion does not know; expected Lion's: make it with Lion.state_dict()" if other else None


def _coefficients(group: Group, step: float) -> tuple[float, ...]:
    del step  # no bias is corrected
    beta1, beta2 = group["betas"]
    lr, sign = float(group["lr"]), -1.0 if group["maximize"] else 1.0
    return 1.0 - lr * group["weight_decay"], lr, beta1, sign * (1.0 - beta1), beta2, sign * (1.0 - beta2)


def _advance(
    value: Tensor, grad: Tensor, moments: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    kept, lr, beta1, to_beta1, beta2, to_beta2 = coefficients
    (exp_avg,) = moments
    direction = torch.sign(beta1 * exp_avg + to_beta1 * grad)
    return value * kept - lr * direction, (beta2 * exp_avg + to_beta2 * grad,)


LION = Rule(
    name="Lion",
    moments=("exp_avg",),
    hyperparameters=(("lr", 0.01), ("betas", (0.9, 0.99)), ("weight_decay", 0.1), ("maximize", False)),
    checked=_checked,
    coefficients=_coefficients,
    advance=_advance,
    foreign=_foreign,
)


class Lion(PlannedOptimizer):
    """Lion (arXiv 2302.06675), with its states and its update on the device, on the host or on disk, as the plan says.

    It has one state of the parameter's size, the momentum ``exp_avg``: fp32, or fp64 for fp64 parameters. Parameters in bf16
    and fp16 have an fp32 ``master`` besides. With learning rate ``lr``::

        p = p * (1 - lr * weight_decay) - lr * sign(beta1 * exp_avg + (1 - beta1) * grad)
        exp_avg = beta2 * exp_avg + (1 - beta2) * grad

    On a CPU results are bitwise those of these operations one by one, wherever states and parameters live. An accelerator rounds as
    its compiler likes. `autohete_fx.optim.base.PlannedOptimizer` says what ``step()`` takes in memory, what ``overlap`` allows,
    and what an edit of a parameter does.

    Attributes:
        grad_norm: the norm of all gradients before the last step clipped them, a tensor without dimensions; None where no
            step has.

    Args:
        params: parameters, named parameters, or groups, as for ``torch.optim``.
        lr: learning rate, the size of every element's step; a one-element tensor is allowed. The paper takes a third to a tenth of
            AdamW's.
        betas: what the step takes of the momentum, and what the momentum keeps of itself.
        weight_decay: decoupled weight decay.
        maximize: ascend instead.
        overlap: ``"step"``, ``"backward"``, or None: updates on the host are done when ``step()`` returns.
        max_grad_norm: in ``step()``, clip all gradients by their total norm first, as ``torch.nn.utils.clip_grad_norm_`` does.
            The result is bitwise so where one processor takes all norms, else within the rounding of norms. None: do not.

    Raises:
        OptimizerStateError: a hyperparameter out of range, a parameter to train whose dtype is none of float32, float64, bfloat16,
            float16.
    """

    rule = LION

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        overlap: str | None = "step",
        max_grad_norm: float | None = None,
    ) -> None:
        hyperparameters = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, hyperparameters, overlap=overlap, max_grad_norm=max_grad_norm)
