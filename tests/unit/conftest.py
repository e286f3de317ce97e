"""The benchmarks, which are scripts beside their modules."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Path]:
    """Their folder, from which they can be imported; what was imported goes with the test's module."""
    folder, before = Path(__file__).parents[2] / "examples" / "benchmarks", set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        patch.syspath_prepend(str(folder))
        yield folder
    for name in set(sys.modules) - before:
        if str(folder.parent) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
