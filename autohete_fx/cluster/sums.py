"""Sums of gradients over their owners, and the norm of all gradients.

Every parameter's gradient is summed over all ranks that hold it. Parameters with equal owners share a process group and flat
buckets. Ranks start the sums of their groups in one global order, by the last layer that reads a parameter of the group,
descending. Later stages end their backward passes first and start while earlier ones still compute. Within a rank's last backward
pass, a bucket's sum starts as soon as its gradients and all buckets before it are there. Parameters that no layer reads are not
summed.

Pipelines that cut a parameter at different places sum it piece by piece. A piece of a row-wise weight lies apart in memory; it is
copied into its bucket and back. A parameter that all GPUs of a unit have whole has the same gradient on each, which counts once:
each adds its share.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autohete_fx.cluster.layers import LayerMap
from autohete_fx.cluster.pieces import Held, Owners, Piece
from autohete_fx.cluster.tensor_parallel import take_gradient
from autohete_fx.errors import ClusterError

BUCKET_BYTES = 64 * 2**20
"""Gradients of one sum; a larger parameter has a sum of its own."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    pieces: tuple[Piece, ...]
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sum:
    """One that has begun."""

    work: dist.Work
    flat: Tensor
    bucket: _Bucket


class GradientSums:
    """Sums of one rank.

    All ranks make one, at the same time, because they make process groups together.

    Args:
        owners: by piece of a parameter, the ranks that hold it.
        layer_map: of the model.
        params: those of this rank.
        held: the pieces that they are.
        shares: by name of a parameter, this rank's part in the gradient of its unit; 1 where it is not there.
        timeout: after which a rank that does not answer is an error; None: PyTorch's.
    """

    def __init__(
        self,
        owners: Owners,
        layer_map: LayerMap,
        params: Mapping[str, nn.Parameter],
        held: Held,
        shares: Mapping[str, float] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        rank = dist.get_rank()
        self._params = {name: param for name, param in params.items() if param.requires_grad}
        self._held, self._shares = held, shares or {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for ranks in sorted(set(owners.values())):
            if len(ranks) > 1:
                group: Any = dist.new_group(list(ranks), timeout=timeout)
                self._groups[ranks] = group if rank in ranks else None
        last: dict[tuple[int, ...], int] = {}
        for piece, ranks in owners.items():
            last[ranks] = max(last.get(ranks, 0), *layer_map.readers[piece.name], 0)
        mine = [piece for piece, ranks in owners.items() if rank in ranks and piece.name in self._params]
        summed = [piece for piece in mine if len(owners[piece]) > 1 and layer_map.readers[piece.name]]
        summed.sort(
            key=lambda piece: (
                -last[owners[piece]],
                owners[piece],
                str(self._params[piece.name].dtype),
                -max(layer_map.readers[piece.name]),
                piece.name,
                piece.cuts,
            )
        )
        self._buckets = self._bucketed([(piece, owners[piece]) for piece in summed])
        self._first = [piece for piece in mine if owners[piece][0] == rank]
        self._running: list[_Sum] = []
        self._passes: dict[str, int] = {}
        self._missing: list[set[str]] = []
        self._micro_batches = 0

    def overlap(self, micro_batches: int, accumulated: Mapping[str, nn.Parameter]) -> None:
        """Start sums within the last of so many backward passes of a step, from now on.

        A parameter that some micro-batch did not reach holds its bucket, and those after it, back until `reduce`. The ranks of a
        unit run the same operators, so that exchanges of their gradients have one order, too.

        Args:
            accumulated: by name, the parameters of modules, to which backward passes add.
        """
        self._micro_batches = micro_batches
        self._begin_counting()
        for name in {piece.name for bucket in self._buckets for piece in bucket.pieces}:
            accumulated[name].register_post_accumulate_grad_hook(partial(self._passed, name))

    def reduce(self) -> None:
        """Sum the gradients in place.

        A parameter that the backward passes of another rank alone reached has a gradient after it. One that no rank's reached
        has none, which optimizers tell from zeros.
        """
        absent = {name for name, param in self._params.items() if param.grad is None}
        for bucket in self._buckets[len(self._running) :]:
            self._start(bucket, absent)
        for begun in self._running:
            begun.work.wait()
            grads = [self._gradient(piece) for piece in begun.bucket.pieces]
            reached, *totals = begun.flat.split([len(grads), *(grad.numel() for grad in grads)])
            for grad, total in zip(grads, totals, strict=True):
                grad.copy_(total.view_as(grad))
            if absent:
                found = zip(begun.bucket.pieces, reached.tolist(), strict=True)
                absent -= {piece.name for piece, count in found if count}
        self._running.clear()
        self._begin_counting()
        for name in absent:
            self._params[name].grad = None

    def squares(self) -> Tensor:
        """The sum of squares of the gradients of those pieces whose first owner this rank is, in fp64."""
        total = torch.zeros((), dtype=torch.float64)
        for piece in self._first:
            grad = self._params[piece.name].grad
            if grad is not None:
                part = piece.of(grad, self._held[piece.name])
                total += torch.linalg.vector_norm(part, dtype=_exact(grad.dtype)).double().cpu() ** 2
        return total

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for param in self._params.values():
            if param.grad is not None:
                param.grad.mul_(factor)

    def _begin_counting(self) -> None:
        self._passes.clear()
        self._missing = [{piece.name for piece in bucket.pieces} for bucket in self._buckets]

    def _passed(self, name: str, param: nn.Parameter) -> None:
        """A backward pass has added to a parameter's gradient: start all sums that are next and lack none."""
        self._passes[name] = self._passes.get(name, 0) + 1
        if self._passes[name] > self._micro_batches:
            raise ClusterError(
                f"the gradient of {name!r} grew {self._passes[name]} times in a step of {self._micro_batches} micro-batches, and"
                " may be summed already. Expected was once in each backward pass. Checkpoint layers with use_reentrant=False"
            )
        if self._passes[name] == self._micro_batches:
            take_gradient(param, self._params[name])
            for missing in self._missing:
                missing.discard(name)
            while len(self._running) < len(self._buckets) and not self._missing[len(self._running)]:
                self._start(self._buckets[len(self._running)], ())

    def _start(self, bucket: _Bucket, absent: Collection[str]) -> None:
        grads = [self._gradient(piece) for piece in bucket.pieces]
        reached = grads[0].new_tensor([piece.name not in absent for piece in bucket.pieces])
        shared = [self._shared(piece.name, grad) for piece, grad in zip(bucket.pieces, grads, strict=True)]
        flat = torch.cat([reached, *shared])
        work = dist.all_reduce(flat, group=self._groups[bucket.owners], async_op=True)
        assert work is not None, "this rank is one of the owners"
        self._running.append(_Sum(work, flat, bucket))

    def _gradient(self, piece: Piece) -> Tensor:
        """A view of the piece of its parameter's gradient."""
        param = self._params[piece.name]
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        return piece.of(param.grad, self._held[piece.name])

    def _shared(self, name: str, grad: Tensor) -> Tensor:
        """This rank's part of the sum, flat."""
        share = self._shares.get(name, 1.0)
        return (grad if share == 1.0 else grad * share).reshape(-1)

    def _bucketed(self, rows: Sequence[tuple[Piece, tuple[int, ...]]]) -> list[_Bucket]:
        """Consecutive pieces of equal owners and dtypes, up to `BUCKET_BYTES`."""
        buckets: list[_Bucket] = []
        pieces: list[Piece] = []
        key: tuple[tuple[int, ...], torch.dtype] | None = None
        size = 0
        for piece, owners in rows:
            param = self._params[piece.name]
            num_bytes = piece.of(param, self._held[piece.name]).nbytes
            mine = owners, param.dtype
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


def _exact(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
