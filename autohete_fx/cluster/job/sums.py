"""Sums of gradients over their owners, and the norm of all gradients.

Every parameter's gradient is summed over all ranks that hold it. Parameters with equal owners share a process group and flat
buckets. Ranks start these in one global order, that of backward passes: the first layer that reads a parameter completes its
gradient. A group's first bucket says where the group is. Later stages end their backward passes first and start while earlier ones
still compute. Within a rank's last backward pass, a bucket's sum starts as soon as its gradients and all buckets before it are
there. Parameters that no layer reads are not summed.

Where layers run one by one, hooks tell of gradients. Compiled code is one node of autograd's graph and gives them at its end. A
node in it tells of a block's gradients before (`autohete_fx.runtime.announced`). This rank adds them to those of earlier
micro-batches as autograd would, and lets go of what autograd adds later.

Gradients move into their buckets and stay there until the step: besides them a sum takes the memory of one bucket. They are copied
back where parameters lie otherwise in memory, or their gradients on the host.

Pipelines that cut a parameter at different places sum it piece by piece. A piece of a row-wise weight lies apart in memory; it is
copied into its bucket and back. A parameter that all GPUs of a unit have whole has the same gradient on each, which counts once:
each adds its share.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement

from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.model.pieces import Held, Owners, Piece
from autohete_fx.cluster.model.tensor_parallel import local_gradient
from autohete_fx.errors import ClusterError
from autohete_fx.internals.tensors import local_of
from autohete_fx.runtime.announced import listen
from autohete_fx.runtime.pending.backward import sole_leaves
from autohete_fx.runtime.tiers.host import is_home

BUCKET_BYTES = 64 * 2**20
"""Gradients of one sum; a larger parameter has a sum of its own."""
_ALIGNED_BYTES = 64
"""Gradients in a bucket begin at multiples of it, as kernels expect."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    pieces: tuple[Piece, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sum:
    """One that has begun. ``flat`` has the pieces, and after them how many ranks have reached each."""

    work: dist.Work
    flat: Tensor
    parts: tuple[Tensor, ...]
    reached: Tensor
    bucket: _Bucket


SumGroups = Mapping[tuple[int, ...], dist.ProcessGroup | None]
"""By owners: their group; None on a rank that is none of them."""


def sum_groups(owners: Owners, timeout: timedelta | None = None) -> SumGroups:
    """The groups over which gradients are summed. All ranks call it.

    Args:
        owners: by piece of a parameter, the ranks that hold it.
        timeout: after which a rank that does not answer is an error; None: PyTorch's.
    """
    found: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in sorted(set(owners.values())):
        if len(ranks) > 1:
            group: Any = dist.new_group(list(ranks), timeout=timeout)
            found[ranks] = group if dist.get_rank() in ranks else None
    return found


class GradientSums:
    """Sums of one rank.

    Args:
        owners: by piece of a parameter, the ranks that hold it.
        groups: of `sum_groups`.
        layer_map: of the model.
        params: those of this rank.
        held: the pieces that they are.
        shares: by name of a parameter, this rank's part in the gradient of its unit; 1 where it is not there.

    Attributes:
        device_bytes: that sums take beside gradients and a copy of them.
    """

    def __init__(
        self,
        owners: Owners,
        groups: SumGroups,
        layer_map: LayerMap,
        params: Mapping[str, nn.Parameter],
        held: Held,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        rank = dist.get_rank()
        self._params = {name: param for name, param in params.items() if param.requires_grad}
        self._held, self._shares, self._groups = held, shares or {}, groups
        last: dict[tuple[int, ...], int] = {}
        for piece, ranks in owners.items():
            last[ranks] = max(last.get(ranks, 0), min(layer_map.readers[piece.name], default=0))
        mine = [piece for piece, ranks in owners.items() if rank in ranks and piece.name in self._params]
        summed = [piece for piece in mine if len(owners[piece]) > 1 and layer_map.readers[piece.name]]
        summed.sort(
            key=lambda piece: (
                -last[owners[piece]],
                owners[piece],
                str(self._params[piece.name].dtype),
                -min(layer_map.readers[piece.name]),
                piece.name,
                piece.cuts,
            )
        )
        self._buckets = self._bucketed([(piece, owners[piece]) for piece in summed])
        self._first = [piece for piece in mine if owners[piece][0] == rank]
        self._moves = {piece.name for piece in summed if self._is_all(piece)}
        copied = [self._part(piece).nbytes for piece in summed if piece.name not in self._moves]
        self.device_bytes = sum(copied) + max(map(self._bucket_bytes, self._buckets), default=0)
        self._names: dict[int, str] = {}
        self._placements: dict[str, tuple[Placement, ...]] = {}
        self._running: list[_Sum] = []
        self._begin()

    def overlap(self, accumulated: Mapping[str, nn.Parameter]) -> None:
        """Start sums within the last backward pass of each step, as `begin_last` tells, from now on.

        A parameter that this pass does not reach holds its bucket, and those after it, back until `reduce`. The ranks of a unit
        run the same operators, so that exchanges of their gradients have one order, too.

        Args:
            accumulated: by name, the parameters of modules, to which backward passes add.
        """
        names = {piece.name for bucket in self._buckets for piece in bucket.pieces}
        for name in sorted(names):
            accumulated[name].register_post_accumulate_grad_hook(partial(self._passed, name))
            self._names[id(accumulated[name])] = name
        listen((*(accumulated[name] for name in names), *(self._params[name] for name in names)), self)

    def begin_last(self, outputs: Iterable[Tensor]) -> None:
        """The last backward pass of a step begins.

        Args:
            outputs: of its forward pass, from which it begins.
        """
        self._is_last, self._sole = True, sole_leaves(outputs)

    def told(self, param: Tensor, grad: Tensor) -> None:
        """Compiled code has a gradient of a parameter, which autograd will add when that ends. It is taken in the last pass of a
        step, unless something else has a gradient of the parameter, too."""
        name = self._names.get(id(param))
        if name is None or name in self._done or id(param) not in self._sole:
            return
        with torch.no_grad():
            total = self._added(name, param, grad)
            if total is not None:
                param.grad = None
                self._told.add(name)
                self._take(name, local_gradient(total, param))

    def reduce(self) -> None:
        """Sum the gradients in place.

        A parameter that the backward passes of another rank alone reached has a gradient after it. One that no rank's reached
        has none, which optimizers tell from zeros.
        """
        for name, grad in self._taken.items():
            self._params[name].grad = grad
        self._taken.clear()
        absent = {name for name, p in self._params.items() if name not in self._done and p.grad is None}
        found: set[str] = set()
        for bucket in self._buckets[self._num_begun :]:
            self._start(bucket, absent)
            if any(_is_at_home(self._params[piece.name].grad) for piece in bucket.pieces):
                found |= self._finish(absent)  # the device has no room for all of them
        found |= self._finish(absent)
        for name in absent - found:
            self._params[name].grad = None
        self._begin()

    def squares(self) -> Tensor:
        """The sum of squares of the gradients of those pieces whose first owner this rank is, in fp64."""
        total = torch.zeros((), dtype=torch.float64)
        for piece in self._first:
            grad = self._params[piece.name].grad
            if grad is not None:
                part = self._part(piece, grad)
                total += torch.linalg.vector_norm(part, dtype=_exact(grad.dtype)).double().cpu() ** 2
        return total

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for param in self._params.values():
            if param.grad is not None:
                param.grad.mul_(factor)

    # -- within the last backward pass ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """A step begins."""
        self._is_last, self._sole = False, frozenset[int]()
        self._num_begun = 0
        self._done: set[str] = set()  # whose gradient of the step is complete
        self._told: set[str] = set()  # of these, to which autograd has yet to add what was taken already
        self._taken: dict[str, Tensor] = {}
        self._missing = [{piece.name for piece in bucket.pieces} for bucket in self._buckets]

    def _passed(self, name: str, param: nn.Parameter) -> None:
        """A backward pass has added to a parameter's gradient."""
        if isinstance(param.grad, DTensor):
            self._placements[name] = tuple(param.grad.placements)
        if name in self._told:
            self._told.remove(name)
            param.grad = None
        elif name in self._done:
            raise ClusterError(
                f"the gradient of {name!r} grew twice in the last backward pass of a step, and may be summed already. Expected"
                " was once in each backward pass. Checkpoint layers with use_reentrant=False"
            )
        elif self._is_last and param.grad is not None and not _is_at_home(param.grad):
            grad, param.grad = param.grad, None
            self._take(name, local_gradient(grad, param))

    def _added(self, name: str, param: Tensor, grad: Tensor) -> Tensor | None:
        """The gradient of all micro-batches, with that of the last one; None where it cannot be known yet."""
        collected = param.grad
        if collected is not None:
            if _is_at_home(collected):
                return None
            _local(collected).add_(grad)
            return collected
        if not isinstance(param, DTensor):
            return grad.clone()
        if name not in self._placements:
            return None
        size = {"shape": param.shape, "stride": param.stride()}
        return DTensor.from_local(grad.clone(), param.device_mesh, self._placements[name], run_check=False, **size)

    def _take(self, name: str, grad: Tensor) -> None:
        """The gradient of a parameter is complete: start all sums that are next and lack none."""
        self._taken[name] = grad
        self._done.add(name)
        for missing in self._missing:
            missing.discard(name)
        while self._num_begun < len(self._buckets) and not self._missing[self._num_begun]:
            self._start(self._buckets[self._num_begun], ())

    # -- one sum ----------------------------------------------------------------------------------------------------

    def _start(self, bucket: _Bucket, absent: Collection[str]) -> None:
        grads = [self._gradient(piece) for piece in bucket.pieces]
        ends = list(itertools.accumulate(_aligned(grad) // grad.element_size() for grad in grads))
        flat, parts = grads[0].new_zeros(ends[-1] + len(grads)), []
        for piece, grad, begin in zip(bucket.pieces, grads, [0, *ends], strict=False):
            part = flat[begin : begin + grad.numel()].view(grad.shape)
            share = self._shares.get(piece.name, 1.0)
            part.copy_(grad if share == 1.0 else grad * share)
            parts.append(part)
        reached = flat[ends[-1] :].fill_(1)
        if absent:  # never within a pass, where the device would be waited for
            reached.copy_(torch.tensor([piece.name not in absent for piece in bucket.pieces]))
        for piece in bucket.pieces:
            if piece.name in self._moves:
                self._taken.pop(piece.name, None)
                if not _is_at_home(self._params[piece.name].grad):
                    self._params[piece.name].grad = None
        work = dist.all_reduce(flat, group=self._groups[bucket.owners], async_op=True)
        assert work is not None, "this rank is one of the owners"
        self._running.append(_Sum(work, flat, tuple(parts), reached, bucket))
        self._num_begun += 1

    def _finish(self, absent: Collection[str]) -> set[str]:
        """Wait for all sums that have begun, and let parameters have them. Returns those of the absent gradients that other
        ranks have."""
        found: set[str] = set()
        for begun in self._running:
            begun.work.wait()
            pieces = begun.bucket.pieces
            for piece, total in zip(pieces, begun.parts, strict=True):
                param = self._params[piece.name]
                if piece.name in self._moves and param.grad is None:
                    param.grad = total
                else:
                    self._gradient(piece).copy_(total)
            if any(piece.name in absent for piece in pieces):
                found |= {p.name for p, count in zip(pieces, begun.reached.tolist(), strict=True) if count}
        self._running.clear()
        return found

    def _gradient(self, piece: Piece) -> Tensor:
        """A view of the piece of its parameter's gradient."""
        param, taken = self._params[piece.name], self._taken.get(piece.name)
        if taken is None and param.grad is None:
            param.grad = torch.zeros_like(param)
        return self._part(piece, param.grad if taken is None else taken)

    def _part(self, piece: Piece, whole: Tensor | None = None) -> Tensor:
        """A view of the piece, of its parameter where no other tensor like it is given."""
        return piece.of(self._params[piece.name] if whole is None else whole, self._held[piece.name])

    def _is_all(self, piece: Piece) -> bool:
        """Whether a gradient with the piece in a bucket's layout is that of the parameter."""
        param = self._params[piece.name]
        return self._part(piece).shape == param.shape and param.is_contiguous()

    def _bucket_bytes(self, bucket: _Bucket) -> int:
        parts = [self._part(piece) for piece in bucket.pieces]
        return sum(_aligned(part) + part.element_size() for part in parts)

    def _bucketed(self, rows: Sequence[tuple[Piece, tuple[int, ...]]]) -> list[_Bucket]:
        """Consecutive pieces of equal owners and dtypes, up to `BUCKET_BYTES`."""
        buckets: list[_Bucket] = []
        pieces: list[Piece] = []
        key: tuple[tuple[int, ...], torch.dtype] | None = None
        size = 0
        for piece, owners in rows:
            part = self._part(piece)
            num_bytes, mine = part.nbytes, (owners, part.dtype)
            if pieces and key is not None and (mine != key or size + num_bytes > BUCKET_BYTES):
                buckets.append(_Bucket(tuple(pieces), key[0]))
                pieces, size = [], 0
            key = mine
            pieces.append(piece)
            size += num_bytes
        if pieces and key is not None:
            buckets.append(_Bucket(tuple(pieces), key[0]))
        return buckets


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor of all gradients, as `torch.nn.utils.clip_grad_norm_` does: 0 for an infinite norm, NaN for one that is NaN."""
    factor = 1.0 if max_norm is None else max_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor


def _local(grad: Tensor) -> Tensor:
    return local_of(grad) if isinstance(grad, DTensor) else grad


def _is_at_home(grad: Tensor | None) -> bool:
    """Whether a gradient is in host memory."""
    return grad is not None and is_home(_local(grad))


def _aligned(part: Tensor) -> int:
    """Bytes of a part of a bucket, with the gap after it."""
    return -(-part.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _exact(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
