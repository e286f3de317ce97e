"""Sums of gradients over their owners, and the norm of all gradients.

Every parameter's gradient is summed over all ranks that hold it. Parameters with equal owners share a process group and flat
buckets. Ranks start the sums of their groups in one global order, by the last layer that reads a parameter of the group,
descending. Later stages end their backward passes first and start while earlier ones still compute. Parameters that no layer
reads are not summed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autohete_fx.cluster.layers import LayerMap

BUCKET_BYTES = 64 * 2**20
"""Gradients of one sum; a larger parameter has a sum of its own."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    names: tuple[str, ...]
    owners: tuple[int, ...]


class GradientSums:
    """Sums of one rank.

    All ranks make one, at the same time, because they make process groups together.

    Args:
        owners: by name of a parameter, the ranks that hold it.
        layer_map: of the model.
        params: those of this rank.
    """

    def __init__(
        self, owners: Mapping[str, tuple[int, ...]], layer_map: LayerMap, params: Mapping[str, nn.Parameter]
    ) -> None:
        rank = dist.get_rank()
        self._params = {name: param for name, param in params.items() if param.requires_grad}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for ranks in sorted(set(owners.values())):
            if len(ranks) > 1:
                group: Any = dist.new_group(list(ranks))
                self._groups[ranks] = group if rank in ranks else None
        last: dict[tuple[int, ...], int] = {}
        for name, ranks in owners.items():
            last[ranks] = max(last.get(ranks, 0), *layer_map.readers[name], 0)
        summed = [name for name in self._params if len(owners[name]) > 1 and layer_map.readers[name]]
        summed.sort(key=lambda name: (-last[owners[name]], owners[name], str(self._params[name].dtype), name))
        self._buckets = _buckets([(name, owners[name]) for name in summed], self._params)
        self._first = {name: owners[name][0] == rank for name in self._params}

    def reduce(self) -> None:
        """Sum the gradients in place. A parameter that this rank's backward passes did not reach has a gradient of zeros after
        it."""
        running = []
        for bucket in self._buckets:
            grads = [self._gradient(name) for name in bucket.names]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            work = dist.all_reduce(flat, group=self._groups[bucket.owners], async_op=True)
            running.append((work, flat, grads))
        for work, flat, grads in running:
            assert work is not None, "this rank is one of the owners"
            work.wait()
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    def squares(self) -> Tensor:
        """The sum of squares of the gradients of those parameters whose first owner this rank is, in fp64."""
        total = torch.zeros((), dtype=torch.float64)
        for name, param in self._params.items():
            if self._first[name] and param.grad is not None:
                total += torch.linalg.vector_norm(param.grad, dtype=_exact(param.grad.dtype)).double().cpu() ** 2
        return total

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for param in self._params.values():
            if param.grad is not None:
                param.grad.mul_(factor)

    def _gradient(self, name: str) -> Tensor:
        param = self._params[name]
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        return param.grad


def clip_factor(norm: float, max_norm: float | None) -> float:
    """The factor of all gradients, as `torch.nn.utils.clip_grad_norm_` does."""
    if max_norm is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def _exact(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _buckets(rows: Sequence[tuple[str, tuple[int, ...]]], params: Mapping[str, nn.Parameter]) -> list[_Bucket]:
    """Consecutive parameters of equal owners and dtypes, up to `BUCKET_BYTES`."""
    buckets: list[_Bucket] = []
    names: list[str] = []
    key: tuple[tuple[int, ...], torch.dtype] | None = None
    size = 0
    for name, owners in rows:
        mine = owners, params[name].dtype
        if names and key is not None and (mine != key or size + params[name].nbytes > BUCKET_BYTES):
            buckets.append(_Bucket(tuple(names), key[0]))
            names, size = [], 0
        key = mine
        names.append(name)
        size += params[name].nbytes
    if names and key is not None:
        buckets.append(_Bucket(tuple(names), key[0]))
    return buckets
