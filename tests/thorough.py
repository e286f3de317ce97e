"""Combinations of a parametrized test that ``make test-all`` runs, and ``make test`` does not."""

from typing import Any

import pytest


def thorough(*values: object, id: str | None = None) -> Any:
    """Parameters that repeat what others of the test have."""
    return pytest.param(*values, marks=pytest.mark.thorough, id=id)
