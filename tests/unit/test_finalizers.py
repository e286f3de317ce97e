"""Finalizers that run amid a call of a compiled function: looking for who called them keeps nothing alive."""

import gc
import weakref
from types import CodeType

from autohete_fx.internals import dynamo


class Batch:
    """Stands for the tensors of a frame."""


def look(code: CodeType) -> weakref.ref[Batch]:
    batch = Batch()
    assert dynamo._is_of_collector(code) == (code is not look.__code__)
    return weakref.ref(batch)


def test_tensors_of_the_frame_that_a_finalizer_interrupts_are_freed_with_it():
    gc.disable()
    try:
        assert all(look(code)() is None for code in (weakref.finalize.__call__.__code__, look.__code__))
    finally:
        gc.enable()
