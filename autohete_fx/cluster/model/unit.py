"""The GPUs of a stage: which piece of a parameter each has, and modules that gather what others have.

A unit of ``degree`` times ``shards`` GPUs shares layers by tensor parallelism along the first, and rows along the second. Each GPU
along the first sees the same samples, and each along the second its own part of every micro-batch. A parameter of which tensor
parallelism leaves 64 KiB or more is sharded along its first dimension, if every shard gets rows. All others stay whole on each,
and so do those of which tensor parallelism leaves more rows on one GPU than on another.

Enter a rank's `UnitPlace`; leave pieces, padded shards and shares of gradients. `autohete_fx.runtime.shard` gathers in forward and
backward, and gives each rank the mean of its rows' gradients. The rows are ordinary parameters: sums, optimizers and saves know
them by their pieces.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autohete_fx.cluster.model.batches import Shape
from autohete_fx.cluster.model.pieces import Cut, Piece, part_of
from autohete_fx.cluster.model.tensor_parallel import TensorLayout
from autohete_fx.graph.ops import SMALLEST_COPY_BYTES
from autohete_fx.runtime.shard.layout import Layout
from autohete_fx.runtime.shard.parts import Part
from autohete_fx.runtime.shard.ranks import Ranks, parallel_ranks_of, ranks_of
from autohete_fx.runtime.shard.surface import read_wholes


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlace:
    """Where in its unit a GPU is.

    Attributes:
        degree: of tensor parallelism.
        part: index along it.
        shards: of the unit.
        shard: index among them.
    """

    degree: int = 1
    part: int = 0
    shards: int = 1
    shard: int = 0

    def piece(self, layout: TensorLayout, name: str, shape: Shape) -> Piece:
        """The piece of a parameter that the GPU has, without padding."""
        cut = layout.cut(name, shape.sizes, self.degree, self.part)
        cuts = () if cut is None else (cut,)
        if not self.is_sharded(layout, name, shape):
            return Piece(name, cuts)
        rows = (
            cut if cut is not None and cut.dim == 0 else Cut(dim=0, first=0, stop=shape.sizes[0], length=shape.sizes[0])
        )
        mine = part_of(0, rows.rows, self.shards, self.shard)
        return Piece(name, (rows.narrowed(mine.first, mine.stop), *(cut for cut in cuts if cut.dim)))

    def is_sharded(self, layout: TensorLayout, name: str, shape: Shape) -> bool:
        """Whether each GPU has some of the rows alone: the same answer on all of them.

        Where tensor parallelism has more rows on one GPU than on another, reads of padded shards would be other code there.
        """
        if self.shards == 1 or not shape.sizes:
            return False
        cuts = [layout.cut(name, shape.sizes, self.degree, part) for part in range(self.degree)]
        lengths = {cut.rows if cut is not None and cut.dim == 0 else shape.sizes[0] for cut in cuts}
        num_bytes = math.prod(shape.sizes) * shape.dtype.itemsize // (1 if cuts[0] is None else self.degree)
        has_rows = part_of(0, min(lengths), self.shards, self.shards - 1).rows > 0
        return len(lengths) == 1 and has_rows and num_bytes >= SMALLEST_COPY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The GPUs of a stage, as one of them sees them.

    Attributes:
        layout: of the model.
        place: of this rank.
        tensor_parallel: the ranks that share layers with this one; None where it has them alone.
        sharded: the ranks that hold shards with this one; None where it has all rows.
        ranks: by which shards are gathered (`with_ranks`).
    """

    layout: TensorLayout = field(default_factory=TensorLayout)
    place: UnitPlace = field(default_factory=UnitPlace)
    tensor_parallel: DeviceMesh | None = None
    sharded: DeviceMesh | None = None
    ranks: Ranks | None = None

    def with_ranks(self) -> "Unit":
        """The unit with its groups for collectives of shards, if it has any. All ranks of the unit call it."""
        if self.sharded is None:
            return self
        parallel = self.tensor_parallel
        ranks = ranks_of(self.sharded) if parallel is None else parallel_ranks_of(self.sharded, parallel)
        return replace(self, ranks=ranks)

    def piece(self, name: str, shape: Shape) -> Piece:
        """The piece of a parameter that this rank has."""
        return self.place.piece(self.layout, name, shape)

    def shares(self, shapes: Mapping[str, Shape], names: Iterable[str]) -> dict[str, float]:
        """This rank's share of the gradients of parameters that several GPUs have whole, where each has the whole gradient of
        its samples. Shards' gradients are those of the unit already."""
        found: dict[str, float] = {}
        for name in names:
            is_shared = name in self.layout.dims or name in self.layout.summed
            copies = 1 if is_shared else self.place.degree
            copies *= 1 if self.place.is_sharded(self.layout, name, shapes[name]) else self.place.shards
            if copies > 1:
                found[name] = 1 / copies
        return found

    def part(self, whole: Tensor, name: str, shape: Shape, device: torch.device) -> Tensor:
        """A copy of this rank's piece of a parameter, with zeros after its rows so that all shards have as many. Without values
        where the whole has none."""
        own = self.piece(name, shape).of(whole, Piece(name))
        if not self.place.is_sharded(self.layout, name, shape):
            made = torch.empty(own.shape, dtype=own.dtype, device=device)
            return made if own.is_meta else made.copy_(own)
        rows = -(-self._local_size(name, shape)[0] // self.place.shards)
        padded = torch.zeros((rows, *own.shape[1:]), dtype=own.dtype, device=device)
        if not own.is_meta:
            padded[: own.shape[0]].copy_(own)
        return padded

    def hold(
        self,
        stage: nn.Module,
        params: Mapping[str, nn.Parameter],
        shapes: Mapping[str, Shape],
        layouts: Mapping[str, Layout],
    ) -> None:
        """Let the modules of a stage read wholes.

        Args:
            stage: whose modules have this rank's shards.
            params: by name, these and other parameters.
            shapes: of whole parameters.
            layouts: by name, of those that tensor parallelism reads as DTensors.
        """
        assert self.ranks is not None
        parts = []
        for name, param in params.items():
            is_shard, layout = self.place.is_sharded(self.layout, name, shapes[name]), layouts.get(name)
            if is_shard or layout is not None:
                size = self._local_size(name, shapes[name])
                parts.append((param, Part(size=size, group=self.ranks.digest, is_shard=is_shard, layout=layout)))
        read_wholes(stage, parts)

    def _local_size(self, name: str, shape: Shape) -> tuple[int, ...]:
        """The size of what the ranks along ``sharded`` hold together."""
        cut, sizes = self.layout.cut(name, shape.sizes, self.place.degree, self.place.part), list(shape.sizes)
        if cut is not None:
            sizes[cut.dim] = cut.rows
        return tuple(sizes)
