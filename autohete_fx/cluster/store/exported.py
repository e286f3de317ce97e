"""A plain model of a store: the newest save that has all weights, as one safetensors file.

Each part of a save tells the names of all parameters of the model, because no rank may have all parts at hand. A part that cannot
be read counts as absent. Another one that has its pieces is read then, or an older save.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from autohete_fx.cluster.model.pieces import Piece, covered, finest
from autohete_fx.cluster.store.about import ALL_NAMES, about_of
from autohete_fx.cluster.store.damage import PartError, words_of
from autohete_fx.cluster.store.places import check_known
from autohete_fx.cluster.store.readable import Readable
from autohete_fx.cluster.store.store import Parts, Save, Store, joined, read_pieces
from autohete_fx.errors import ClusterError

_Path: TypeAlias = str | os.PathLike[str]
_MOST_TROUBLES = 3
"""Of places, in an error."""


def export(store: Store | _Path | Sequence[_Path], path: str | Path) -> int:
    """Write the newest complete weights of a store as one safetensors file; returns their step.

    Args:
        store: a store, or paths of folders or URLs with saves, such as those of several nodes. A copy in
            the first of them is read before others. A part that cannot be read counts as absent, which the log says.
        path: of the file.

    Raises:
        ClusterError: no save has all weights, the file cannot be written there, or safetensors is not installed. Also for a URL
            of an unknown file system, or of one whose package is not installed.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ClusterError(
            f"a store was to be exported to {str(path)!r}, and safetensors is not installed. Expected was that package. pip install"
            " safetensors"
        ) from error
    _check_writable(Path(path))
    paths = _paths(store)
    for place in paths:
        check_known(place)
    places = [Readable(place) for place in paths]
    for save in sorted({save for place in places for save in place.saves}, reverse=True):
        weights = _weights(places, save)
        if weights:
            try:
                save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(path))
            except (OSError, SafetensorError) as error:
                raise ClusterError(
                    f"the weights of step {save.step} could not be written to {str(path)!r}: {words_of(error)}. Expected was room"
                    " for all of them, and no error of the disk. Mend that, or give another path, and export again. The store is"
                    " as it was"
                ) from error
            return save.step
    troubles = [f"{where!r} could not be read: {why}." for place in places for where, why in place.troubles.items()]
    raise ClusterError(
        " ".join(
            [
                f"no save in {', '.join(paths) or 'the store'} has all weights of a model.",
                *troubles[:_MOST_TROUBLES],
                "Expected was a complete one. Give the folders of more nodes, or the cloud's URL",
            ]
        )
    )


def _check_writable(path: Path) -> None:
    """Raise ClusterError for a path that no file can be written to, before anything is read."""
    if path.is_dir():
        trouble = "which is a folder"
    elif not path.parent.is_dir():
        trouble = "whose folder is missing"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        trouble = "which cannot be written"
    else:
        return
    raise ClusterError(
        f"a store was to be exported to {str(path)!r}, {trouble}. Expected was a file in a folder that can be written. Correct the"
        " path, or make the folder"
    )


def _weights(places: Sequence[Readable], save: Save) -> dict[str, Tensor]:
    """All weights of a save by name; none where the parts that can be read lack some."""
    while True:
        parts = {key: row for place in reversed(places) for key, row in place.saves.get(save, {}).items()}
        try:
            return _read(parts)
        except PartError as error:
            for place in places:
                if any(where == error.path for where, _ in place.saves.get(save, {}).values()):
                    place.leave_out(save, [place.failed(save, error)])


def _read(parts: Parts) -> dict[str, Tensor]:
    """All weights by name; none where parts lack some. Raises PartError for a part that cannot be read."""
    pieces = {key: Piece.of_key(key) for key in parts}
    if not parts or covered(pieces.values()) != _names_of_model(parts):
        return {}
    weights = {
        key: (where, tuple(entry for entry in entries if entry.key == f"{key}/weight"))
        for key, (where, entries) in parts.items()
        if key != ALL_NAMES
    }
    whole = {name: Piece(name) for name in sorted({pieces[key].name for key in weights})}
    made_of = finest([*whole.values(), *(pieces[key] for key in weights)])
    tensors, _ = read_pieces(weights, [piece for all_of in whole.values() for piece in made_of[all_of]], made_of)
    return {name: joined(name, made_of[all_of], tensors)[f"{name}/weight"] for name, all_of in whole.items()}


def _names_of_model(parts: Parts) -> set[str]:
    names = about_of(parts).get("names")
    return {ALL_NAMES, *names} if names else set()


def _paths(store: Store | _Path | Sequence[_Path]) -> list[str]:
    if isinstance(store, Store):
        return [place for place in (store.disk, store.cloud) if place]
    return [os.fspath(place) for place in ([store] if isinstance(store, (str, os.PathLike)) else store)]
