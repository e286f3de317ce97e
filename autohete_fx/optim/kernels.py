"""The arithmetic of AdamW: two kernels, on tensors that stay where they are.

* **Full precision** (fp32 and fp64 parameters): ``torch.ops.aten._fused_adamw_``, the kernel of
  ``torch.optim.AdamW(fused=True)``, so results are bitwise its own wherever the tensors live.
* **Mixed** (bf16 and fp16 parameters): one pass over the memory. In: gradient, weight, fp32 master and moments. Out:
  weight, master and moments. 28 bytes a parameter, and 2 more because the old weight is read too. The reference is
  ``torch.optim.AdamW(fused=True)`` on the fp32 master with ``grad.float()``; from equal states one step differs from
  it by a few units in the last place of fp32, because the bias corrections are folded into other constants.

The mixed pass is traced once for (weight dtype, gradient dtype, device), with a symbolic length and with every
hyperparameter in a small tensor, and compiled by Inductor (`inductor`). On a CPU the C++ wrapper is asked for, which lets go
of the GIL.

**A weight that is no longer a nearest 16-bit value of its master has been edited by the user, and wins**, element by
element: its master is then read from the weight. Comparing the data is the only complete test: version counters miss
``param.data.mul_()``, and moving a parameter between tiers would trip them. What an edit loses is nothing; what it may
keep is master bits below the weight's precision, where the edited value is what the master rounds to.
"""

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autohete_fx.internals.small_kernels import LONGEST, Kernel, compile_kernel

_TILE = 1 << 18
"""Elements of a tile where eager arithmetic needs temporaries; a multiple of every vector length."""

_SMALL = 1 << 15
"""Up to this length one thread of a CPU does it all: waking the others takes as long."""

_ROW = 32
"""Beyond that a CPU takes two rows of so many elements at once. Vectors of 16-bit values are half as wide as fp32's, and Inductor
loads and stores them under a mask: a load close behind a store waits for it, which takes most of the time of one row at a time."""

_NUM_COEFFICIENTS = 7


def update_full_precision(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    group: Mapping[str, Any],
) -> None:
    """One step of ``torch.ops.aten._fused_adamw_`` on tensors of one dtype and device; increments ``steps``. No temporaries."""
    torch.ops.aten._foreach_add_.Scalar(steps, 1)
    update_at_step(params, grads, exp_avgs, exp_avg_sqs, steps, group)


def update_at_step(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    group: Mapping[str, Any],
) -> None:
    """`update_full_precision` where ``steps`` count this step already: tensors that are updated in pieces have one counter."""
    beta1, beta2 = group["betas"]
    lr = _learning_rate(group, params[0].device)
    # Left to itself PyTorch takes the overload of numbers for either, and waits for the device to read the tensor.
    kernel = torch.ops.aten._fused_adamw_.tensor_lr if isinstance(lr, Tensor) else torch.ops.aten._fused_adamw_.default
    kernel(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
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


def _learning_rate(group: Mapping[str, Any], device: torch.device) -> Any:
    """A tensor rate stays a tensor only on its own accelerator, where reading it would wait for the device."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and (device.type == "cpu" or lr.device.type == "cpu"):
        return float(lr)
    return lr.float() if isinstance(lr, Tensor) else lr  # the kernel reads no other dtype


def coefficients(group: Mapping[str, Any], step: float) -> tuple[float, ...]:
    """What ``_mixed`` needs of a group at a step (1 for the first), computed in double precision."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    root = math.sqrt(1.0 - beta2**step)
    return (
        -1.0 if group["maximize"] else 1.0,
        lr * group["weight_decay"],
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr * root / (1.0 - beta1**step),
        group["eps"] * root,
    )


def update_mixed(
    weight: Tensor, grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, coefs: Tensor
) -> None:
    """One mixed step, in place, on flat tensors of one length and device; ``coefs`` holds ``coefficients`` in fp32.

    ``weight`` and ``grad`` are 16-bit (the gradient may be fp32), the rest fp32.
    """
    length = weight.numel()
    if not length:
        return
    small = weight.device.type == "cpu" and length <= _SMALL
    kernel = _compiled_mixed(weight.dtype, grad.dtype, weight.device, small)
    # One element is a shape of its own for the tracer, and not worth a kernel.
    if kernel is None or length < 2:
        return _mixed_in_tiles(weight, grad, master, exp_avg, exp_avg_sq, coefs)
    tensors = (weight, grad, master, exp_avg, exp_avg_sq)
    if length <= LONGEST:
        kernel([*tensors, coefs])
        return
    # Equal slices, so that none is a single element.
    pieces = -(-length // LONGEST)
    for parts in zip(*(t.chunk(pieces) for t in tensors), strict=True):
        kernel([*parts, coefs])


def prepare_mixed(weight_dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> None:
    """Compile now what ``update_mixed`` will need, so that it cannot fail or warn half way through a step."""
    for small in (False, True) if device.type == "cpu" else (False,):
        _compiled_mixed(weight_dtype, grad_dtype, device, small)


def reconcile_master(weight: Tensor, master: Tensor) -> None:
    """Make the flat ``master`` agree with an edited ``weight``; bounded temporaries. No edit, no change."""
    for w, m in zip(weight.split(_TILE), master.split(_TILE), strict=True):
        m.copy_(_current(w, m))


def _current(weight: Tensor, master: Tensor) -> Tensor:
    """The exact value of every parameter: its master, or the weight itself where that has been edited.

    A weight ``w`` of p significant bits is a nearest value to its master ``m`` exactly where ``m - w`` vanishes when
    it is added to ``2**(24-p) * w`` in fp32: that sum has the spacing of 16-bit values around ``w``, on each side of
    a power of two its own. Arithmetic, because Inductor keeps 16-bit values in fp32 (a comparison with the rounded
    master would compare the master itself) and does not vectorise bit casts. ``(2**(24-p) - 1) * w`` is exact, and
    infinities and NaN compare unequal, so such weights win. So do bf16 weights below the normal range (1.2e-38).
    """
    w = weight.float()
    if weight.dtype == torch.bfloat16:
        edit = (w * 65535.0 + master) - w * 65536.0
    else:
        # fp16 is spaced evenly below its normal range, and weights do lie there; 0.75 has that spacing in fp32.
        base = torch.where(w.abs() <= 2.0**-14, 0.75, w * 8191.0)
        edit = (base + master) - (base + w)
    return torch.where(edit == 0.0, master, w)


def _mixed(
    weight: Tensor, grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, coefs: Tensor
) -> tuple[()]:
    """The mixed pass as traced; as few operations as the arithmetic allows, for it is not far from compute bound."""
    sign, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, eps = coefs.unbind()
    g = grad.float()
    current = _current(weight, master)
    first = exp_avg + one_minus_beta1 * (sign * g - exp_avg)
    second = beta2 * exp_avg_sq + one_minus_beta2 * g * g
    updated = current - decay * current - step_size * first / (second.sqrt() + eps)
    weight.copy_(updated)
    master.copy_(updated)
    exp_avg.copy_(first)
    exp_avg_sq.copy_(second)
    return ()


def _mixed_in_tiles(
    weight: Tensor, grad: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, coefs: Tensor
) -> None:
    """The same in eager operations, with temporaries of a few tiles."""
    for w, g, m, a, v in zip(*(t.split(_TILE) for t in (weight, grad, master, exp_avg, exp_avg_sq)), strict=True):
        _mixed(w, g, m, a, v, coefs)


def _mixed_pair(*tensors: Tensor) -> tuple[()]:
    """Two mixed passes, given by pairs of tensors and the coefficients."""
    *pairs, coefs = tensors
    for weight, grad, master, exp_avg, exp_avg_sq in (pairs[0::2], pairs[1::2]):
        _mixed(weight, grad, master, exp_avg, exp_avg_sq, coefs)
    return ()


def _in_pairs(pair: Kernel, single: Kernel) -> Kernel:
    """A kernel of flat tensors: ``pair`` takes pairs of rows, and ``single`` what is left, which is never one element."""

    def run(tensors: list[Tensor]) -> None:
        *flat, coefs = tensors
        left = flat[0].numel() % (2 * _ROW)
        paired = flat[0].numel() - (left if left != 1 else left + 2 * _ROW)
        if paired > 0:
            pair([*(row for t in flat for row in t[:paired].view(-1, 2, _ROW).unbind(1)), coefs])
        if left:
            single([*(t[max(0, paired) :] for t in flat), coefs])

    return run


@functools.cache
def _compiled_mixed(
    weight_dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device, small: bool
) -> Kernel | None:
    """The mixed pass by Inductor; None, with a warning, where Inductor cannot compile (no C++ compiler, say)."""
    single = None
    if device.type == "cpu" and not small:
        single = _compiled_mixed(weight_dtype, grad_dtype, device, True)
        if single is None:
            return None  # which has been said
    try:
        # PyTorch's own deprecations; where a user made warnings errors, they would read as "cannot compile" here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel = _compile_mixed((weight_dtype, grad_dtype), device, small)
            if single is not None:
                kernel = _in_pairs(kernel, single)
            _verify(kernel, (weight_dtype, grad_dtype), device)
            return kernel
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


def _compile_mixed(dtypes: Sequence[torch.dtype], device: torch.device, small: bool) -> Kernel:
    compile_ = partial(compile_kernel, device=device, fixed=[(_NUM_COEFFICIENTS, torch.float32)])
    dtypes = (*dtypes, *[torch.float32] * 3)
    if device.type != "cpu":
        return compile_(_mixed, dtypes)
    # Contracted multiply-adds are fewer operations, and what the fused kernel of torch does.
    settings: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}
    if small:
        return compile_(_mixed, dtypes, settings=settings | {"cpp.threads": 1})
    # Threads are asked for at run time, so torch.set_num_threads is honoured without compiling again.
    settings |= {"cpp_wrapper": True, "cpp.dynamic_threads": True}
    return compile_(_mixed_pair, [dtype for dtype in dtypes for _ in range(2)], row=(_ROW, 2 * _ROW), settings=settings)


def _verify(kernel: Kernel, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """Compare a kernel with the eager operations, edited weights included, before any parameter is trusted to it."""
    weight_dtype, grad_dtype = dtypes
    generator = torch.Generator("cpu").manual_seed(0)
    master, grad, exp_avg, exp_avg_sq = torch.randn(4, 1003, generator=generator, dtype=torch.float32, device="cpu")
    weight = master.to(weight_dtype)
    weight[::5] *= 1.5
    given = [weight, grad.to(grad_dtype), master, exp_avg, exp_avg_sq.square()]
    group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
    coefs = torch.tensor(coefficients(group, 2.0), dtype=torch.float32, device=device)
    expected, found = ([t.clone().to(device) for t in given] for _ in range(2))
    _mixed_in_tiles(expected[0], expected[1], expected[2], expected[3], expected[4], coefs)
    kernel([*found, coefs])
    for name, e, f in zip(("weight", "grad", "master", "exp_avg", "exp_avg_sq"), expected, found, strict=True):
        tolerance = torch.finfo(e.dtype).eps
        if not torch.allclose(f.float(), e.float(), rtol=4 * tolerance, atol=tolerance):
            raise AssertionError(f"the compiled update disagrees with eager in {name}")
