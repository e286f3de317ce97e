"""``Muon``: ``torch.optim.Muon`` for the hidden matrices of a model, and ``AdamW``'s rule for all other parameters.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). Learning rates are those of Liu et al., "Muon
is Scalable for LLM Training" (arXiv 2502.16982) where asked for. Newton-Schulz iterations of bf16 products make the momentum of
a matrix nearly orthogonal. Every element depends on every other, so a matrix is updated whole, by one processor.

Operations, dtypes and memory layouts are those of ``torch.optim.Muon``, one by one. Results are bitwise its own on the
processor that does the update. They need a workspace beside parameter, gradient and momentum, all of which is taken before any
parameter changes::

    first     bf16, m x n            the matrix that is iterated on
    scratch   fp32 or fp64, m x n    the momentum with the gradient, until it is rounded; then
    second    bf16, m x n            the next iterate, and
    gram      bf16, twice k x k      its products with itself, k = min(m, n)
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autohete_fx.errors import OptimizerStateError
from autohete_fx.optim.adamw import ADAMW
from autohete_fx.optim.arguments import check_at_least_0, check_number
from autohete_fx.optim.base import PlannedOptimizer
from autohete_fx.optim.rule import Group, Rule
from autohete_fx.optim.state import MOMENTUM, state_dtype

USE_MUON = "use_muon"
"""The key of a group that says whether its parameters are matrices."""

_BF16_BYTES = 2
_ALIGNED_BYTES = 512
_MOST_STEPS = 100
_EMBEDS = frozenset({"emb", "wte", "wpe", "head", "lm_head"})


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Whether a parameter is a matrix of a hidden layer, by its name.

    It has two dimensions, is in a numbered layer, and no part of its name is of an embedding or a head.
    """
    parts = name.split(".")
    is_in_layer = any(part.isdigit() for part in parts)
    return param.ndim == 2 and is_in_layer and not any("embed" in part or part in _EMBEDS for part in parts)


def _checked(group: Group) -> dict[str, Any]:
    check_at_least_0(group, ("lr", "weight_decay", "momentum", "eps"))
    coefficients, steps, adjusts = group["ns_coefficients"], group["ns_steps"], group["adjust_lr_fn"]
    if not isinstance(coefficients, Sequence) or isinstance(coefficients, str) or len(coefficients) != 3:
        raise OptimizerStateError(f"ns_coefficients is {coefficients!r}; expected three numbers")
    for index, number in enumerate(coefficients):
        check_number({f"ns_coefficients[{index}]": number}, f"ns_coefficients[{index}]")
    if not isinstance(steps, int) or not 0 <= steps < _MOST_STEPS:
        raise OptimizerStateError(f"ns_steps is {steps!r}; expected a whole number from 0 to {_MOST_STEPS - 1}")
    if adjusts not in (None, "original", "match_rms_adamw"):
        raise OptimizerStateError(f"adjust_lr_fn is {adjusts!r}; expected 'original', 'match_rms_adamw' or None")
    return {"momentum": float(group["momentum"]), "ns_coefficients": tuple(map(float, coefficients))}


def _foreign(group: Group) -> str | None:
    other = [name for name in ("betas", "dampening") if name in group]
    return f"has {other}, which Muon's matrices do not know: make it with Muon.state_dict()" if other else None


def _adjusted(lr: float, how: str | None, shape: Sequence[int]) -> float:
    rows, columns = shape
    if how == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))


def _pieces(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes of a bf16 matrix, of one product with itself, and of the scratch in the states' dtype, each aligned."""
    length, least = shape[0] * shape[1], min(shape)
    sizes = _BF16_BYTES * length, _BF16_BYTES * least * least, dtype.itemsize * length
    matrix, product, scratch = (-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes)
    return matrix, product, scratch


def workspace_bytes(param: Tensor) -> int:
    """Memory that an update of a matrix needs beside the matrix, its gradient and its states."""
    matrix, product, scratch = _pieces(param.shape, state_dtype(param))
    return matrix + max(scratch, matrix + 2 * product)


def product_flops(param: Tensor, group: Group) -> float:
    """Floating point operations of the products in an update of a matrix."""
    least, most = sorted(param.shape)
    return group["ns_steps"] * (4.0 * least * least * most + 2.0 * least**3)


def _update(value: Tensor, grad: Tensor, moments: Sequence[Tensor], group: Group, workspace: Tensor) -> None:
    """A step of one matrix in place, as ``torch.optim.Muon`` takes it: by the same operations on tensors of the same layout."""
    (buffer,), (rows, columns), length = moments, value.shape, value.numel()
    if not length:
        return
    matrix, _, scratch_bytes = _pieces(value.shape, value.dtype)
    first = workspace[: _BF16_BYTES * length].view(torch.bfloat16).as_strided(value.shape, value.stride())
    rest = workspace[matrix : matrix + scratch_bytes]
    scratch = rest[: value.nbytes].view(value.dtype).as_strided(value.shape, value.stride())
    scratch.copy_(grad)
    buffer.lerp_(scratch, 1 - group["momentum"])
    first.copy_(scratch.lerp_(buffer, group["momentum"]) if group["nesterov"] else buffer)
    is_tall = rows > columns
    orthogonal = _orthogonal(first.T if is_tall else first, group, workspace[matrix:])
    step = orthogonal.T if is_tall else orthogonal
    if group["ns_steps"] % 2:  # it lies where the scratch is
        step = first.as_strided(step.shape, step.stride()).copy_(step)
    # A CPU adds tensors of two dtypes by a copy of one, which is to be in the workspace.
    scratch.copy_(step)
    lr = float(group["lr"])
    value.mul_(1 - lr * group["weight_decay"])
    value.add_(scratch, alpha=-_adjusted(lr, group["adjust_lr_fn"], value.shape))


def _orthogonal(wide: Tensor, group: Group, workspace: Tensor) -> Tensor:
    """A wide bf16 matrix after the Newton-Schulz iterations, in its own memory or in the workspace."""
    a, b, c = group["ns_coefficients"]
    wide.div_(wide.norm().clamp(min=group["eps"]))
    least, most = wide.shape
    matrix, product, _ = _pieces(wide.shape, torch.bfloat16)

    def bf16(at: int, columns: int) -> Tensor:
        return workspace[at : at + _BF16_BYTES * least * columns].view(torch.bfloat16).view(least, columns)

    gram, update = bf16(matrix, least), bf16(matrix + product, least)
    # The iterate goes to and fro between two matrices, both laid out as torch's are: the first is the one given.
    iterates = bf16(0, most), wide.as_strided((least, most), (most, 1))
    for n in range(group["ns_steps"]):
        torch.mm(wide, wide.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=update)
        wide = torch.addmm(wide, update, wide, beta=a, out=iterates[n % 2])
    return wide


MUON = Rule(
    name="Muon",
    moments=(MOMENTUM,),
    hyperparameters=(
        ("lr", 1e-3),
        ("weight_decay", 0.1),
        ("momentum", 0.95),
        ("nesterov", True),
        ("ns_coefficients", (3.4445, -4.7750, 2.0315)),
        ("eps", 1e-7),
        ("ns_steps", 5),
        ("adjust_lr_fn", None),
    ),
    checked=_checked,
    whole=_update,
    workspace_bytes=workspace_bytes,
    product_flops=product_flops,
    counts_steps=False,
    foreign=_foreign,
)

_SHARED_NAMES = frozenset({"lr", "weight_decay", "eps"})
"""Hyperparameters of both rules. In a group of both they are Muon's."""

_ADAMW_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "maximize": False}


class Muon(PlannedOptimizer):
    """``torch.optim.Muon`` for hidden matrices and ``AdamW`` for the rest, where the plan says.

    A matrix ``p`` with gradient ``g`` has one state, ``momentum_buffer``::

        momentum_buffer = momentum * momentum_buffer + (1 - momentum) * g
        u = (1 - momentum) * g + momentum * momentum_buffer if nesterov else momentum_buffer
        x = bf16(u) / max(norm(u), eps)
        x = a x + (b (x x') + c (x x')^2) x                                # ns_steps times, (a, b, c) = ns_coefficients
        p = p * (1 - lr * weight_decay) - lr * sqrt(max(1, rows / columns)) * x

    With ``adjust_lr_fn="match_rms_adamw"`` the last factor is ``0.2 * sqrt(max(rows, columns))``, and AdamW's rates suit.

    Results, wherever states and parameters live, are bitwise those of ``torch.optim.Muon`` on the processor that does the
    update. They are those on the parameter if that is fp32 or fp64, else on its fp32 ``master`` with ``grad.float()``. All
    other parameters are updated as `autohete_fx.AdamW` does. A matrix is never cut. Its states pass through the device whole
    where they are streamed, and are in RAM whole where they are on disk. Plans count its products as seconds of the device or
    of the host. The workspace of the largest one, at most 8 bytes an element (12 for fp64), counts as device memory. Streamed
    matrices take another one, and two slots, each for the largest and its states. Where the host updates, each of its threads
    that does so takes as much RAM beside ``host_budget``.

    Attributes:
        grad_norm: the norm of all gradients before the last step clipped them, a tensor without dimensions; None where no
            step has.

    Args:
        params: a model, its ``named_parameters()``, or groups, each of named parameters or with ``use_muon``, which says whether
            all of its parameters are hidden matrices. Each becomes one or two groups, matrices first. Names tell what a parameter
            is for: a list without them is an error.
        lr: learning rate of matrices; a one-element tensor is allowed.
        weight_decay: decoupled weight decay of matrices.
        momentum: what the momentum keeps of itself.
        nesterov: step by a mean of gradient and momentum.
        ns_coefficients, eps, ns_steps: of the iterations.
        adjust_lr_fn: ``"original"``, ``"match_rms_adamw"``, or None for the first.
        adamw: the hyperparameters of `autohete_fx.AdamW` for all other parameters. Those that it lacks are AdamW's defaults.
        is_matrix: whether a parameter is a hidden matrix, by its name and itself. By default those of two dimensions in numbered
            layers whose name speaks of no embedding or head (`is_hidden_matrix`), and of a model no ``nn.Embedding``.
        overlap: ``"step"``, ``"backward"``, or None: updates on the host are done when ``step()`` returns.
        max_grad_norm: in ``step()``, clip all gradients by their total norm first, as ``torch.nn.utils.clip_grad_norm_`` does.
            The result is bitwise so where one processor takes all norms, else within the rounding of norms. None: do not.

    Raises:
        OptimizerStateError: a hyperparameter out of range, parameters without names, or a matrix that ranks hold shards of.
            Also a parameter for matrices of another number of dimensions, and one to train whose dtype is none of float32,
            float64, bfloat16, float16.
    """

    rule = MUON

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        is_matrix: Callable[[str, Tensor], bool] = is_hidden_matrix,
        overlap: str | None = "step",
        max_grad_norm: float | None = None,
    ) -> None:
        self._is_matrix = is_matrix
        if isinstance(params, nn.Module):
            tables = {
                id(m._parameters["weight"]) for m in params.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
            }
            self._is_matrix = lambda name, param: id(param) not in tables and is_matrix(name, param)
            params = params.named_parameters()
        unknown = [name for name in adamw or {} if name not in _ADAMW_DEFAULTS]
        if unknown:
            raise OptimizerStateError(
                f"adamw has {unknown}; expected some of {list(_ADAMW_DEFAULTS)}: give Muon's own hyperparameters beside it"
            )
        self._adamw = {**_ADAMW_DEFAULTS, **(adamw or {})}
        numbers = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        iterations = {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps}
        hyperparameters = {**numbers, **iterations, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, hyperparameters, overlap=overlap, max_grad_norm=max_grad_norm)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_adamw": self._adamw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._is_matrix, self._adamw = is_hidden_matrix, dict(_ADAMW_DEFAULTS)
        super().__setstate__(state)

    def rule_of_group(self, group: Group) -> Rule:
        """AdamW's where the group says that its parameters are no matrices."""
        return MUON if group[USE_MUON] else ADAMW

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add one or two groups: matrices, then the rest. Raises OptimizerStateError, before anything is added, for what cannot be
        trained."""
        before = len(self.param_groups)
        try:
            for group in self._divided(param_group):
                super().add_param_group(group)
                own = self.param_groups[-1]
                for name in set(self.defaults) - set(self.rule_of_group(own).names):
                    own.pop(name, None)
        except BaseException:
            del self.param_groups[before:]
            raise

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class, or of ``torch.optim.Muon`` where there are matrices alone. See
        `PlannedOptimizer.load_state_dict`.

        Raises:
            OptimizerStateError: says what the dict has, what was expected, and what to do.
            HostMemoryError: no room for host states.
        """
        groups = state_dict.get("param_groups", ())
        for index, (new, own) in enumerate(zip(groups, self.param_groups, strict=False)):
            if new.get(USE_MUON, own[USE_MUON]) != own[USE_MUON]:
                raise OptimizerStateError(
                    f"group {index} of the state dict has use_muon={new[USE_MUON]}; expected {own[USE_MUON]}: divide the parameters"
                    " into matrices and others as they were divided when it was made"
                )
        super().load_state_dict(state_dict)

    def _divided(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """A user's group as one of matrices and one of other parameters, each with all hyperparameters that its rule knows."""
        given = group["params"]
        params: list[Any] = [given] if isinstance(given, Tensor) else list(given)
        if USE_MUON in group:
            divided = {bool(group[USE_MUON]): params}
        elif all(isinstance(each, tuple) for each in params):
            divided = {
                is_one: [(n, p) for n, p in params if self._is_matrix(n, p) is is_one] for is_one in (True, False)
            }
        else:
            raise OptimizerStateError(
                "Muon was given parameters without names, which do not tell hidden matrices from embeddings and heads; expected"
                " names: give the model, or model.named_parameters(), or groups with use_muon=True and use_muon=False"
            )
        groups = []
        for is_one, mine in divided.items():
            if is_one:
                _check_shapes(mine)
            others = set(_ADAMW_DEFAULTS if is_one else self.defaults) - _SHARED_NAMES
            if len(divided) > 1 and not is_one:
                others |= _SHARED_NAMES
            if mine or len(divided) == 1:
                own = {name: value for name, value in group.items() if name not in others}
                groups.append({**({} if is_one else self._adamw), **own, "params": mine, USE_MUON: is_one})
        return groups


def _check_shapes(params: Iterable[Any]) -> None:
    for each in params:
        param = each[1] if isinstance(each, tuple) else each
        if param.ndim != 2:
            raise OptimizerStateError(
                f"a parameter of shape {tuple(param.shape)} was given to Muon's matrices; expected two dimensions: put it into a"
                " group with use_muon=False"
            )
