"""Clipping by the norm of all gradients, as part of a step.

In: the updates of a step, and the norm that their gradients may have together. Out: that norm, and what to multiply each gradient
by. The arithmetic is `torch.nn.utils.clip_grad_norm_`'s, on gradients where they are: the host takes the norms of those that
live in homes and multiplies them as it updates, the device does its own. Where all are on one processor results are bitwise
those of PyTorch; else norms of single gradients were summed in another order, and differ in the last digits.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autohete_fx.runtime.tiers import host_view, is_home


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients as if they were one vector, on the device of the first; zero for none."""
    if any(is_home(grad) and grad.device.type != "cpu" for grad in grads):
        # The CPU reads what copies of the current stream have brought.
        torch.accelerator.current_stream(grads[0].device).synchronize()
    norm = torch.nn.utils.get_total_norm([host_view(grad) if is_home(grad) else grad for grad in grads])
    return norm.to(grads[0].device) if grads else norm


def factor(norm: Tensor, max_norm: float) -> Tensor:
    """What to multiply gradients of that norm by; at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale(grads: Iterable[Tensor], by: Tensor) -> None:
    """Multiply gradients in place, on their device."""
    for grad in grads:
        grad.mul_(by.to(grad.device))
