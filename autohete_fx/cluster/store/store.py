"""The store of a job: states of parameters on every node's disk, and one copy in the cloud.

A save of a step has a part for each rank, a checkpoint of `torch.distributed.checkpoint` with tensors by name: ``NAME/weight`` and
``NAME/state/KEY``. Where a unit's GPUs share a layer, a part has the box that its rank holds, as
``NAME@DIM:FIRST-STOP:LENGTH/weight``. There is a range for each dimension that is cut. No part depends on the plan but by the names
in it, so any later plan reads what it needs from any part. A part is complete when its metadata is there, which is written last;
parts that were cut off are never read.

    LOCAL/step-000000020-GENERATION/part-000003/      each rank, all that it holds, with checksums
    CLOUD/step-000000200-GENERATION/part-000003/      each rank, what it is the first owner of
    .../step-000000200-GENERATION/committed           empty: all parts were written there
    LOCAL/step-000000200-GENERATION/in-cloud          empty: and those in the cloud
    .../owner                                         the generation that saves there

A generation is one start of the job. Parts of two generations are never mixed: after a restart the same step may have been trained
again by another plan, with other rounding.
"""

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from autohete_fx.cluster.model.pieces import Piece, joined_tensor
from autohete_fx.cluster.store import checksums
from autohete_fx.cluster.store.damage import PartError
from autohete_fx.cluster.store.places import are_same, check_known
from autohete_fx.cluster.store.sources import ASSUMED, Bandwidths
from autohete_fx.errors import ClusterError
from autohete_fx.internals.checkpoints import FsspecReader, FsspecWriter, alone, metadata_of

log = logging.getLogger(__name__)

_SAVE = re.compile(r"step-(\d{9})-(\w+)")
_PART = re.compile(r"part-(\d+)")
COMMITTED, IN_CLOUD = "committed", "in-cloud"
"""Marks of saves."""
_METADATA = ".metadata"
_OWNER = "owner"
"""A file with the generation of the start that saves in a place."""
_KEY = re.compile(r"(.+?)/(weight|state/[^/]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Where a job saves, and how often.

    Attributes:
        local: a folder on a disk of each node, or in its memory (``/dev/shm``). Nodes may have the same path for different disks.
        cloud: a URL of any file system that fsspec knows, such as ``s3://bucket/run``; None: only disks of nodes.
        every: steps from one save on the disks to the next.
        cloud_every: steps from one save in the cloud to the next, a multiple of ``every``.
        keep: committed saves that are kept in each place. Disks keep the cloud's newest besides, so that only what a lost node
            had is read there.
        cloud_timeout_s: seconds after which a cloud that does not answer counts as down, when a job begins.
        bandwidths: at which nodes read, by which a job that goes on chooses where from.

    Raises:
        ClusterError: numbers that are not positive, or no multiple; places that no job can save in (`check_known`), or one place
            as both.
    """

    local: str | os.PathLike[str]
    cloud: str | None = None
    every: int = 20
    cloud_every: int = 200
    keep: int = 2
    cloud_timeout_s: float = 30.0
    bandwidths: Bandwidths = ASSUMED

    def __post_init__(self) -> None:
        if min(self.every, self.cloud_every, self.keep) < 1 or self.cloud_every % self.every:
            raise ClusterError(
                f"a store was given with every={self.every}, cloud_every={self.cloud_every}, keep={self.keep}. Expected were"
                " positive numbers, and cloud_every a multiple of every. Correct them"
            )
        check_known(self.disk)
        if self.cloud is not None:
            check_known(self.cloud)
            if are_same(self.disk, self.cloud):
                raise ClusterError(
                    f"a store was given with local={self.disk!r} and cloud={self.cloud!r}, which are one place. Expected were two,"
                    " as each removes what the other has saved. Name two folders, or leave out cloud="
                )

    @property
    def disk(self) -> str:
        """The folder ``local`` as text."""
        return os.fspath(self.local)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Save:
    """A step that was saved, by one start of the job."""

    step: int
    generation: str

    @property
    def folder(self) -> str:
        """Its folder's name."""
        return f"step-{self.step:09d}-{self.generation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A saved tensor.

    Attributes:
        key: in its part.
        sizes: of the tensor.
        dtype: of the tensor.
    """

    key: str
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * torch.Size(self.sizes).numel()

    def empty(self) -> Tensor:
        """A tensor to read into."""
        return torch.empty(self.sizes, dtype=self.dtype)


Parts = Mapping[str, tuple[str, tuple[Entry, ...]]]
"""By key of a parameter's piece: the path of a part, and its tensors there."""


class Place:
    """A folder or URL with saves.

    Args:
        path: of the folder, or a URL.
    """

    def __init__(self, path: str) -> None:
        self._path = path.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self._path)

    def write(self, save: Save, part: int, tensors: Mapping[str, Tensor]) -> str:
        """Write a part; returns its path. It is complete when this returns. Any error of the file system is raised."""
        path = f"{self._path}/{save.folder}/part-{part:06d}"
        root = f"{self._root}/{save.folder}/part-{part:06d}"
        self._fs.makedirs(root, exist_ok=True)
        self._fs.pipe_file(f"{root}/{checksums.FILE}", checksums.encoded(tensors))
        if isinstance(self._fs, LocalFileSystem):
            with open(f"{root}/{checksums.FILE}", "rb+") as file:
                os.fsync(file.fileno())  # PyTorch does so with its files
        with alone():
            marked = {**tensors, checksums.MARK: torch.empty(0, device="cpu")}
            save_checkpoint(marked, storage_writer=FsspecWriter(path), no_dist=True)
        return path

    def saves(self) -> list[Save]:
        """All saves with any parts, the newest last."""
        found = (_SAVE.fullmatch(name) for name in self._names(self._root))
        return sorted(Save(step=int(match[1]), generation=match[2]) for match in found if match)

    def parts(self, save: Save) -> Parts:
        """Pieces of parameters in the complete parts of a save. A piece in several parts is given for one of them (`add_part`).

        A part whose metadata is damaged counts as absent, which the log says. Any error of the file system is raised.
        """
        found: dict[str, tuple[str, tuple[Entry, ...]]] = {}
        for name in self.part_names(save):
            try:
                add_part(found, self.part(save, name))
            except PartError as error:
                log.warning("the part %s counts as absent, as its metadata is damaged: %s", error.path, error.cause)
        return found

    def part_names(self, save: Save) -> list[str]:
        """Folders of the complete parts of a save."""
        folder = f"{self._root}/{save.folder}"
        parts = (name for name in self._names(folder) if _PART.fullmatch(name))
        return [name for name in parts if self._fs.exists(f"{folder}/{name}/{_METADATA}")]

    def part(self, save: Save, name: str) -> Parts:
        """Pieces of parameters in one part. Raises PartError where its metadata is damaged, and any error of the file system."""
        path = f"{self._path}/{save.folder}/{name}"
        raw = self._fs.cat_file(f"{self._root}/{save.folder}/{name}/{_METADATA}")
        try:
            return {key: (path, entries) for key, entries in _entries(metadata_of(raw)).items()}
        except Exception as error:
            raise PartError(path, error) from error

    def file(self, name: str) -> bytes:
        """A file of this folder; empty where there is none. Any other error of the file system is raised."""
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return b""

    def check_writable(self, name: str) -> None:
        """Write a file of that name and remove it. Any error of the file system is raised."""
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{name}", b"")
        self._fs.rm_file(f"{self._root}/{name}")

    def take(self, generation: str) -> None:
        """Note which start of the job saves here from now on. Any error of the file system is raised."""
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(f"{self._root}/{_OWNER}", generation.encode())

    def owner(self) -> str:
        """The generation that `take` has noted last; "" where none was. Any error of the file system is raised."""
        return self.file(_OWNER).decode(errors="replace")

    def mark(self, save: Save, mark: str) -> None:
        """Note that all ranks have written their parts of a save. Any error of the file system is raised."""
        self._fs.pipe_file(f"{self._root}/{save.folder}/{mark}", b"")

    def is_marked(self, save: Save, mark: str) -> bool:
        """Whether `mark` was called for a save."""
        return bool(self._fs.exists(f"{self._root}/{save.folder}/{mark}"))

    def remove(self, save: Save) -> None:
        """Remove a save. One that another rank removes at the same time is no error."""
        self._remove(f"{self._root}/{save.folder}")

    def remove_part(self, save: Save, part: int, *, with_empty_save: bool = False) -> None:
        """Remove a part, whatever there is of it; and a save that has no parts then, if nobody writes any."""
        folder = f"{self._root}/{save.folder}"
        self._remove(f"{folder}/part-{part:06d}")
        if with_empty_save and not any(map(_PART.fullmatch, self._names(folder))):
            self._remove(folder)

    def _remove(self, folder: str) -> None:
        """Remove a folder. What says that something is whole goes first, as this may be cut off."""
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = [str(path) for path in self._fs.find(folder)]
            first = [path for path in names if path.rpartition("/")[2] in (COMMITTED, IN_CLOUD, _METADATA)]
            if first:
                self._fs.rm(first)
            self._fs.rm(folder, recursive=True)

    def _names(self, path: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            return [str(name).rstrip("/").rpartition("/")[2] for name in self._fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []


def bytes_of(entries: Iterable[Entry]) -> int:
    """Bytes of saved tensors."""
    return sum(entry.num_bytes for entry in entries)


def add_part(found: dict[str, tuple[str, tuple[Entry, ...]]], part: Parts) -> None:
    """Add the pieces of one more part. A piece in several parts is taken from one that has the most bytes of it.

    Copies of a weight have as many. The words about the job (`about`) are longer where a rank had an optimizer to name.
    """
    for key, row in part.items():
        if key not in found or bytes_of(row[1]) >= bytes_of(found[key][1]):
            found[key] = row


def read_parts(parts: Parts, names: Collection[str]) -> dict[str, dict[str, Tensor]]:
    """Tensors of parameters, by name and key; no other bytes are read. Raises PartError for a part that cannot be read."""
    by_path: dict[str, list[str]] = {}
    for name in names:
        by_path.setdefault(parts[name][0], []).append(name)
    found: dict[str, dict[str, Tensor]] = {}
    for path, mine in by_path.items():
        tensors = {entry.key: entry.empty() for name in mine for entry in parts[name][1]}
        try:
            reader = FsspecReader(path)
            with alone():
                load(tensors, storage_reader=reader, no_dist=True)
            is_marked = any(index.fqn == checksums.MARK for index in reader.storage_data)
            checksums.check(tensors, Place(path).file(checksums.FILE), path, is_marked=is_marked)
        except (Exception, CheckpointException) as error:
            raise PartError(path, error) from error
        for name in mine:
            found[name] = {entry.key: tensors[entry.key] for entry in parts[name][1]}
    return found


def read_pieces(
    parts: Parts, wanted: Collection[Piece], made_of: Mapping[Piece, Sequence[Piece]]
) -> tuple[dict[str, dict[str, Tensor]], int]:
    """Read pieces out of the saved ones that have them.

    Args:
        parts: saved pieces.
        wanted: finest pieces.
        made_of: by piece, the finest ones that it is made of.

    Returns:
        Tensors by the key of a piece and their own; and bytes of the saved pieces that were read.
    """
    sources: dict[Piece, Piece] = {}
    for key in parts:
        saved = Piece.of_key(key)
        for piece in made_of.get(saved, ()):
            sources.setdefault(piece, saved)
    keys = sorted({sources[piece].key for piece in wanted})
    read = read_parts(parts, keys)
    found = {piece.key: taken(read[sources[piece].key], sources[piece], piece) for piece in wanted}
    return found, sum(bytes_of(parts[key][1]) for key in keys)


def taken(tensors: Mapping[str, Tensor], held: Piece, piece: Piece) -> dict[str, Tensor]:
    """The tensors of a piece within one that is held. Those that have the weight's shape are cut."""
    if piece == held:
        return dict(tensors)
    shape = tensors[f"{held.key}/weight"].shape
    return {
        f"{piece.key}/{_split(key)[1]}": piece.of(tensor, held).clone() if tensor.shape == shape else tensor
        for key, tensor in tensors.items()
    }


def joined(name: str, pieces: Sequence[Piece], found: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of consecutive pieces of a parameter, as one, by keys with the parameter's name."""
    first = pieces[0]
    shape = found[first.key][f"{first.key}/weight"].shape
    made: dict[str, Tensor] = {}
    for key, tensor in found[first.key].items():
        _, rest = _split(key)
        made[f"{name}/{rest}"] = tensor
        if tensor.shape == shape:
            made[f"{name}/{rest}"] = joined_tensor(
                pieces, [found[piece.key][f"{piece.key}/{rest}"] for piece in pieces]
            )
    return made


def _entries(metadata: Metadata) -> dict[str, tuple[Entry, ...]]:
    found: dict[str, list[Entry]] = {}
    for key, about in metadata.state_dict_metadata.items():
        if key == checksums.MARK:
            continue
        assert isinstance(about, TensorStorageMetadata), "parts have tensors alone"
        entry = Entry(key=key, sizes=tuple(about.size), dtype=about.properties.dtype)
        found.setdefault(_split(key)[0], []).append(entry)
    return {name: tuple(entries) for name, entries in found.items()}


def _split(key: str) -> tuple[str, str]:
    """A tensor's key, as its piece's and what it is of that. Names of modules may have slashes."""
    found = _KEY.fullmatch(key)
    return (found[1], found[2]) if found else (key.partition("/")[0], key.partition("/")[2])
