"""Finalizers that run amid a call of a compiled function: looking for who called them keeps nothing alive."""

import gc
import sys
import weakref
from types import CodeType, FrameType

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


def test_what_a_weak_collection_calls_at_a_tensors_end_is_no_function_of_the_program():
    """As where compiled code replaces a tensor that a module has as an attribute, and something remembers it weakly."""
    seen = dict[str, bool]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name in ("_remove", "remove", "look"):
            sys.setprofile(None)
            seen[code.co_name] = dynamo._is_of_collector(code)
            sys.setprofile(note)

    batches = Batch(), Batch()
    remembered, named = weakref.WeakSet([batches[0]]), weakref.WeakValueDictionary({"last": batches[1]})
    sys.setprofile(note)
    try:
        del batches
    finally:
        sys.setprofile(None)
    assert seen == {"_remove": True, "remove": True} and not remembered and not named
