"""All folders of tests are collected, and of their tests those that each way to run them is to have."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config):
    """Pytest leaves out some names unless it is told otherwise."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    assert len(folders) > 4
    assert not [folder for folder in folders for pattern in left_out if folder.match(pattern)]


@pytest.mark.thorough
def test_what_is_thorough_is_slow(request: pytest.FixtureRequest):
    assert request.node.get_closest_marker("slow")


@pytest.mark.parametrize(("words", "is_selected"), [([], False), (["-m", "not slow"], False), (["-m", ""], True)])
def test_what_is_thorough_runs_where_it_is_asked_for_alone(words: list[str], is_selected: bool):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", __file__, *words]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    assert "::test_no_folder_of_tests_is_left_out" in done.stdout
    assert ("::test_what_is_thorough_is_slow" in done.stdout) is is_selected


def test_a_card_runs_all_of_its_tests():
    texts = [path.read_text() for path in (TESTS / "cuda").glob("*.py")]
    assert texts and not any("thorough" in text for text in [*texts, (TESTS / "main_job.py").read_text()])
