"""Wrappers of PyTorch that would take this rank's rows for whole parameters: each says so where it is made or first used.

In: a model that a DistributedDataParallel is to wrap, an optimizer that a GradScaler is to step. Out: nothing, or ShardError.
DistributedDataParallel writes the first rank's rows over those of the others while it is made. A GradScaler looks for infinities
among the rows of one rank, which then leaves out a step that the others take.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autohete_fx.errors import ShardError
from autohete_fx.runtime.shard.parts import part_of


def watch() -> None:
    """Look at all that are made or used in this process from now on."""
    _look_first(DistributedDataParallel, "__init__", _check_wrapped)
    for name in ("step", "unscale_"):
        _look_first(torch.amp.GradScaler, name, _check_scaled)


def refusal(model: nn.Module) -> str | None:
    """Why a model that others divide or average cannot be sharded, and what to do; None where none does."""
    from torch.distributed.fsdp import FSDPModule  # takes a while to import

    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FSDPModule):
            kind = "fully_shard" if isinstance(module, FSDPModule) else "DistributedDataParallel"
            return (
                f"the module {path or 'itself'} is one of {kind}. Expected was a model whose parameters are whole and which nobody"
                " averages. autohete_fx.shard does both: give it the model as it was before"
            )
    return None


def _look_first(kind: Any, name: str, check: Callable[..., None]) -> None:
    method = getattr(kind, name)

    @functools.wraps(method)
    def looking(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(kind, name, looking)


def _check_wrapped(wrapper: object, module: nn.Module, *_: object, **__: object) -> None:
    if (count := _num_divided(module.parameters())) > 0:
        raise ShardError(
            f"DistributedDataParallel got a model of which ranks hold {count} parameters together, and would write the first rank's"
            " part over those of the others. Expected was a model that is whole on each rank. autohete_fx.shard averages gradients"
            " itself: train the model as it is, and have replicas by a mesh of two dimensions"
        )


def _check_scaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *_: object, **__: object) -> None:
    count = _num_divided(p for group in optimizer.param_groups for p in group["params"]) if scaler.is_enabled() else 0
    if count:
        raise ShardError(
            f"a GradScaler got an optimizer of {count} parameters that ranks hold together, and looks for infinities in this rank's"
            " part alone. Expected were gradients that nobody changes after backward. Train in bfloat16, which needs no GradScaler,"
            " or scale the loss by a constant"
        )


def _num_divided(params: Iterable[Tensor]) -> int:
    """How many are shards, or averaged by a step of ours."""
    parts = [part for p in params if (part := part_of(p)) is not None]
    return sum(part.is_shard or part.averaged_over is not None for part in parts)
