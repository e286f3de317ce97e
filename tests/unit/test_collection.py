"""All folders of tests are collected: pytest leaves out some names unless it is told otherwise."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config):
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    assert len(folders) > 4
    assert not [folder for folder in folders for pattern in left_out if folder.match(pattern)]
