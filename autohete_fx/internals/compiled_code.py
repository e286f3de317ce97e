"""Compiled code that Dynamo keeps with a code object, and how it is dropped."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import CodeType

_looked_at: Counter[int] = Counter()
"""How many calls look at a code, by its identity: equal codes of two functions are two."""


@contextlib.contextmanager
def looked_at(code: CodeType) -> Iterator[None]:
    """While Dynamo has found nothing compiled for a call of this code, and decides what to do or converts it."""
    _looked_at[id(code)] += 1
    try:
        yield
    finally:
        _looked_at[id(code)] -= 1
        if not _looked_at[id(code)]:
            del _looked_at[id(code)]


def forget_compiled(code: CodeType) -> None:
    """Let Dynamo drop all that it has compiled of this code. The next call that reaches it compiles afresh.

    A code that Dynamo looks at keeps the memory for that, as Dynamo then puts more there. Nothing that is there now serves then.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list, remove_from_cache
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    if id(code) not in _looked_at:
        remove_from_cache(code)
        return
    for entry in _debug_get_cache_entry_list(code):
        if (kept := entry.guard_manager.extra_state) is not None:  # not of one that serves no more
            kept.invalidate(entry, DeletedGuardManagerWrapper("its plan no longer holds"))


def forget_all_compiled() -> None:
    """Let Dynamo drop all that it has compiled, whatever the backend, and its decisions to run something eagerly."""
    from torch._dynamo import reset_code_caches

    reset_code_caches()
