"""Saves of one rank, of a group whose others are not there."""

import warnings
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from autohete_fx.cluster.pieces import Piece
from autohete_fx.cluster.saving import Saved, Saver
from autohete_fx.cluster.store import COMMITTED, Place, Save, Store, alone
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
