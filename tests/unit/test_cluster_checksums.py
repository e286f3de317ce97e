"""Checksums of a part: there for every kind of tensor, flushed, and missed where they were written; and words of a cut-off file."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from autohete_fx.cluster.store import checksums
from autohete_fx.cluster.store.damage import PartError, words_of
from autohete_fx.cluster.store.store import Place, Save, read_parts
from autohete_fx.internals.checkpoints import FsspecWriter, alone

SAVE = Save(step=1, generation="g")
TENSORS = {
    "w/weight": torch.arange(12.0).view(3, 4).T,
    "w/state/step": torch.tensor(3.0),
    "w/state/exp_avg": torch.full((2,), 0.1, dtype=torch.bfloat16),
    "w/state/none": torch.empty(0),
    "w/state/seen": torch.tensor([True, False]),
}


def check_read(place: Place) -> None:
    parts = place.parts(SAVE)
    assert set(parts) == {"w"}
    found = read_parts(parts, ["w"])["w"]
    assert found.keys() == TENSORS.keys() and all(torch.equal(found[key], TENSORS[key]) for key in TENSORS)


def test_every_kind_of_tensor_has_a_checksum_and_none_may_be_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    place = Place(f"{tmp_path}")
    path = Path(place.write(SAVE, 0, TENSORS)) / checksums.FILE
    said = json.loads(path.read_text())
    assert said.keys() == TENSORS.keys()
    check_read(place)
    assert not caplog.records
    for raw in (json.dumps({**said, "w/state/step": 0}).encode(), b"{}", b"", None):
        path.unlink() if raw is None else path.write_bytes(raw)
        with pytest.raises(PartError, match=r"part-000000' could not be read: 'w/\S+' has (no|the) checksum"):
            read_parts(place.parts(SAVE), ["w"])


@pytest.mark.parametrize("raw", [None, b""])
def test_a_part_of_an_earlier_version_may_lack_checksums_which_the_log_says_once(
    tmp_path: Path, raw: bytes | None, caplog: pytest.LogCaptureFixture
):
    place, path = Place(f"{tmp_path}"), f"{tmp_path}/{SAVE.folder}/part-000000"
    with alone():
        save_checkpoint(dict(TENSORS), storage_writer=FsspecWriter(path), no_dist=True)
    if raw is not None:
        Path(path, checksums.FILE).write_bytes(raw)
    check_read(place)
    check_read(place)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == f"the part {path} has no checksums and was read unchecked"


def test_checksums_are_flushed_before_a_part_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flushed: list[tuple[str, int]] = []

    def fsync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        flushed.append((path.name, path.stat().st_size))
        assert not (path.parent / ".metadata").exists()

    monkeypatch.setattr(os, "fsync", fsync)
    Place(f"{tmp_path}").write(SAVE, 0, TENSORS)
    assert flushed[0] == (checksums.FILE, len(checksums.encoded(TENSORS))) and len(flushed) > 1


def test_words_of_a_file_that_was_cut_off_say_so():
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert words_of(error).endswith("704 vs 598: the file could not be written whole, as on a full disk")
    assert words_of(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
