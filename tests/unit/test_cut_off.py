"""A library of Inductor that was cut off while it was linked is removed; whole ones, and those being written, stay."""

import os
import time
from pathlib import Path

import pytest
import torch

from autohete_fx.internals.cut_off import remove_cut_off_libraries


def test_libraries_that_were_cut_off_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    whole = Path(torch._C.__file__).read_bytes()
    files = {
        "empty": b"",
        "short": whole[: len(whole) // 2],
        "header": whole[:64],
        "whole": whole,
        "new": b"",
        "built": b"",
    }
    for name, content in files.items():
        folder = tmp_path / name[:2]
        folder.mkdir()
        (folder / f"{name}.main.so").write_bytes(content)
        if name != "built":  # its build ended: the reason why it is empty is another
            (folder / f"{name}.main_CxxBuild").mkdir()
        if name != "new":
            long_ago = time.time() - 60
            os.utime(folder / f"{name}.main.so", (long_ago, long_ago))
    (tmp_path / "wh" / "none.main_CxxBuild").mkdir()
    assert {path.name for path in remove_cut_off_libraries()} == {
        f"{name}.main.so" for name in ("empty", "short", "header")
    }
    assert {path.name for path in tmp_path.glob("*/*.so")} == {f"{name}.main.so" for name in ("whole", "new", "built")}
    assert remove_cut_off_libraries() == []
