"""The ranks' common work at ``optimizer.step()``, whatever the optimizer: the mean of gradients that no graph has reduced.

In: the parameters of an optimizer that is about to step. Out: the same gradients of whole parameters on all ranks. A gradient that
only some ranks have counts as zero on the others, and is there on all of them afterwards. The gradients of shards are means
already: the graph's reduce made them. Where there are replicas, these are means over one replica's ranks, of all micro-batches; the
mean over replicas is made here, once a step. Writes to gradients since backward are refused, because all that is known to write
there goes by a local norm, or by one rank's batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autohete_fx.errors import ShardError
from autohete_fx.graph.ops import SMALLEST_COPY_BYTES
from autohete_fx.runtime.lanes.failures import tell_refusal
from autohete_fx.runtime.lanes.net import all_reduce
from autohete_fx.runtime.lanes.positions import note_step
from autohete_fx.runtime.shard import parts, state, wrappers
from autohete_fx.runtime.shard.parts import part_of
from autohete_fx.runtime.shard.ranks import Ranks
from autohete_fx.runtime.shard.same_call import check_all_step
from autohete_fx.runtime.tiers.host import is_home
from autohete_fx.runtime.wholes import check_unwritten, note_change

PIECE_BYTES = 16 * 2**20
"""The most that is averaged at once."""

_TAKE_WHOLES = ("Adafactor", "LBFGS", "Muon")
"""Optimizers of PyTorch by which an element's update depends on others: of a shard they would take it for a whole parameter."""

_is_watching = False


def watch() -> None:
    """See to the steps of all optimizers of this process, and to what would be around them."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_before_step)
        wrappers.watch()


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not parts.is_any_known() or not any(part_of(p) is not None for p in params):
        return None
    _check_elementwise(optimizer, params)
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


def takes_wholes(optimizer: Optimizer) -> bool:
    """Whether an optimizer of PyTorch would update each rank's rows as if they were all. Ours see to it."""
    takers = tuple(kind for name in _TAKE_WHOLES if (kind := getattr(torch.optim, name, None)) is not None)
    return isinstance(optimizer, takers)


def _check_elementwise(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Raise ShardError for an optimizer that `takes_wholes`."""
    divided = [part for p in params if (part := part_of(p)) is not None and part.groups]
    if divided and takes_wholes(optimizer):
        raise ShardError(
            f"torch.optim.{type(optimizer).__name__} got {len(divided)} sharded parameters, the first of size"
            f" {divided[0].full_size}, and updates an element by others, of which this rank has some alone. Expected was an"
            " optimizer that works element by element. Train with autohete_fx.AdamW, Adam, SGD or Lion, or with one of torch.optim"
            " of that kind"
        )


def prepare(params: Iterable[Tensor]) -> None:
    """Make the gradients of a step those of all ranks.

    Raises:
        ShardError: a gradient was written to since backward, or a shard whose block is replicated. Or another rank does not step
            the same parameters by the same gradients.
    """
    params = list(params)
    held: dict[Ranks, list[tuple[int, bool]]] = {}
    for param in params:
        if (part := part_of(param)) is not None:
            is_alike = part.is_shard and part.averaged_over is None  # else one that is absent counts as zeros
            held.setdefault(part.ranks, []).append((part.number, is_alike and param.grad is not None))
    for ranks in held:
        note_step(ranks.control)
    check_unwritten()
    _refuse(parts.written_since_backward(params), "step()")
    for ranks, updated in held.items():
        check_all_step(ranks, updated)
    note_change()
    by_kind: dict[tuple[str, bool, torch.dtype, torch.device], list[Tensor]] = {}
    for param in params:
        part = part_of(param)
        if param.requires_grad and part is not None and part.averaged_over is not None:
            by_kind.setdefault((part.group, part.is_shard, param.dtype, param.device), []).append(param)
    with torch.no_grad():
        for same in by_kind.values():
            for bucket in _buckets(same):
                _average(bucket)
    parts.note_taken(params)


def check_collected(params: Iterable[Tensor]) -> None:
    """Before another micro-batch adds to the gradients of parameters.

    Raises:
        ShardError: one was written to since backward.
    """
    _refuse(parts.written_since_backward(params, but_taken=True), "the next forward")


def _refuse(written: Sequence[Tensor], until: str) -> None:
    if written:
        part = part_of(written[0])
        assert part is not None
        error = ShardError(
            f"the gradients of {len(written)} parameters that ranks hold together, the first of size {part.full_size}, were changed"
            f" between backward and {until}. torch.nn.utils.clip_grad_norm_ does so, by one rank's part alone. Expected were"
            " gradients as backward leaves them. Clip with autohete_fx.AdamW(..., max_grad_norm=...), and scale the loss where"
            " gradients are to be scaled"
        )
        # Another rank may have none that was written, and would wait for this one.
        tell_refusal(error, part.ranks.control)
        raise error


def _buckets(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters in their order, so many together that the small ones among them fill one piece."""
    bucket: list[Tensor] = []
    small_bytes = 0
    for param in params:
        bucket.append(param)
        small_bytes += param.nbytes if _is_small(param) else 0
        if small_bytes > PIECE_BYTES - SMALLEST_COPY_BYTES:
            yield bucket
            bucket, small_bytes = [], 0
    if bucket:
        yield bucket


def _is_small(param: Tensor) -> bool:
    return param.nbytes < SMALLEST_COPY_BYTES


def _average(params: Sequence[Tensor]) -> None:
    """The mean over ranks, of parameters of one kind. The gradients of small ones go as one tensor, with flags that say who has a
    gradient of which parameter. A rank that has all of them need not read the flags."""
    part = part_of(params[0])
    assert part is not None and part.averaged_over is not None
    group, among, small = part.averaged_over, part.ranks.control, [p for p in params if _is_small(p)]
    missing = [at for at, p in enumerate(params) if p.grad is None]
    flags = torch.ones(len(params), dtype=params[0].dtype, device=params[0].device)
    for at in missing:
        flags[at] = 0
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in small]
    flat = torch.cat([flags, *(g.detach().reshape(-1) for g in grads)])
    all_reduce(flat, group, dist.ReduceOp.AVG, among=among)
    means = iter(flat[len(params) :].split([p.numel() for p in small]))
    # To read flags the program waits for the device, and gives it nothing to do meanwhile.
    shares = flat[: len(params)].tolist() if missing else [1.0] * len(params)
    for param, share in zip(params, shares, strict=True):
        mean = next(means) if _is_small(param) else None
        if not share:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if mean is None:
            _average_large(param.grad, group, among)
        else:
            param.grad.copy_(mean.reshape(param.shape))
        parts.note_gradient(param)


def _average_large(grad: Tensor, group: dist.ProcessGroup, among: dist.ProcessGroup) -> None:
    """In place, a piece at a time: a gradient at home on the host passes through the device."""
    flat = grad.detach().view(-1) if grad.is_contiguous() else grad.detach().reshape(-1)
    for piece in flat.split(PIECE_BYTES // grad.element_size()):
        here = piece.clone() if is_home(grad) else piece
        all_reduce(here, group, dist.ReduceOp.AVG, among=among)
        if here is not piece:
            piece.copy_(here)
    if not grad.is_contiguous():
        grad.copy_(flat.view(grad.shape))
    increment_version(grad)
