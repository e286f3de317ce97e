"""Clipping by the norm of all gradients, as part of a step.

In: the gradients of a step, the norms of those that backward has taken (`autohete_fx.runtime.pending.norms`), and the norm that
they may have together. Out: that norm, and what to multiply each gradient by. The arithmetic is
`torch.nn.utils.clip_grad_norm_`'s. Norms that are missing are taken where the gradients are. The host takes those of gradients
in homes and multiplies them as it updates; the device does its own. Where all norms are of one processor, results are bitwise
those of PyTorch. Else norms of single gradients were summed in another order, and differ in the last digits.

*Why backward takes norms.* They are needed before the first update, and while the CPU reads all gradients for them nothing else
runs. For 16-bit gradients that takes 0.15 of the time of the updates themselves (one core, 16 M parameters, within one run). In
the README's 13B plan that is 0.3 s, where updates on the host take 2.0 s of a step of 3.9 s. A device whose memory does 1.5
TB/s would read all its 26 GB of gradients in 17 ms, each beside its copy.

*Why updates wait for the last norm*, and do not start on the guess that the clip will not bite. A wrong guess must be taken
back bit by bit, and AdamW's update cannot be inverted in floating point. Copies of master, moments and weight cost 1.45 times
the update itself (same run), in every step and on the lane to be relieved. Work that takes 2.45 times as long hides under a
whole step only where updates take less than 0.4 of one. About a third hides under the next forward anyway. Two sets of states
in turn would copy nothing, but double the largest part of host memory. Every clip that bites would do all updates, and all
copies of parameters to the device, twice. Nor is there a moment before ``step()`` to start at. Small gradients stay on the
device, and the last of their norms is known when backward returns.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autohete_fx.internals.tensors import group_by_device_and_dtype
from autohete_fx.runtime.pending.norms import norms_of
from autohete_fx.runtime.tiers.host import host_view, is_home


def total_norm(grads: Sequence[Tensor], known: Sequence[Tensor | None]) -> Tensor:
    """The 2-norm of all gradients as if they were one vector, on the device of the first; zero for none.

    Args:
        known: of each gradient its own norm, where that is known.
    """
    if not grads:
        return torch.tensor(0.0)
    by_host = [norm is None and is_home(grad) for grad, norm in zip(grads, known, strict=True)]
    if any(there and grad.device.type != "cpu" for grad, there in zip(grads, by_host, strict=True)):
        # The CPU reads what copies of the current stream have brought.
        torch.accelerator.current_stream(grads[0].device).synchronize()
    tensors = [host_view(grad) if there else grad for grad, there in zip(grads, by_host, strict=True)]
    norms: list[Tensor] = []  # in the order that PyTorch adds them up in
    listed: list[Tensor | None] = list(tensors)
    for [_], places in group_by_device_and_dtype([listed], with_indices=True).values():
        missing = iter(norms_of([tensors[at] for at in places if known[at] is None]))
        norms += [next(missing) if (norm := known[at]) is None else norm for at in places]
    device = grads[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), 2.0)


def factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of that norm; at most 1."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def scale(grads: Iterable[Tensor], by: Tensor) -> None:
    """Multiply gradients in place, on their device."""
    for grad in grads:
        grad.mul_(by.to(grad.device))
