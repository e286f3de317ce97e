"""Whether a start of a job may save in a store: its places are two, no other one saves there, and the disk can be written."""

import threading
from pathlib import Path

import pytest
import torch

from autohete_fx.cluster.model.pieces import Piece
from autohete_fx.cluster.store.saving import Saver
from autohete_fx.cluster.store.store import Place, Store
from autohete_fx.errors import ClusterError
from autohete_fx.internals.fake_group import fake_default_group

W = Piece("w")


@pytest.mark.parametrize("where", ["disk", "cloud"])
def test_a_start_whose_store_another_one_saves_in_ends(tmp_path: Path, where: str):
    """And a start after it goes on there."""

    def saver(generation: str) -> Saver:
        store = Store(
            local=f"{tmp_path}/{generation if where == 'cloud' else 'disk'}",
            cloud=f"{tmp_path}/cloud" if where == "cloud" else None,
            every=1,
            cloud_every=1,
        )
        return Saver(store, generation, None, owned=[W], held={"w": W}, all_names=["w"], cleans=True)

    states = {W: {"w/weight": torch.ones(2)}}
    with fake_default_group(1):
        first, second = saver("first"), saver("second")
        first.save(1, states, cloud=True)
        first.drain()
        second.save(2, states, cloud=True)
        assert second.drain().local == 2
        Path(tmp_path, where, "owner").unlink()  # as a cleaner of old files does
        second.save(3, states, cloud=True)
        assert second.drain().local == 3
        with pytest.raises(ClusterError, match=r"another job, or a later start of this one, has begun to save in"):
            first.save(4, states, cloud=True)
            first.drain()
        third = saver("third")
        third.save(5, states, cloud=True)
        assert third.drain().local == 5
    assert [save.step for save in Place(f"{tmp_path}/{where}").saves()][-2:] == [3, 5]


def test_a_place_that_cannot_be_written_is_told_before_the_first_save(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    with fake_default_group(1):
        for local in (f"{tmp_path}/file/disk", f"{tmp_path}/disk"):
            Saver(Store(local=local), "g", None, owned=[W], held={"w": W}, all_names=["w"], cleans=True).drain()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"rank 0 cannot write to '{tmp_path}/file/disk': ") and "Training goes on" in told
    assert not list((tmp_path / "disk").iterdir())


def test_a_cloud_is_tried_at_the_start_and_no_save_waits_for_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    answers, tried = threading.Event(), threading.Event()
    check = Place.check_writable

    def slow(place: Place, name: str) -> None:
        if place._path.endswith("cloud"):
            answers.wait()
            try:
                check(place, name)
            finally:
                tried.set()

    monkeypatch.setattr(Place, "check_writable", slow)
    (tmp_path / "file").write_text("")
    store = Store(local=tmp_path / "disk", cloud=f"{tmp_path}/file/cloud", every=1, cloud_every=1)
    with fake_default_group(1):
        saver = Saver(store, "g", None, owned=[W], held={"w": W}, all_names=["w"], cleans=True)
        saver.save(1, {W: {"w/weight": torch.ones(2)}}, cloud=True)
        assert saver.drain().local == 1 and not tried.is_set()
    answers.set()
    trying = [thread for thread in threading.enumerate() if thread.name == "autohete-try"]
    for thread in trying:
        thread.join()
    assert tried.is_set()
    assert any("rank 0 cannot write to" in r.getMessage() and "file/cloud" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", r"the store '' was given\. Expected was a folder, or a URL with a path, such as s3://bucket/run\. Name"),
        ("/", "the store '/' was given"),
        ("memory:///", "the store 'memory:///' was given"),
        ("memory://run[1]*", r"which has \* and \[ and \]\. Expected was a URL without any of"),
        ("nowhere://run", "Expected was a folder, or a URL that fsspec can open here"),
    ],
)
def test_places_that_no_job_can_save_in_are_refused_when_a_store_is_made(tmp_path: Path, path: str, words: str):
    for places in ({"local": path}, {"local": f"{tmp_path}/[1]", "cloud": path}):
        with pytest.raises(ClusterError, match=words):
            Store(**places)


def test_a_store_whose_places_are_one_is_refused(tmp_path: Path):
    """Writers to a disk and to the cloud would destroy each other's parts."""
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for local, cloud in (
        (tmp_path / "disk", f"file://{tmp_path}/disk/"),
        (tmp_path / "disk", f"{tmp_path}/link"),
        ("memory://run", "memory:///run/"),
    ):
        with pytest.raises(ClusterError, match=r"which are one place\. Expected were two"):
            Store(local=local, cloud=cloud)
    assert Store(local=tmp_path / "disk", cloud=f"{tmp_path}/disk/cloud")
