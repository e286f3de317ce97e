"""Parts of parameters: what a rank holds, sums, saves and sends where a unit's GPUs share layers.

Tensor parallelism cuts a parameter along one dimension, by every unit at its own degree. Shards cut it along the first one. A
`Piece` is a range of each dimension that is cut, or the whole parameter. `finest` cuts several pieces of a parameter at all of
their ends. Each piece is made of the results, and two units that cut it differently hold, sum and exchange the same ones.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from autohete_fx.errors import ClusterError

_CUT = re.compile(r"@(\d+):(\d+)-(\d+):(\d+)")
_CUTS = re.compile(rf"(.+?)((?:{_CUT.pattern})+)")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cut:
    """A range of a tensor's dimension.

    Attributes:
        dim: index of the dimension.
        first: index of the range's first row.
        stop: one past the last.
        length: of the whole dimension.
    """

    dim: int
    first: int
    stop: int
    length: int

    @property
    def rows(self) -> int:
        """How many it has."""
        return self.stop - self.first

    def narrowed(self, first: int, stop: int) -> "Cut":
        """The part of the range from its own row ``first`` to before ``stop``."""
        return Cut(dim=self.dim, first=self.first + first, stop=self.first + stop, length=self.length)


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter, or a box of it.

    Attributes:
        name: of the parameter.
        cuts: the ranges, of dimensions in ascending order; none: all of it.
    """

    name: str
    cuts: tuple[Cut, ...] = ()

    @property
    def key(self) -> str:
        """The piece as saves spell it: the parameter's name, and after it each range."""
        return self.name + "".join(f"@{cut.dim}:{cut.first}-{cut.stop}:{cut.length}" for cut in self.cuts)

    @classmethod
    def of_key(cls, key: str) -> "Piece":
        """Read ``key``'s text."""
        found = _CUTS.fullmatch(key)
        if found is None:
            return cls(key)
        ranges = (map(int, numbers) for numbers in _CUT.findall(found[2]))
        return cls(
            found[1], tuple(Cut(dim=dim, first=first, stop=stop, length=length) for dim, first, stop, length in ranges)
        )

    @property
    def share(self) -> float:
        """The share of the parameter's elements that it has."""
        return math.prod(cut.rows / cut.length for cut in self.cuts)

    def along(self, dim: int) -> Cut | None:
        """The range of a dimension; None: all of it."""
        return next((cut for cut in self.cuts if cut.dim == dim), None)

    def of(self, tensor: Tensor, within: "Piece") -> Tensor:
        """A view of this piece of a tensor that has the piece ``within``, and perhaps padding after its last rows."""
        for cut in self.cuts:
            outer = within.along(cut.dim)
            tensor = tensor.narrow(cut.dim, cut.first - (outer.first if outer else 0), cut.rows)
        return tensor


def part_of(dim: int, length: int, degree: int, part: int) -> Cut:
    """The range that one of so many GPUs has, as `torch.chunk` cuts."""
    size = -(-length // degree)
    return Cut(dim=dim, first=min(part * size, length), stop=min((part + 1) * size, length), length=length)


def finest(pieces: Iterable[Piece]) -> dict[Piece, tuple[Piece, ...]]:
    """Each piece as those that it is made of, once all pieces of a parameter are cut at all of their ends.

    Raises ClusterError where pieces of a parameter remember different lengths of a dimension.
    """
    given = set(pieces)
    ends: dict[str, dict[int, set[int]]] = {}
    for piece in given:
        found = ends.setdefault(piece.name, {})
        for cut in piece.cuts:
            found.setdefault(cut.dim, {0, cut.length}).update((cut.first, cut.stop))
            if max(found[cut.dim]) != cut.length:
                raise ClusterError(
                    f"{piece.name!r} is cut at rows {sorted(found[cut.dim])} of {cut.length} along dimension {cut.dim}. Expected"
                    " was one length for all units and saves. Give the job the store of this model, or an empty one"
                )
    return {piece: _atoms(piece, ends[piece.name]) for piece in given}


def _atoms(piece: Piece, ends: Mapping[int, set[int]]) -> tuple[Piece, ...]:
    """The boxes between all ends that lie in a piece, the last dimension's next to each other."""
    sides: list[list[Cut | None]] = []
    for dim, found in sorted(ends.items()):
        length, own = max(found), piece.along(dim)
        cuts = [
            Cut(dim=dim, first=first, stop=stop, length=length) for first, stop in itertools.pairwise(sorted(found))
        ]
        cuts = [cut for cut in cuts if own is None or (own.first <= cut.first and cut.stop <= own.stop)]
        sides.append([None] * len(cuts) if len(found) == 2 else [*cuts])
    return tuple(Piece(piece.name, tuple(cut for cut in box if cut is not None)) for box in itertools.product(*sides))


def joined_tensor(pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> Tensor:
    """The tensor of a box, of those of the pieces that `finest` makes of it."""
    if len(pieces) == 1:
        return tensors[0]
    sizes, corner = list(tensors[0].shape), {}
    for cuts in zip(*(piece.cuts for piece in pieces), strict=True):
        dim = cuts[0].dim
        corner[dim] = min(cut.first for cut in cuts)
        sizes[dim] = max(cut.stop for cut in cuts) - corner[dim]
    whole = tensors[0].new_empty(sizes)
    for piece, tensor in zip(pieces, tensors, strict=True):
        place = whole
        for cut in piece.cuts:
            place = place.narrow(cut.dim, cut.first - corner[cut.dim], cut.rows)
        place.copy_(tensor)
    return whole


def covered(pieces: Iterable[Piece]) -> set[str]:
    """Parameters of which these are everything."""
    known: dict[str, set[Piece]] = {}
    for piece in pieces:
        known.setdefault(piece.name, set()).add(piece)
    whole = set()
    for name, mine in known.items():
        made_of = finest([Piece(name), *mine])
        if {part for piece in mine for part in made_of[piece]}.issuperset(made_of[Piece(name)]):
            whole.add(name)
    return whole


Held = Mapping[str, Piece]
"""By name of a parameter, the piece of it that a rank has."""
Owners = Mapping[Piece, tuple[int, ...]]
"""By piece, the ranks that hold it, ascending."""
