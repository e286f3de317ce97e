"""A plain model of a store: the newest save that has all weights, as one safetensors file.

Each part of a save tells the names of all parameters of the model, because no rank may have all parts at hand.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from autohete_fx.cluster.model.pieces import Piece, covered, finest
from autohete_fx.cluster.store.about import ALL_NAMES, about_of
from autohete_fx.cluster.store.store import Entry, Parts, Place, Store, joined, read_pieces
from autohete_fx.errors import ClusterError


def export(store: Store | str | Sequence[str], path: str | Path) -> int:
    """Write the newest complete weights of a store as one safetensors file; returns their step.

    Args:
        store: a store, or paths of folders or URLs with saves, such as those of several nodes.
        path: of the file.

    Raises:
        ClusterError: no save has all weights, or safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ClusterError(
            f"a store was to be exported to {str(path)!r}, and safetensors is not installed. Expected was that package. pip install"
            " safetensors"
        ) from error
    places = [Place(place) for place in _paths(store)]
    for save in sorted({save for place in places for save in place.saves()}, reverse=True):
        parts: dict[str, tuple[str, tuple[Entry, ...]]] = {}
        for place in places:
            parts.update(place.parts(save))
        pieces = {key: Piece.of_key(key) for key in parts}
        if parts and covered(pieces.values()) == _names_of_model(parts):
            weights = {
                key: (where, tuple(entry for entry in entries if entry.key == f"{key}/weight"))
                for key, (where, entries) in parts.items()
                if key != ALL_NAMES
            }
            whole = {name: Piece(name) for name in sorted({pieces[key].name for key in weights})}
            made_of = finest([*whole.values(), *(pieces[key] for key in weights)])
            tensors, _ = read_pieces(
                weights, [piece for all_of in whole.values() for piece in made_of[all_of]], made_of
            )
            named = {name: joined(name, made_of[all_of], tensors)[f"{name}/weight"] for name, all_of in whole.items()}
            save_file({name: tensor.contiguous() for name, tensor in named.items()}, str(path))
            return save.step
    raise ClusterError(
        f"no save in {', '.join(_paths(store)) or 'the store'} has all weights of a model. Expected was a complete one. Give the"
        " folders of more nodes, or the cloud's URL"
    )


def _names_of_model(parts: Parts) -> set[str]:
    names = about_of(parts).get("names")
    return {ALL_NAMES, *names} if names else set()


def _paths(store: Store | str | Sequence[str]) -> Iterator[str] | list[str]:
    if isinstance(store, Store):
        return [place for place in (store.disk, store.cloud) if place]
    return [store] if isinstance(store, str) else list(store)
