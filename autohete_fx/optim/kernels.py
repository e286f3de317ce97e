"""The arithmetic of AdamW: two kernels, on tensors that stay where they are.

* **Full precision** (fp32 and fp64 parameters): ``torch._fused_adamw_``, the kernel of ``torch.optim.AdamW(fused=True)``,
  so results are bitwise its own wherever the tensors live.
* **Mixed** (bf16 and fp16 parameters): one pass over the memory. In: gradient, weight, fp32 master and moments. Out: master,
  moments and weight, 28 bytes a parameter (the old weight is read too, 2 bytes more, from the line that the new one is
  written to). The reference is ``torch.optim.AdamW(fused=True)`` on the fp32 master with ``grad.float()``; from equal
  states one step differs from it by a few units in the last place of fp32, because Inductor neither contracts
  multiply-adds nor divides by the square root of the bias correction (it multiplies by the reciprocal).

The mixed pass is traced once a (weight dtype, gradient dtype, device type), with a symbolic length and with every
hyperparameter in a small tensor, and handed to Inductor directly: no Dynamo, so no guard, no recompilation and no
interference with the user's ``torch._dynamo`` state. On a CPU the C++ wrapper is asked for, which lets go of the GIL.

**A weight that is no longer the rounding of its master has been edited by the user, and wins**, element by element: the
master is then read from the weight. Comparing the data is the only exact test: version counters miss ``param.data.mul_()``,
and moving a parameter between tiers would trip them. Master bits below the weight's precision survive an edit that
rounds to the same weight.
"""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_TILE = 1 << 18
"""Elements of a tile where eager arithmetic needs temporaries; a multiple of every vector length."""

_CALL = 1 << 30
"""Most elements of one call of a compiled kernel: 32-bit indices suffice."""

_MixedKernel = Callable[[list[Tensor]], Any]


def update_full_precision(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    group: Mapping[str, Any],
) -> None:
    """One step of ``torch._fused_adamw_`` on tensors of one dtype and device; increments ``steps``. No temporaries."""
    beta1, beta2 = group["betas"]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        amsgrad=False,
        lr=_learning_rate(group, params[0].device),
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _learning_rate(group: Mapping[str, Any], device: torch.device) -> Any:
    """A tensor rate stays a tensor only on its own accelerator, where reading it would wait for the device."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and (device.type == "cpu" or lr.device.type == "cpu"):
        return float(lr)
    return lr.to(device) if isinstance(lr, Tensor) else lr


def coefficients(group: Mapping[str, Any], step: float) -> tuple[float, ...]:
    """What the mixed pass needs of a group at a step (1 for the first), computed in double precision."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    return (
        lr * group["weight_decay"],
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / (1.0 - beta1**step),
        1.0 / math.sqrt(1.0 - beta2**step),
        group["eps"],
        -1.0 if group["maximize"] else 1.0,
    )


def update_mixed(
    weight: Tensor, grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, coefs: Tensor
) -> None:
    """One mixed step, in place, on flat tensors of one length and device; ``coefs`` holds ``coefficients`` in fp32.

    ``weight`` and ``grad`` are 16-bit (the gradient may be fp32), the rest fp32.
    """
    kernel = _compiled_mixed(weight.dtype, grad.dtype, weight.device.type)
    length = weight.numel()
    # One element is a shape of its own for the tracer, and not worth a kernel.
    if kernel is None or length < 2:
        return _mixed_in_tiles(weight, grad, master, exp_avg, exp_avg_sq, coefs)
    tensors = (weight, grad, master, exp_avg, exp_avg_sq)
    if length <= _CALL:
        kernel([*tensors, coefs])
        return
    # Equal slices, so that none is a single element.
    pieces = -(-length // _CALL)
    for parts in zip(*(t.chunk(pieces) for t in tensors), strict=True):
        kernel([*parts, coefs])


def reconcile_master(weight: Tensor, master: Tensor) -> None:
    """Make the flat ``master`` agree with an edited ``weight``; bounded temporaries. Nothing changes without an edit."""
    for w, m in zip(weight.split(_TILE), master.split(_TILE), strict=True):
        m.copy_(torch.where(_is_rounded(m, w), m, w.float()))


def _is_rounded(master: Tensor, weight: Tensor) -> Tensor:
    """Where the weight is the rounding of its master. Bits are compared: Inductor computes 16-bit values in fp32, and
    would drop the rounding from a comparison of numbers."""
    return master.to(weight.dtype).view(torch.int16) == weight.view(torch.int16)


def _mixed(
    weight: Tensor, grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, coefs: Tensor
) -> tuple[()]:
    """The mixed pass as traced. The order of operations is that of ``torch._fused_adamw_``."""
    decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_root, eps, sign = coefs.unbind()
    g = grad.float() * sign
    current = torch.where(_is_rounded(master, weight), master, weight.float())
    decayed = current - decay * current
    first = exp_avg + one_minus_beta1 * (g - exp_avg)
    second = exp_avg_sq * beta2 + one_minus_beta2 * (g * g)
    updated = decayed - step_size * first / (second.sqrt() * inverse_root + eps)
    weight.copy_(updated)
    master.copy_(updated)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    return ()


def _mixed_in_tiles(
    weight: Tensor, grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, coefs: Tensor
) -> None:
    """The same in eager operations, with temporaries of a few tiles."""
    for parts in zip(*(t.split(_TILE) for t in (weight, grad, master, exp_avg, exp_avg_sq)), strict=True):
        _mixed(*parts, coefs)


@functools.cache
def _compiled_mixed(weight_dtype: torch.dtype, grad_dtype: torch.dtype, device_type: str) -> _MixedKernel | None:
    """The mixed pass by Inductor; None, with a warning, where Inductor cannot compile (no C++ compiler, say)."""
    try:
        # PyTorch's own deprecations; where a user made warnings errors, they would read as "cannot compile" here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compile_mixed((weight_dtype, grad_dtype), device_type)
    except Exception as error:  # the toolchain's errors share no base class
        warnings.warn(
            f"autohete_fx.AdamW could not compile its update for {weight_dtype} parameters "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}); "
            "it steps in eager operations: equally exact, several times slower. Install a working C++ compiler "
            "(or Triton, on a GPU) to have the fast one.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compile_mixed(dtypes: Sequence[torch.dtype], device_type: str) -> _MixedKernel:
    # Inductor is a slow import that fp32 training does not need.
    from torch._dynamo.source import ConstantSource
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    weight_dtype, grad_dtype = dtypes
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    weight = fake_mode.from_tensor(
        torch.empty(_TILE, dtype=weight_dtype, device=device_type),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
        source=ConstantSource("weight"),
    )
    with fake_mode:
        states = [torch.empty_like(weight, dtype=dtype) for dtype in (grad_dtype, *[torch.float32] * 3)]
        inputs = [weight, *states, torch.empty(8, device=device_type)]
        graph = make_fx(_mixed, decomposition_table=select_decomp_table())(*inputs)
    # The user's own Inductor passes are meant for the user's graphs.
    patches: dict[str, Any] = {"post_grad_custom_pre_pass": None, "post_grad_custom_post_pass": None}
    if device_type == "cpu":
        # Threads are asked for at run time, so torch.set_num_threads is honoured without compiling again.
        patches |= {"cpp_wrapper": True, "cpp.dynamic_threads": True}
    with fake_mode, V.set_fake_mode(fake_mode), tracing(TracingContext(fake_mode)), config.patch(patches):
        return compile_fx_inner(graph, inputs)  # pyright: ignore[reportReturnType]
