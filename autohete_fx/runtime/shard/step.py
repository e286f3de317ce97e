"""The ranks' common work at ``optimizer.step()``, whatever the optimizer: small parameters get the mean of their gradients.

In: the parameters of an optimizer that is about to step. Out: the same gradients of whole parameters on all ranks, by one
all-reduce a dtype. A gradient that only some ranks have counts as zero on the others, and is there on all of them afterwards.
The gradients of shards are means already: the graph's reduce made them. Writes to them since are refused, because all
that is known to write there goes by a local norm.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autohete_fx.errors import ShardError
from autohete_fx.runtime.shard import parts, state
from autohete_fx.runtime.shard.parts import part_of, shard_of

_is_watching = False


def watch() -> None:
    """See to the steps of all optimizers of this process."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not parts.is_any_known() or not any(part_of(p) is not None for p in params):
        return None
    state.attend(optimizer)
    state.localise(optimizer)
    positional, names = list(args), dict(kwargs)
    given = positional[1] if len(positional) > 1 else names.get("closure")
    if given is None:
        prepare(params)
        return None

    def closure() -> Any:
        with torch.enable_grad():
            result = given()
        prepare(params)
        return result

    if len(positional) > 1:
        positional[1] = closure
    else:
        names["closure"] = closure
    return tuple(positional), names


def prepare(params: Iterable[Tensor]) -> None:
    """Make the gradients of a step those of all ranks.

    Raises:
        ShardError: a shard's gradient was written to since backward.
    """
    params = list(params)
    if written := parts.written_since_backward(params):
        sizes = [part.size for p in written if (part := shard_of(p)) is not None]
        raise ShardError(
            f"the gradients of {len(written)} sharded parameters, the first of size {sizes[0]}, were changed between backward and"
            " step(), as torch.nn.utils.clip_grad_norm_ and GradScaler.unscale_ do: on shards they go by this rank's part alone."
            " Expected were gradients as backward leaves them. Clip with autohete_fx.AdamW(..., max_grad_norm=...), and scale the"
            " loss where gradients are to be scaled"
        )
    kept = [p for p in params if p.requires_grad and (part := part_of(p)) is not None and not part.is_shard]
    by_kind: dict[tuple[str, torch.dtype, torch.device], list[Tensor]] = {}
    for param in kept:
        part = part_of(param)
        assert part is not None
        if part.ranks.count > 1:
            by_kind.setdefault((part.group, param.dtype, param.device), []).append(param)
    for same in by_kind.values():
        _average(same)


def _average(params: list[Tensor]) -> None:
    """The mean over ranks, of parameters of one dtype and device. Behind the gradients stand flags that say who has one."""
    part = part_of(params[0])
    assert part is not None
    with torch.no_grad():
        flags = torch.tensor(
            [float(p.grad is not None) for p in params], dtype=params[0].dtype, device=params[0].device
        )
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        flat = torch.cat([*(g.detach().reshape(-1) for g in grads), flags])
        dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=part.ranks.group)
        means, has = flat[: -len(params)].split([p.numel() for p in params]), flat[-len(params) :].tolist()
        for param, mean, share in zip(params, means, has, strict=True):
            if share and param.grad is None:
                param.grad = mean.reshape(param.shape).clone()
            elif share and param.grad is not None:
                param.grad.copy_(mean.reshape(param.shape))
