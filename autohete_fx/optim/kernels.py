"""One pass over the memory for each update: kernels for the arithmetic of any rule, on tensors that stay where they are.

* **Full precision** (fp32 and fp64 parameters). In: gradient, parameter, moments. Out: parameter and moments. A rule whose
  arithmetic PyTorch has as a fused kernel uses that one instead (`rule.Rule.fused`).
* **Mixed** (bf16 and fp16 parameters). In: gradient, weight, fp32 master and moments. Out: weight, master and moments. For
  AdamW that is 28 bytes a parameter, and 2 more because the old weight is read too.

An element-wise rule is traced once for (weight dtype, gradient dtype, device) and compiled by Inductor
(`internals.small_kernels`). The length is symbolic, and every hyperparameter is in a small tensor. On a CPU the C++ wrapper is
asked for, which lets go of the GIL. Rules of whole parameters are eager operations (`in_place.update_whole`).

**A weight that is no longer a nearest 16-bit value of its master has been edited by the user, and wins**, element by element.
Its master is then read from the weight. Comparing the data is the only complete test: version counters miss
``param.data.mul_()``, and moving a parameter between tiers would trip them. An edit loses nothing; it may keep master bits
below the weight's precision, where the edited value is what the master rounds to.
"""

import functools
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from autohete_fx.internals.small_kernels import LONGEST, Kernel, compile_kernel
from autohete_fx.optim.rule import Rule

HALF = (torch.bfloat16, torch.float16)
"""Dtypes of parameters whose exact value lives in an fp32 master."""

_TILE = 1 << 18
"""Elements of a tile where eager arithmetic needs temporaries; a multiple of every vector length."""

_TEMPORARIES = 5
"""In fp32, while a tile of weights is compared with its masters."""

_SMALL = 1 << 15
"""Up to this length one thread of a CPU does it all: waking the others takes as long."""

_ROW = 64
"""Kernels for a GPU take multiples of this by whole vectors. Other lengths are read and written an element at a time. Where the
parameter lives on the host, that goes over the link in many small accesses."""

_Form = Literal["small", "large", "rows", "any"]
"""Kernels of a pass: a CPU's for small and large tensors, a GPU's for rows of ``_ROW`` elements and for any length."""


def update(rule: Rule, weight: Tensor, grad: Tensor, states: Sequence[Tensor], coefs: Tensor) -> None:
    """One step of an element-wise rule, in place, on flat tensors of one device and size.

    Args:
        weight: the parameter.
        grad: of the parameter's dtype; of a 16-bit one it may be 16-bit or fp32.
        states: of a 16-bit parameter its master, fp32; then the moments, fp32, or fp64 for an fp64 parameter.
        coefs: what ``rule.coefficients`` gives, in the dtype of the moments.
    """
    length, tensors = weight.numel(), (weight, grad, *states)
    if not length:
        return
    # One element is a shape of its own for the tracer, and not worth a kernel.
    form = _form_of(weight.device, length)
    kernel = _compiled(rule, weight.dtype, grad.dtype, weight.device, form) if length > 1 else None
    if kernel is None:
        return _in_tiles(rule, tensors, coefs)
    if length <= LONGEST:
        kernel([*tensors, coefs])
        return
    # About equal slices, so that none is a single element, and of whole rows.
    size = -(-length // -(-length // LONGEST))
    for parts in zip(*(t.split(-(-size // _ROW) * _ROW) for t in tensors), strict=True):
        kernel([*parts, coefs])


def prepare(rule: Rule, weight_dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device, length: int) -> None:
    """Compile now what ``update`` will need for a parameter of so many elements, and for its pieces. Nothing can fail or warn half
    way through a step then."""
    forms = {"small", "large"} if device.type == "cpu" else {"rows", _form_of(device, length)}
    for form in sorted(forms) if length > 1 else ():
        _compiled(rule, weight_dtype, grad_dtype, device, form)


def _form_of(device: torch.device, length: int) -> _Form:
    if device.type == "cpu":
        return "small" if length <= _SMALL else "large"
    return "any" if length % _ROW else "rows"


def reconcile_master(weight: Tensor, master: Tensor) -> None:
    """Make the flat ``master`` agree with an edited ``weight``; bounded temporaries. No edit, no change."""
    for w, m in zip(weight.split(_TILE), master.split(_TILE), strict=True):
        m.copy_(_current(w, m))


def comparing_bytes(length: int) -> int:
    """Memory that `reconcile_master` needs for so many elements: temporaries of a tile."""
    return _TEMPORARIES * 4 * min(length, _TILE)


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


def _advance(rule: Rule, weight: Tensor, grad: Tensor, states: Sequence[Tensor], coefs: Tensor) -> tuple[()]:
    """The pass as traced; as few operations as the arithmetic allows, for it is not far from compute bound."""
    numbers = coefs.unbind()
    is_mixed = weight.dtype in HALF
    moments = states[1:] if is_mixed else states
    gradient = grad.float() if is_mixed else grad
    value = _current(weight, states[0]) if is_mixed else weight
    value, advanced = rule.advance(value, gradient, moments, numbers)
    weight.copy_(value)
    if is_mixed:
        states[0].copy_(value)
    for moment, new in zip(moments, advanced, strict=True):
        moment.copy_(new)
    return ()


def _in_tiles(rule: Rule, tensors: Sequence[Tensor], coefs: Tensor) -> None:
    """The same in eager operations, with temporaries of a few tiles."""
    for weight, grad, *states in zip(*(t.split(_TILE) for t in tensors), strict=True):
        _advance(rule, weight, grad, states, coefs)


def _one(rule: Rule, *tensors: Tensor) -> tuple[()]:
    """One pass, given by its tensors and the coefficients."""
    weight, grad, *states, coefs = tensors
    return _advance(rule, weight, grad, states, coefs)


@functools.cache
def _compiled(
    rule: Rule, weight_dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device, form: _Form
) -> Kernel | None:
    """The pass by Inductor; None, with a warning, where Inductor cannot compile (no C++ compiler, say)."""
    first = "small" if device.type == "cpu" else "rows"
    if form != first and _compiled(rule, weight_dtype, grad_dtype, device, first) is None:
        return None  # which has been said
    try:
        # PyTorch's own deprecations; where a user made warnings errors, they would read as "cannot compile" here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel = _compile(rule, (weight_dtype, grad_dtype), device, form)
            _verify(kernel, rule, (weight_dtype, grad_dtype), device, 17 * _ROW if form == "rows" else 1003)
            return kernel
    except Exception as error:  # the toolchain's errors share no base class
        warnings.warn(
            f"autohete_fx.{rule.name} could not compile its update for {weight_dtype} parameters "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}); "
            "it steps in eager operations: equally exact, several times slower. Install a working C++ compiler "
            "(or Triton, on a GPU) to have the fast one.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _compile(rule: Rule, dtypes: Sequence[torch.dtype], device: torch.device, form: _Form) -> Kernel:
    is_mixed = dtypes[0] in HALF
    state = torch.float32 if is_mixed else dtypes[0]
    every = (*dtypes, *[state] * (len(rule.moments) + is_mixed))
    settings: dict[str, Any] = {}
    if device.type == "cpu":
        if rule.may_contract:
            settings["cpp.enable_floating_point_contract_flag"] = "fast"
        # Threads are asked for at run time, so torch.set_num_threads is honoured without compiling again.
        settings |= {"cpp.threads": 1} if form == "small" else {"cpp_wrapper": True, "cpp.dynamic_threads": True}
    fixed = [(len(_examples(rule)), state)]
    row = _ROW if form == "rows" else None
    return compile_kernel(partial(_one, rule), every, device, fixed=fixed, row=row, settings=settings)


def _examples(rule: Rule) -> tuple[float, ...]:
    """Coefficients to check kernels with."""
    return rule.coefficients(dict(rule.hyperparameters), 2.0)


def _verify(kernel: Kernel, rule: Rule, dtypes: Sequence[torch.dtype], device: torch.device, length: int) -> None:
    """Compare a kernel with the eager operations, edited weights included, before any parameter is trusted to it."""
    weight_dtype, grad_dtype = dtypes
    is_mixed = weight_dtype in HALF
    state = torch.float32 if is_mixed else weight_dtype
    generator = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(2 + len(rule.moments), length, generator=generator, dtype=state, device="cpu")
    value, grad, *moments = values
    weight = value.to(weight_dtype, copy=True)
    weight[::5] *= 1.5
    # Not below zero, for a moment may be of squares.
    states = {
        **({"master": value} if is_mixed else {}),
        **dict(zip(rule.moments, map(torch.abs, moments), strict=True)),
    }
    given = {"weight": weight, "grad": grad.to(grad_dtype), **states}
    coefs = torch.tensor(_examples(rule), dtype=state, device=device)
    expected, found = ([t.clone().to(device) for t in given.values()] for _ in range(2))
    _in_tiles(rule, expected, coefs)
    kernel([*found, coefs])
    for name, e, f in zip(given, expected, found, strict=True):
        tolerance = torch.finfo(e.dtype).eps
        if not torch.allclose(f.to(state), e.to(state), rtol=4 * tolerance, atol=tolerance):
            raise AssertionError(f"the compiled update disagrees with eager in {name}")
