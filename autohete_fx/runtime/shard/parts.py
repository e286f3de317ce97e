"""A parameter that ranks hold together: its part on this rank, and the whole.

In: parameters, by identity. Out: a `Part`, which nothing on the parameter refers to: a copy of it is nobody's part until
somebody says so. The gradient of each is watched from then on: a norm of one rank's gradients is not the norm of all. A write that
the version counter of a gradient does not count, as ``grad.data`` makes, is not seen.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from autohete_fx.runtime.pending.backward import leave_to_step, that_reads_nothing
from autohete_fx.runtime.shard.layout import Layout
from autohete_fx.runtime.shard.ranks import Ranks, ranks_by_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A parameter's share of a rank.

    Attributes:
        size: of the parameter that the ranks hold together.
        group: digest of the ranks.
        is_shard: whether the rank holds some of the rows; else it holds all, as every rank does.
        layout: of the DTensor that this is a local tensor of, by tensor parallelism with other ranks; None where it is all.
        number: the same on all ranks, and of no other parameter of theirs.
    """

    size: tuple[int, ...]
    group: str
    is_shard: bool
    layout: Layout | None = None
    number: int = field(default=0, compare=False)

    @property
    def ranks(self) -> Ranks:
        """The ranks that hold it."""
        return ranks_by_digest(self.group)

    @property
    def averaged_over(self) -> dist.ProcessGroup | None:
        """The ranks over which a step averages its gradient: those that hold the same of it. None where no other does."""
        ranks = self.ranks
        return ranks.replicas if self.is_shard else ranks.everyone if ranks.count * ranks.num_replicas > 1 else None

    @property
    def is_joint(self) -> bool:
        """Whether its gradient is one of several ranks."""
        return bool(self.groups) or self.averaged_over is not None

    @property
    def full_size(self) -> tuple[int, ...]:
        """The size of the parameter over all ranks."""
        return self.size if self.layout is None else self.layout.size

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over which ranks hold different elements; none where this rank holds all."""
        parallel = () if self.layout is None else self.layout.groups
        return ((self.ranks.group,) if self.is_shard else ()) + parallel

    @property
    def is_dtensor(self) -> bool:
        """Whether state dicts have it as a DTensor."""
        return self.is_shard or self.layout is not None

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How it lies over the mesh of its ranks."""
        ranks, placed = self.ranks, Shard(0) if self.is_shard else Replicate()
        parallel = () if ranks.tensor_parallel is None else (Replicate(),)
        parallel = parallel if self.layout is None else self.layout.placements
        return (*parallel, *(Replicate(),) * (ranks.mesh.ndim - len(parallel) - 1), placed)

    @property
    def rows(self) -> int:
        """The rows of a shard, padding included: as many as `torch.chunk` gives to the first."""
        return -(-self.size[0] // self.ranks.count)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a rank's part, padding included."""
        return (self.rows, *self.size[1:]) if self.is_shard else self.size

    @property
    def num_own_rows(self) -> int:
        """The rows of this rank's shard, without padding; none where the ranks before it have all."""
        return min(max(self.size[0] - self.ranks.rank * self.rows, 0), self.rows)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor, a view without padding."""
        if not self.is_shard:
            return whole
        return whole.narrow(0, min(self.ranks.rank * self.rows, self.size[0]), self.num_own_rows)

    def unpadded(self, part: Tensor) -> Tensor:
        """This rank's part without padding, a view."""
        return part[: self.num_own_rows] if self.is_shard else part

    def padded(self, own: Tensor) -> Tensor:
        """A new tensor of these rows, with zeros as padding."""
        if not self.is_shard:
            return own.clone()
        shard = own.new_zeros(self.shape)
        shard[: own.shape[0]].copy_(own)
        return shard


_parts = WeakIdKeyDictionary()
_noted = WeakIdKeyDictionary()  # parameter -> `_Noted`


@dataclass(frozen=True, slots=True)
class _Noted:
    """A gradient as backward has left it, its version, and whether a step has taken it since. A step of ours that clips writes it
    any time: it then has no version."""

    grad: TensorWeakRef
    version: int | None
    is_taken: bool = False


def part_of(param: Tensor) -> Part | None:
    """The part of a parameter; None where it is this process's alone."""
    return _parts.get(param)


def shard_of(param: Tensor) -> Part | None:
    """Likewise, None also where every rank holds all of it."""
    part = _parts.get(param)
    return part if part is not None and part.is_shard else None


def dtensor_part_of(param: Tensor) -> Part | None:
    """Likewise, None where state dicts have an ordinary tensor."""
    part = _parts.get(param)
    return part if part is not None and part.is_dtensor else None


def is_any_known() -> bool:
    """Whether this process holds any parameter with others."""
    return bool(_parts)


def note_part(param: Tensor, part: Part) -> None:
    """A parameter is held with other ranks from now on."""
    _parts[param] = part
    if part.is_joint and (param.is_floating_point() or param.is_complex()):
        _watch_gradient(param)
    if part.averaged_over is not None or not part.is_shard:
        leave_to_step(param)


def _watch_gradient(param: Tensor) -> None:
    """Likewise of one that is frozen now: PyTorch lets it have no hook meanwhile."""
    requires_grad = param.requires_grad
    param.requires_grad_(True).register_post_accumulate_grad_hook(note_gradient)
    param.requires_grad_(requires_grad)


@that_reads_nothing
def note_gradient(param: Tensor) -> None:
    """The gradient of a parameter is right as it is now."""
    if param.grad is not None:
        _noted[param] = _Noted(TensorWeakRef(param.grad), param.grad._version)


def note_taken(params: Iterable[Tensor]) -> None:
    """A step takes the gradients of these."""
    for param in params:
        if (noted := _noted.get(param)) is not None:
            _noted[param] = replace(noted, is_taken=True)


def note_scaled(params: Iterable[Tensor], scale: Tensor | None) -> None:
    """A step scales the gradients of these by the norm of all ranks, or by nothing."""
    for param in params if scale is not None else ():
        if (noted := _noted.get(param)) is not None:
            _noted[param] = replace(noted, version=None)


def written_since_backward(params: Iterable[Tensor], *, but_taken: bool = False) -> list[Tensor]:
    """The parameters that ranks hold together, and whose gradients somebody has written to or replaced since backward. One that is
    all zeros counts as none.

    Args:
        but_taken: leave out those that a step has taken since.
    """
    found = []
    for param in params:
        noted, grad = _noted.get(param), param.grad
        if noted is None or grad is None:
            continue
        is_noted = noted.grad() is grad
        if noted.is_taken and (but_taken or not is_noted):  # another pass made it, such as torch.autograd.grad
            continue
        if not (is_noted and noted.version in (None, grad._version)) and bool(grad.any()):
            found.append(param)
    return found
