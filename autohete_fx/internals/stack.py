"""Room for the frames of what takes many calls."""

from collections.abc import Callable
from types import FunctionType
from typing import cast

_SLOTS = 1 << 17
"""Of 8 bytes: Python maps twice as much, 2 MiB, of which only what calls use gets pages."""


def on_one_chunk(function: Callable[..., object]) -> None:
    """From now on, what ``function`` calls has its frames in one chunk of Python's stack, the chunk that a frame with so many slots
    needs.

    Its own frame takes 1 MiB of addresses for as long as somebody keeps it, as tracebacks do; no memory but what calls touched.

    Python maps and frees chunks of 16 KiB as calls cross their ends. Where a loop makes its calls at an end, each takes 7 us and a
    page fault. Tracing and rewriting graphs has many such loops: tests that compile much took a sixth more of a core.
    """
    function = cast(FunctionType, function)
    function.__code__ = function.__code__.replace(co_stacksize=_SLOTS)
