"""The cache directory: what is stored comes back, what is damaged counts as absent."""

import errno
import os
from pathlib import Path

import pytest

from autohete_fx import cache
from tests.planner_problems import MACHINE


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path / "cache"))


def files() -> list[Path]:
    return [path for path in cache.cache_dir().rglob("*") if path.is_file()]


def test_text_comes_back_under_its_kind_and_key_only() -> None:
    cache.store_text("plan", "a key", "the text")
    assert cache.load_text("plan", "a key") == "the text"
    assert cache.load_text("plan", "another key") is None
    assert cache.load_text("block", "a key") is None


def test_the_last_text_wins_and_leaves_one_file() -> None:
    cache.store_text("plan", "a key", "old")
    cache.store_text("plan", "a key", "new")
    assert cache.load_text("plan", "a key") == "new"
    assert len(files()) == 1


def test_a_text_that_does_not_fit_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store_text("plan", "a key", "old")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    cache.store_text("plan", "a key", "new")
    assert cache.load_text("plan", "a key") == "old"
    assert len(files()) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"version": 1}', '{"version": 0, "key": "k", "text": "t"}'])
def test_a_damaged_file_counts_as_absent_and_is_written_again(damage: str) -> None:
    cache.store_text("plan", "k", "t")
    files()[0].write_text(damage)
    assert cache.load_text("plan", "k") is None
    cache.store_text("plan", "k", "again")
    assert cache.load_text("plan", "k") == "again"


def test_a_machine_comes_back_equal() -> None:
    assert cache.load_machine("m") is None
    cache.store_machine("m", MACHINE)
    assert cache.load_machine("m") == MACHINE


@pytest.mark.parametrize("damage", ["{}", "3", '{"device_flops_per_s": 3}', "not json"])
def test_a_damaged_machine_counts_as_absent(damage: str) -> None:
    cache.store_text("machine", "m", damage)
    assert cache.load_machine("m") is None


def test_a_directory_that_cannot_be_made_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(in_the_way / "below"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert cache.cache_dir().parent == tmp_path
    cache.store_text("plan", "k", "t")
    assert cache.load_text("plan", "k") == "t"


def test_the_default_directory_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOHETE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if os.name == "posix" and os.uname().sysname != "Darwin":
        assert cache.cache_dir() == tmp_path / "autohete_fx"
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert cache.cache_dir() == tmp_path / "home" / ".cache" / "autohete_fx"


def test_without_a_home_and_a_place_to_fall_back_to_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AUTOHETE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    cache.store_text("plan", "k", "t")
    assert cache.load_text("plan", "k") is None


def test_a_process_reads_its_package_once(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = cache.sources_digest()
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    assert cache.sources_digest() == digest and len(digest) == 16
