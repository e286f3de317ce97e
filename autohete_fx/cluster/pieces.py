"""Parts of parameters: what a rank holds, sums, saves and sends where a unit's GPUs share layers.

A parameter that tensor parallelism cuts is cut along one dimension, by every unit at its own degree. A `Piece` is a range of
that dimension, or the whole parameter. `finest` cuts several pieces of a parameter at all of their ends. Each piece is made of
the results, and two units that cut it differently hold, sum and exchange the same ones.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from autohete_fx.errors import ClusterError

_CUT = re.compile(r"(.+)@(\d+):(\d+)-(\d+):(\d+)")


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

    def of(self, tensor: Tensor, within: "Cut | None" = None) -> Tensor:
        """A view of this range of a tensor, which is whole or has the range ``within``."""
        start = within.first if within else 0
        return tensor.narrow(self.dim, self.first - start, self.stop - self.first)


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter, or a range of it.

    Attributes:
        name: of the parameter.
        cut: the range; None: all of it.
    """

    name: str
    cut: Cut | None = field(default=None, kw_only=True)

    @property
    def key(self) -> str:
        """The piece as saves spell it: the parameter's name, and after it the range where there is one."""
        cut = self.cut
        return self.name if cut is None else f"{self.name}@{cut.dim}:{cut.first}-{cut.stop}:{cut.length}"

    @classmethod
    def of_key(cls, key: str) -> "Piece":
        """Read ``key``'s text."""
        found = _CUT.fullmatch(key)
        if found is None:
            return cls(key)
        dim, first, stop, length = map(int, found.groups()[1:])
        return cls(found[1], cut=Cut(dim=dim, first=first, stop=stop, length=length))

    def of(self, tensor: Tensor, within: "Piece") -> Tensor:
        """A view of this piece of a tensor that has the piece ``within``."""
        return tensor if self == within or self.cut is None else self.cut.of(tensor, within.cut)


def part_of(dim: int, length: int, degree: int, part: int) -> Cut:
    """The range that one of so many GPUs has, as `torch.chunk` cuts."""
    size = -(-length // degree)
    return Cut(dim=dim, first=min(part * size, length), stop=min((part + 1) * size, length), length=length)


def finest(pieces: Iterable[Piece]) -> dict[Piece, tuple[Piece, ...]]:
    """Each piece as those that it is made of, once all pieces of a parameter are cut at all of their ends.

    Raises ClusterError where pieces of a parameter are cut along different dimensions, or remember different lengths.
    """
    given = set(pieces)
    cuts: dict[str, set[Cut]] = {}
    for piece in given:
        if piece.cut is not None:
            cuts.setdefault(piece.name, set()).add(piece.cut)
    atoms = {name: _atoms(name, found) for name, found in cuts.items()}
    found: dict[Piece, tuple[Piece, ...]] = {}
    for piece in given:
        cut, every = piece.cut, atoms.get(piece.name, (Piece(piece.name),))
        if cut is None:
            found[piece] = every
        else:
            found[piece] = tuple(
                atom
                for atom in every
                if atom.cut is None or (cut.first <= atom.cut.first and atom.cut.stop <= cut.stop)
            )
    return found


def _atoms(name: str, cuts: Iterable[Cut]) -> tuple[Piece, ...]:
    kinds = {(cut.dim, cut.length) for cut in cuts}
    if len(kinds) > 1:
        raise ClusterError(
            f"{name!r} is cut along {sorted(kinds)} (dimension, length). Expected was one dimension for all units and saves."
            " Use the tp_plan of the saved job, or begin again with an empty store"
        )
    ((dim, length),) = kinds
    ends = sorted({0, length, *(end for cut in cuts for end in (cut.first, cut.stop))})
    if ends == [0, length]:
        return (Piece(name),)
    return tuple(
        Piece(name, cut=Cut(dim=dim, first=first, stop=stop, length=length)) for first, stop in itertools.pairwise(ends)
    )


def covered(pieces: Iterable[Piece]) -> set[str]:
    """Parameters of which these are everything."""
    known = set(pieces)
    whole = {piece.name for piece in known if piece.cut is None}
    rows: dict[str, set[Cut]] = {}
    for piece in known:
        if piece.cut is not None:
            rows.setdefault(piece.name, set()).add(piece.cut)
    for name, cuts in rows.items():
        reached = 0
        for cut in sorted(cuts, key=lambda cut: cut.first):
            if cut.first <= reached:
                reached = max(reached, cut.stop)
        if all(reached >= cut.length for cut in cuts):
            whole.add(name)
    return whole


Held = Mapping[str, Piece]
"""By name of a parameter, the piece of it that a rank has."""
Owners = Mapping[Piece, tuple[int, ...]]
"""By piece, the ranks that hold it, ascending."""
