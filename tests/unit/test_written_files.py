"""A file is written all at once, or stays as it was."""

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from autohete_fx.ir.files import is_directory, is_file, why_unwritable, write_text

_FULL = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource.RLIM_INFINITY}))
from autohete_fx.ir.files import write_text
write_text("plan.json", "new" * 1000)
"""


def test_what_cannot_be_written_leaves_the_earlier_file(tmp_path: Path):
    (tmp_path / "plan.json").write_text("old")
    done = subprocess.run([sys.executable, "-c", _FULL], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == "old"


def test_a_link_goes_on_pointing_to_the_file_which_keeps_its_mode(tmp_path: Path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_pipe_is_written_to(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_text, args=(pipe, "new"), daemon=True)
    writer.start()
    assert pipe.read_text() == "new"
    writer.join()
    assert pipe.is_fifo()


def test_a_file_in_a_directory_that_takes_no_new_one_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "file"
    file.write_text("old")
    before = file.stat().st_ino
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK | os.X_OK))
    assert why_unwritable(file) == ""
    write_text(file, "new")
    assert (file.read_text(), file.stat().st_ino) == ("new", before)


def test_what_may_not_be_written_is_told_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("old")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "new")
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path / "elsewhere")
    assert why_unwritable(tmp_path / "new") == "nothing may be written in its directory"
    assert why_unwritable(tmp_path / "elsewhere" / "link") == "nothing may be written in its directory"
    assert why_unwritable(tmp_path / "file") == "it may not be written"
    assert why_unwritable(tmp_path / "elsewhere" / "new") == ""
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path)
    assert why_unwritable(tmp_path / "file") == "", "a new one takes its place"


def test_any_text_may_be_asked_for():
    for text in ("x" * 5000, "\0", "absent"):
        assert not is_file(text) and not is_directory(text)
    assert is_file(__file__) and not is_file(Path(__file__).parent)
    assert is_directory(Path(__file__).parent) and not is_directory(__file__)
