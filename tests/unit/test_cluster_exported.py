"""Export of a store of which parts are damaged: other copies, older saves, and the error where nothing is whole."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from autohete_fx import cluster
from autohete_fx.cluster.store import store as stores
from autohete_fx.cluster.store.about import about_entry
from autohete_fx.cluster.store.store import Place, Save, Store
from autohete_fx.errors import ClusterError

SAVES = [Save(step=step, generation="g") for step in (1, 2)]
ABOUT = about_entry(["v", "w"], {})


def weight(name: str, save: Save, first: int = 0, stop: int = 4) -> torch.Tensor:
    return torch.arange(4.0)[first:stop] + 10 * save.step + (100 if name == "w" else 0)


def write(place: str, save: Save, part: int, *keys: str) -> None:
    tensors = {f"{key}/weight": weight(key, save) for key in keys}
    Place(place).write(save, part, {**ABOUT, **tensors})


def damage(place: str, save: Save, part: int, names: str = "*.distcp") -> str:
    """Cut files of a part off. Returns its path."""
    folder = Path(place, save.folder, f"part-{part:06d}")
    for path in folder.glob(names):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return str(folder)


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    """Three, of which the first two are nodes that have a parameter each, and the last has both."""
    nodes = [f"{tmp_path}/{name}" for name in ("v", "w", "both")]
    for save in SAVES:
        write(nodes[0], save, 0, "v")
        write(nodes[1], save, 1, "w")
        write(nodes[2], save, 0, "v", "w")
    return nodes


def exported(store: Store | Path | Sequence[str | Path], path: Path, save: Save) -> bool:
    """Whether that save is exported, with its values."""
    step, found = cluster.export(store, path / "model.safetensors"), load_file(path / "model.safetensors")
    return (
        step == save.step and found.keys() == {"v", "w"} and all(torch.equal(found[k], weight(k, save)) for k in "vw")
    )


@pytest.mark.parametrize("names", [".metadata", "*.distcp", "crc32.json"])
@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_copy_is_replaced_by_that_of_another_place(
    places: list[str], tmp_path: Path, names: str, damaged: int, caplog: pytest.LogCaptureFixture
):
    path = damage(places[damaged], SAVES[1], damaged % 2, names)
    for order in (places, places[::-1]):
        assert exported(order, tmp_path, SAVES[1])
    assert f"{path} cannot be read and counts as absent" in caplog.text
    assert exported(Store(local=f"{tmp_path}/none", cloud=places[2]), tmp_path, SAVES[0 if damaged == 2 else 1])


def test_a_damaged_part_is_replaced_by_other_parts_of_its_place(tmp_path: Path):
    """They may be cut at other places."""
    place = f"{tmp_path}/disk"
    write(place, SAVES[0], 0, "v", "w")
    for part, (first, stop) in enumerate([(0, 2), (2, 4)], start=1):
        halves = {f"{name}@0:{first}-{stop}:4/weight": weight(name, SAVES[0], first, stop) for name in "vw"}
        Place(place).write(SAVES[0], part, {**ABOUT, **halves})
    damage(place, SAVES[0], 0)
    assert exported([place], tmp_path, SAVES[0])


def test_an_older_save_is_exported_and_where_none_is_whole_the_parts_are_named(places: list[str], tmp_path: Path):
    damage(places[0], SAVES[1], 0)
    assert exported(places[:2], tmp_path, SAVES[0])
    damage(places[1], SAVES[0], 1, ".metadata")
    with pytest.raises(ClusterError, match="has all weights of a model") as caught:
        cluster.export(places[:2], tmp_path / "model.safetensors")
    for place, save, part in ((places[0], SAVES[1], 0), (places[1], SAVES[0], 1)):
        assert f"'{place}/{save.folder}/part-{part:06d}' could not be read: " in str(caught.value)


def test_each_piece_is_read_once_in_the_first_place(places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    load = stores.load

    def counted(tensors: dict[str, torch.Tensor], **how: object) -> None:
        read.extend(tensors)
        load(tensors, **how)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(stores, "load", counted)
    damage(places[2], SAVES[1], 0)
    assert exported(places, tmp_path, SAVES[1])
    assert sorted(read) == ["all-names/weight", "v/weight", "w/weight"]


def test_a_path_that_no_file_can_have_is_told_before_anything_is_read(
    places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stores.Place, "saves", lambda _: pytest.fail("it was read"))
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path, "which is a folder"),
        (tmp_path / "none" / "model.safetensors", "whose folder is missing"),
        (tmp_path / "file" / "model.safetensors", "whose folder is missing"),
    ):
        with pytest.raises(ClusterError, match=words):
            cluster.export(places, path)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ClusterError, match="which cannot be written"):
        cluster.export(places, tmp_path / "file")


def test_places_may_be_paths_and_one_of_no_known_file_system_is_told(places: list[str], tmp_path: Path):
    assert exported(Path(places[2]), tmp_path, SAVES[1])
    assert exported([Path(places[0]), places[1]], tmp_path, SAVES[1])
    for url in ("nowhere://bucket/run", [places[2], "nowhere://bucket/run"]):
        with pytest.raises(
            ClusterError, match=r"the store 'nowhere://bucket/run' was given: .* Expected was a folder, or a"
        ):
            cluster.export(url, tmp_path / "model.safetensors")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_file_that_finds_no_room_is_told(
    places: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(
        ClusterError,
        match=r"weights of step 2 could not be written to .*No space left .*Expected was room for all of them",
    ):
        cluster.export(places, tmp_path / "model.safetensors")
