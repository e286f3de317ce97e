"""Saves of one rank, of a group whose others are not there."""

import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

import autohete_fx
from autohete_fx.cluster.model.pieces import Piece
from autohete_fx.cluster.store import store as stores
from autohete_fx.cluster.store.about import ALL_NAMES, about_entry, about_of, check_optimizer, differences
from autohete_fx.cluster.store.readable import Readable
from autohete_fx.cluster.store.restore import Restored, restore
from autohete_fx.cluster.store.saving import Saved, Saver
from autohete_fx.cluster.store.store import COMMITTED, Place, Save, Store, checksums, read_parts
from autohete_fx.errors import ClusterError
from autohete_fx.internals.checkpoints import alone
from autohete_fx.internals.fake_group import fake_default_group


def test_a_part_that_is_whole_is_not_written_again_when_the_cloud_gets_its_step(tmp_path: Path):
    piece = Piece("w")
    states = {piece: {"w/weight": torch.arange(4.0)}}
    with fake_default_group(1):
        store = Store(local=f"{tmp_path}/disk", cloud=f"{tmp_path}/cloud", every=1, cloud_every=1)
        saver = Saver(store, "g", None, owned=[piece], held={"w": piece}, all_names=["w"], cleans=True)
        saver.save(1, states, cloud=False)
        assert saver.drain() == Saved(local=1, cloud=-1)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("disk/*/*/*")}
        saver.save(1, states, cloud=True)
        assert saver.drain() == Saved(local=1, cloud=1)
        assert before and before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("disk/*/*/*")}
        assert len(list(tmp_path.glob("cloud/*/*/*"))) == len(before)


def test_a_writer_that_is_done_does_not_give_another_one_the_warning():
    """Warnings are errors here, and a save that ends in one is none."""
    before = warnings.filters[:]
    first, second = alone(), alone()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    warnings.warn("torch.distributed is disabled, unavailable or uninitialized, and so on", stacklevel=1)
    second.__exit__(None, None, None)
    assert warnings.filters[:] == before


W = Piece("w")


def start(
    folder: Path,
    generation: str,
    began: Save | None,
    *steps: int,
    cut_off: int = -1,
    keep: int = 2,
    in_cloud: Collection[int] = range(100),
) -> Save:
    """A start of the job that saves these steps, some in the cloud too, and is killed while it writes one. Returns the last one."""
    store = Store(local=f"{folder}/disk", cloud=f"{folder}/cloud", every=1, cloud_every=1, keep=keep)
    saver = Saver(store, generation, None, owned=[W], held={"w": W}, all_names=["w"], cleans=True, began=began)
    assert saver._cloud is not None
    for step in steps:
        saver._cloud.wait()
        saver.save(step, {W: {"w/weight": torch.full((2,), float(step))}}, cloud=step in in_cloud)
    saver._disk.wait()
    saver._cloud.wait()
    for metadata in folder.glob(f"*/{Save(step=cut_off, generation=generation).folder}/*/.metadata"):
        metadata.unlink()
    return saver.last


def found(folder: Path) -> list[list[tuple[int, str]]]:
    """Steps and generations of the saves in both places."""
    return [[(save.step, save.generation) for save in Place(f"{folder}/{name}").saves()] for name in ("disk", "cloud")]


@pytest.mark.parametrize("keep", [2, 3])
def test_starts_that_commit_one_save_each_leave_no_more_than_are_kept(tmp_path: Path, keep: int):
    began = None
    with fake_default_group(1):
        for number in range(1, 9):
            start(tmp_path, f"g{number}", began, number, number + 1, cut_off=number + 1, keep=keep)
            committed = [(step, f"g{step}") for step in range(max(1, number - keep + 1), number + 1)]
            assert found(tmp_path) == [[*committed, (number + 1, f"g{number}")]] * 2
            began = Save(step=number, generation=f"g{number}")


def test_starts_that_learn_of_no_commit_leave_the_save_that_the_next_one_began_from(tmp_path: Path):
    began = None
    with fake_default_group(1):
        for number in range(1, 6):
            newest = start(tmp_path, f"g{number}", began, number)
            expected = [newest] if began is None else [began, newest]
            assert found(tmp_path)[0] == [(save.step, save.generation) for save in expected]
            began = newest
    assert len(found(tmp_path)[1]) == 5, "in the cloud nobody knows which of them are whole"


def test_saves_that_lack_a_part_stay_while_they_are_few_and_newer(tmp_path: Path):
    """A node that vanished may bring the part back. The save that all starts begin from stays, whatever is newer."""
    with fake_default_group(1):
        began = start(tmp_path, "g0", None, 1)
        for number in range(1, 6):
            start(tmp_path, f"g{number}", began, 2, cut_off=2)
        assert found(tmp_path)[0] == [(1, "g0"), (2, "g3"), (2, "g4"), (2, "g5")]
        start(tmp_path, "g6", began, 2, 3, cut_off=3)
        assert found(tmp_path) == [[(1, "g0"), (2, "g6"), (3, "g6")], [(2, "g6"), (3, "g6")]]


def test_disks_keep_the_newest_save_that_the_cloud_has(tmp_path: Path):
    """Where a node is lost, the others read that one from their disks."""
    with fake_default_group(1):
        began = start(tmp_path, "g1", None, *range(1, 9), in_cloud=[2, 5])
        assert found(tmp_path) == [[(step, "g1") for step in (5, 6, 7, 8)], [(2, "g1"), (5, "g1")]]
        began = start(tmp_path, "g2", began, 9, 10, 11, in_cloud=[11])
        assert found(tmp_path)[0] == [(5, "g1"), (9, "g2"), (10, "g2"), (11, "g2")]
        start(tmp_path, "g3", began, 12, 13, in_cloud=[])
        assert found(tmp_path)[0] == [(5, "g1"), (11, "g2"), (12, "g3"), (13, "g3")]


def test_a_save_whose_removal_is_cut_off_does_not_seem_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place, save = Place(f"{tmp_path}/disk"), Save(step=1, generation="g")
    for part in (0, 1):
        place.write(save, part, {"w/weight": torch.ones(2)})
    place.mark(save, COMMITTED)
    assert place.parts(save) and place.is_marked(save, COMMITTED)
    remove, cut_off = LocalFileSystem.rm, iter([False, True])

    def rm(files: LocalFileSystem, path: object, **options: bool) -> None:
        if next(cut_off):
            raise OSError("ended")
        remove(files, path, **options)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="ended"):
        patched.setattr(LocalFileSystem, "rm", rm)
        place.remove(save)
    assert place.saves() == [save] and not place.parts(save) and not place.is_marked(save, COMMITTED)
    place.remove(save)
    place.remove(save)
    assert not place.saves()


def test_a_save_that_the_cloud_has_is_not_lost_when_its_step_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with fake_default_group(1):
        store = Store(local=f"{tmp_path}/disk", cloud=f"{tmp_path}/cloud", every=1, cloud_every=1)
        saver = Saver(store, "g", None, owned=[W], held={"w": W}, all_names=["w"], cleans=True)
        states = {W: {"w/weight": torch.arange(4.0)}}
        saver.save(1, states, cloud=True)
        assert saver.drain() == Saved(local=1, cloud=1)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cloud/*/*/*")}

        def fails(*_: object, **__: object) -> None:
            raise OSError("Disk quota exceeded")

        monkeypatch.setattr(stores, "save_checkpoint", fails)
        saver.save(1, states, cloud=True)
        assert saver.drain() == Saved(local=1, cloud=1) and saver.error is None
        assert before and before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("cloud/*/*/*")}


def others_cannot_write(disk: bool, cloud: bool) -> Any:
    """An `all_reduce` with ranks that fail to write in these places."""

    def reduced(told: torch.Tensor, *_: object, **__: object) -> None:
        told[0], told[1] = -1 if disk else told[0], -1 if cloud else told[1]

    return reduced


def test_parts_of_saves_that_another_rank_cannot_write_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with fake_default_group(1):
        began = start(tmp_path, "g1", None, 1, 2, 3)
        monkeypatch.setattr(dist, "all_reduce", others_cannot_write(disk=True, cloud=True))
        start(tmp_path, "g2", began, *range(4, 10))
        assert found(tmp_path) == [[(2, "g1"), (3, "g1"), (9, "g2")], [(1, "g1"), (2, "g1"), (3, "g1"), (9, "g2")]]
        # a save that the cloud alone has stays on the disk as well, until the cloud has a newer one
        monkeypatch.setattr(dist, "all_reduce", others_cannot_write(disk=True, cloud=False))
        start(tmp_path, "g3", began, *range(10, 16), in_cloud=[10, 12])
        assert found(tmp_path)[0] == [(2, "g1"), (3, "g1"), (9, "g2"), (12, "g3"), (15, "g3")]
        assert found(tmp_path)[1] == [(10, "g3"), (12, "g3")]


def test_a_part_whose_removal_fails_is_removed_after_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    remove, fails = Place.remove_part, iter([True])

    def failing(place: Place, save: Save, part: int, **how: bool) -> None:
        if next(fails, False):
            raise OSError("reset by peer")
        remove(place, save, part, **how)

    monkeypatch.setattr(Place, "remove_part", failing)
    with fake_default_group(1):
        monkeypatch.setattr(dist, "all_reduce", others_cannot_write(disk=True, cloud=True))
        store = Store(local=f"{tmp_path}/disk", every=1, cloud_every=1)
        saver = Saver(store, "g", None, owned=[W], held={"w": W}, all_names=["w"], cleans=True)
        for step, steps in ((1, [1]), (2, [1, 2]), (3, [3])):
            saver.save(step, {W: {"w/weight": torch.ones(2)}}, cloud=False)
            saver._disk.wait()
            assert [number for number, _ in found(tmp_path)[0]] == steps


@contextmanager
def group_of_one(folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def cut_off(folder: str, save: Save, names: str) -> None:
    """As a crash leaves files that no disk has written out."""
    paths = list(Path(folder, save.folder).glob(f"part-*/{names}"))
    assert paths
    for path in paths:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(folder: str, save: Save) -> None:
    """Of the second value of a weight, as a disk may. No reader of PyTorch's notices."""
    (path,) = Path(folder, save.folder).glob("part-*/*.distcp")
    raw, value = path.read_bytes(), torch.full((2,), float(save.step)).numpy().tobytes()
    assert raw.count(value) == 1
    place = raw.index(value) + 4
    path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])


@pytest.mark.parametrize("names", [".metadata", "*.distcp", checksums.FILE, "a bit", "gone"])
def test_a_part_that_is_damaged_counts_as_absent(tmp_path: Path, names: str, caplog: pytest.LogCaptureFixture):
    """The cloud gives it, or an older save is taken; where there is neither, the error names it."""
    first, second = (Save(step=step, generation="g") for step in (1, 2))
    disk, cloud = f"{tmp_path}/disk", f"{tmp_path}/cloud"
    places: Mapping[str, Collection[Save]] = {disk: (first, second), cloud: (second,)}
    for place, saves in places.items():
        for save in saves:
            Place(place).write(save, 0, {"w/weight": torch.full((2,), float(save.step))})

    def damage(save: Save) -> None:
        if names == "a bit":
            flip_a_bit(disk, save)
        elif names == "gone":
            Path(disk, save.folder, "part-000000", checksums.FILE).unlink()
        else:
            cut_off(disk, save, names)

    def restored(cloud: str | None) -> Restored | None:
        return restore(Store(local=disk, cloud=cloud, every=1, cloud_every=1), [W], ["w"], "n", None)

    damage(second)
    with group_of_one(tmp_path):
        from_cloud = restored(cloud)
        assert from_cloud is not None and from_cloud.num_bytes == {"local": 0, "peer": 0, "cloud": 8}
        assert from_cloud.save == second and from_cloud.weight("w").tolist() == [2.0, 2.0]
        assert f"{disk}/{second.folder}/part-000000 cannot be read and counts as absent" in caplog.text
        older = restored(None)
        assert older is not None and older.save == first and older.weight("w").tolist() == [1.0, 1.0]
        damage(first)
        for elsewhere in (None, f"{tmp_path}/empty"):
            with pytest.raises(ClusterError, match=r"no save of which all .*part-000000' on node n could not be read"):
                restored(elsewhere)


@pytest.mark.parametrize("place", ["disk", "cloud"])
def test_a_save_says_which_optimizer_wrote_it_and_another_one_is_refused(tmp_path: Path, place: str):
    facts = {"optimizer": "AdamW", "seed": 0, "global_batch": 8}
    save, tensors = Save(step=1, generation="g"), {"w/weight": torch.ones(2)}
    Place(f"{tmp_path}/{place}").write(save, 0, {**about_entry(["w"], facts), **tensors})
    store = Store(local=f"{tmp_path}/disk", cloud=f"{tmp_path}/cloud", every=1, cloud_every=1)
    with group_of_one(tmp_path):
        found = restore(store, [W], ["w"], "n", None)
    assert found is not None and found.about == {"names": ["w"], **facts}
    weight = [torch.nn.Parameter(torch.ones(2))]
    for same in (torch.optim.AdamW(weight), autohete_fx.AdamW(weight), None):
        check_optimizer(found.about, same)
    with pytest.raises(ClusterError, match=r"saved with the optimizer AdamW, and the job has SGD\. Expected was"):
        check_optimizer(found.about, torch.optim.SGD(weight))
    assert differences(found.about, facts) == ""
    assert "saved with global_batch=8 (now 4):" in differences(found.about, {**facts, "global_batch": 4})


@pytest.mark.parametrize("place", ["disk", "cloud", "disk of an idle node, and cloud"])
@pytest.mark.parametrize("names", [("AdamW", "", ""), ("", "AdamW", ""), ("", "", "AdamW"), ("", "", "")])
def test_ranks_that_train_nothing_leave_what_a_save_says_of_its_job(tmp_path: Path, place: str, names: tuple[str, ...]):
    """They have no optimizer to name, and their parts may be read last, or alone be on a disk."""
    facts = {"optimizer": max(names), "seed": 0, "global_batch": 8}
    save = Save(step=1, generation="g")
    for part, name in enumerate(names):
        about, weight = about_entry(["w"], {**facts, "optimizer": name}), {"w/weight": torch.ones(2)}
        Place(f"{tmp_path}/{place.split()[-1]}").write(save, part, {**about, **(weight if name == max(names) else {})})
    if "idle" in place:
        Place(f"{tmp_path}/disk").write(save, 3, about_entry(["w"], {**facts, "optimizer": ""}))
    store = Store(local=f"{tmp_path}/disk", cloud=f"{tmp_path}/cloud", every=1, cloud_every=1)
    with group_of_one(tmp_path):
        found = restore(store, [W], ["w"], "n", None)
    assert found is not None and found.about == {"names": ["w"], **facts}


def test_a_save_of_an_earlier_version_says_the_names_alone(tmp_path: Path):
    place, save = Place(f"{tmp_path}"), Save(step=1, generation="g")
    place.write(save, 0, {f"{ALL_NAMES}/weight": torch.frombuffer(bytearray(b"v\nw"), dtype=torch.uint8)})
    assert about_of(place.parts(save)) == {"names": ["v", "w"]} and about_of({}) == {}
    check_optimizer(about_of(place.parts(save)), torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize("what", ["of a larger model", "of a smaller model", "damaged", "gone"])
def test_a_store_whose_cloud_had_everything_is_not_begun_again(tmp_path: Path, what: str):
    """Its saves would be removed once the first new ones are whole."""
    save, cloud = Save(step=3, generation="g"), f"{tmp_path}/cloud"
    Place(cloud).write(save, 0, {"w/weight": torch.ones(2), "v/weight": torch.ones(2)})
    Place(cloud).mark(save, COMMITTED)
    names = {"of a larger model": "w", "of a smaller model": "wvu"}.get(what, "wv")
    if what == "damaged":
        cut_off(cloud, save, ".metadata")
    elif what == "gone":
        shutil.rmtree(f"{cloud}/{save.folder}/part-000000")
    reason = {
        "of a larger model": r"step 3 has 'v', which this model has not",
        "of a smaller model": r"of step 3 the cloud .* lacks 1 parameters of this model, such as 'u' now",
    }.get(what, r"lacks 2 parameters of this model, such as 'v' now")
    store = Store(local=f"{tmp_path}/disk", cloud=cloud, every=1, cloud_every=1)
    with group_of_one(tmp_path), pytest.raises(ClusterError, match=reason) as caught:
        restore(store, [Piece(name) for name in names], list(names), "n", None)
    assert "Nothing was removed" in str(caught.value)


def test_a_part_on_a_disk_that_cannot_be_listed_counts_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    Place(f"{tmp_path}").write(Save(step=1, generation="g"), 0, {"w/weight": torch.ones(2)})

    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LocalFileSystem, "ls", fails)
    disk = Readable(f"{tmp_path}")
    assert not disk.saves and disk.troubles == {f"{tmp_path}": "[Errno 5] Input/output error"}


def test_names_of_parameters_may_have_slashes(tmp_path: Path):
    name = "layers.a/b.state/c.weight"
    tensors = {f"{name}/weight": torch.arange(4.0), f"{name}/state/exp_avg": torch.ones(4)}
    place, save = Place(str(tmp_path)), Save(step=1, generation="g")
    place.write(save, 0, tensors)
    parts = place.parts(save)
    assert set(parts) == {name}
    read = read_parts(parts, [name])[name]
    assert all(torch.equal(read[key], tensor) for key, tensor in tensors.items())
    halves = [Piece.of_key(f"{name}@0:{first}-{first + 2}:4") for first in (0, 2)]
    found = {half.key: stores.taken(read, Piece(name), half) for half in halves}
    assert found[halves[1].key][f"{halves[1].key}/state/exp_avg"].shape == (2,)
    assert torch.equal(stores.joined(name, halves, found)[f"{name}/weight"], torch.arange(4.0))
