"""``AdamW``: the parameters of ``torch.optim.AdamW``, and its arithmetic.

* Full precision (fp32 and fp64 parameters): ``torch.ops.aten._fused_adamw_``, the kernel of ``torch.optim.AdamW(fused=True)``, so
  results are bitwise its own wherever the tensors live.
* Mixed (bf16 and fp16 parameters): the reference is ``torch.optim.AdamW(fused=True)`` on the fp32 master with ``grad.float()``.
  From equal states one step differs from it by a few units in the last place of fp32. The bias corrections are folded into
  other constants.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autohete_fx.optim.arguments import check_at_least_0, checked_betas, refuse
from autohete_fx.optim.base import PlannedOptimizer
from autohete_fx.optim.kernels import update
from autohete_fx.optim.rule import Group, Rule


def _checked(group: Group) -> dict[str, Any]:
    refuse(group, ("amsgrad", "capturable", "differentiable"), "AdamW")
    check_at_least_0(group, ("lr", "eps", "weight_decay"))
    return {"betas": checked_betas(group["betas"])}


def _foreign(group: Group) -> str | None:
    if group.get("amsgrad"):
        return "has amsgrad=True, which is not supported: use torch.optim.AdamW"
    if not group.get("decoupled_weight_decay", True):
        return (
            "is of torch.optim.Adam (decoupled_weight_decay=False), whose weight decay is another; expected AdamW's:"
            " make it with AdamW.state_dict()"
        )
    return None


def coefficients_with(group: Group, step: float, decay: float) -> tuple[float, ...]:
    """Adam's and AdamW's, with a factor of the weight. Computed in double precision; the bias corrections are folded into the last
    two."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    root = math.sqrt(1.0 - beta2**step)
    return (
        -1.0 if group["maximize"] else 1.0,
        decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr * root / (1.0 - beta1**step),
        group["eps"] * root,
    )


def _coefficients(group: Group, step: float) -> tuple[float, ...]:
    return coefficients_with(group, step, float(group["lr"]) * group["weight_decay"])


def _advance(
    value: Tensor, grad: Tensor, moments: Sequence[Tensor], coefficients: Sequence[Tensor]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    sign, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, eps = coefficients
    exp_avg, exp_avg_sq = moments
    first = exp_avg + one_minus_beta1 * (sign * grad - exp_avg)
    second = beta2 * exp_avg_sq + one_minus_beta2 * grad * grad
    return value - decay * value - step_size * first / (second.sqrt() + eps), (first, second)


def _fused(
    params: list[Tensor], grads: list[Tensor], moments: Sequence[list[Tensor]], steps: list[Tensor], group: Group
) -> None:
    run_fused(torch.ops.aten._fused_adamw_, params, grads, moments, steps, group)


def run_fused(
    kernel: Any,
    params: list[Tensor],
    grads: list[Tensor],
    moments: Sequence[list[Tensor]],
    steps: list[Tensor],
    group: Group,
) -> None:
    """PyTorch's fused Adam or AdamW, as the operator given."""
    beta1, beta2 = group["betas"]
    lr = learning_rate(group, params[0].device)
    # Left to itself PyTorch takes the overload of numbers for either, and waits for the device to read the tensor.
    overload = kernel.tensor_lr if isinstance(lr, Tensor) else kernel.default
    overload(
        params,
        grads,
        *moments,
        [],
        steps,
        amsgrad=False,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def learning_rate(group: Group, device: torch.device) -> Any:
    """A tensor rate stays a tensor only on its own accelerator, where reading it would wait for the device."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and (device.type == "cpu" or lr.device.type == "cpu"):
        return float(lr)
    return lr.float() if isinstance(lr, Tensor) else lr  # the kernel reads no other dtype


ADAMW = Rule(
    name="AdamW",
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
    # What torch.optim.AdamW keeps in its groups to choose an implementation. Ours computes as its fused one does, and saying so
    # lets a loaded torch.optim.AdamW go on with the same arithmetic.
    implementation=(
        ("amsgrad", False),
        ("foreach", None),
        ("capturable", False),
        ("differentiable", False),
        ("fused", True),
        ("decoupled_weight_decay", True),
    ),
    foreign=_foreign,
)


def mixed_step(weight: Tensor, grad: Tensor, states: Sequence[Tensor]) -> Callable[[], None]:
    """A step of a flat 16-bit parameter with its master and moments, by the kernel that does it in training, to be timed."""
    coefs = torch.tensor(ADAMW.coefficients(dict(ADAMW.hyperparameters), 2.0), device=weight.device)
    return partial(update, ADAMW, weight, grad, states, coefs)


class AdamW(PlannedOptimizer):
    """``torch.optim.AdamW``, with states and update on the device or on the host, as the plan says.

    Results, wherever states and parameters live:

    * fp32 and fp64 parameters: bitwise those of ``torch.optim.AdamW(fused=True)`` on the processor that does the update
      (the CPU for host states, the device for streamed ones).
    * bf16 and fp16 parameters: fp32 moments and an fp32 master weight, named ``master``. They are within fp32 rounding of
      ``torch.optim.AdamW(fused=True)`` on the master with ``grad.float()``; the parameter is the master, rounded.

    `autohete_fx.optim.base.PlannedOptimizer` says what ``step()`` takes in memory, what ``overlap`` allows, and what an edit of a
    parameter does.

    Attributes:
        grad_norm: the norm of all gradients before the last step clipped them, a tensor without dimensions; None where no
            step has.

    Args:
        params: parameters, named parameters, or groups, as for ``torch.optim.AdamW``.
        lr: learning rate; a one-element tensor is allowed.
        betas: decay rates of the moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        amsgrad: must be False.
        maximize: ascend instead.
        foreach, fused: accepted for compatibility; they choose an implementation, and there is only this one.
        overlap: ``"step"``, ``"backward"``, or None: updates on the host are done when ``step()`` returns.
        max_grad_norm: in ``step()``, clip all gradients by their total norm first, as ``torch.nn.utils.clip_grad_norm_`` does.
            The result is bitwise so where one processor takes all norms, else within the rounding of norms. None: do not.
        capturable, differentiable: must be False.

    Raises:
        OptimizerStateError: a hyperparameter out of range, an option that is not supported, a parameter to train whose dtype is
            none of float32, float64, bfloat16, float16.
    """

    rule = ADAMW

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        overlap: str | None = "step",
        max_grad_norm: float | None = None,
    ) -> None:
        del foreach, fused
        hyperparameters = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        asked = {"amsgrad": amsgrad, "capturable": capturable, "differentiable": differentiable}
        super().__init__(params, {**hyperparameters, **asked}, overlap=overlap, max_grad_norm=max_grad_norm)
