"""The hooks around Dynamo by which `calls` knows of every call of a compiled function, and of what its graphs read.

`watch` installs them, before our backend compiles anything. Importing changes nothing.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType

from torch import fx

from autohete_fx.errors import OptimizerStateError
from autohete_fx.internals import dynamo
from autohete_fx.internals.compiled_code import forget_all_compiled
from autohete_fx.runtime.pending import calls
from autohete_fx.runtime.pending.calls import Call, CompiledFunction, functions_of, under_way
from autohete_fx.runtime.pending.fence import tensors_in

log = logging.getLogger(__name__)


def _watched(graph: fx.GraphModule, compiled: Callable[..., object]) -> Callable[..., object]:
    """What a backend made of a graph, looked at when it runs between a backward pass and its step."""
    for call in under_way()[-1:]:
        call.num_graphs_seen += 1
    if not isinstance(compiled, FunctionType | MethodType):  # a class of the backend's, which must stay what it is
        for call in under_way():
            call.has_eager_frames = True
        return compiled
    constants = [weakref.ref(t) for t in (*graph.parameters(), *graph.buffers())]

    @functools.wraps(compiled)
    def run(*args: object) -> object:
        if not calls.note_graph_run():
            return compiled(*args)
        started = {updates for call in under_way() for updates in call.updates() if updates.early.is_open}
        tensors = [*tensors_in(args), *(t for reference in constants if (t := reference()) is not None)]
        with contextlib.ExitStack() as stack:
            for updates in started:
                stack.enter_context(updates.early.watch(tensors, ()))
            return compiled(*args)

    return run


def _begin_miss(code: CodeType | None) -> None:
    found = under_way()
    if code is not None:
        calls.note_attempt(code)
    if found and found[0].root is None and code is not None:
        found[0].root = "" if calls.is_given_up() else dynamo.function_of(code)
    try:
        for call in found:
            call.settle()
    except OptimizerStateError as error:
        found[-1].failure = error
        raise


def _note_compilation() -> None:
    for call in under_way():
        call.num_compilations += 1


def _note_eager_frame(code: CodeType, loop_break: str) -> None:
    calls.note_given_up(code)
    for call in under_way()[:1]:
        function = f"{code.co_qualname}, {code.co_filename}:{code.co_firstlineno}"
        if loop_break and not call.breaks_in_loop:
            call.eager_function, call.breaks_in_loop = f"{function}, breaks at {loop_break}", True
        call.eager_function = call.eager_function or function
    for call in under_way():
        if call.functions.is_whole:
            log.warning(
                "Dynamo runs a function eagerly that it had compiled with the backend autohete: that is exact, but no memory_budget"
                " holds. If it has compiled it too often (torch._dynamo.config.recompile_limit), fewer shapes help, or dynamic=True"
            )
        call.functions.is_whole = False
        call.has_eager_frames = True


def _is_ours(backend: object) -> bool:
    """Whether a function, or what ``torch.compile`` makes of one and of options, is our backend."""
    return dynamo.module_of_backend(backend) == "autohete_fx.backend"


def _call_of(backend: object, compiled: object) -> Callable[[], Call]:
    return CompiledFunction(functions_of(backend), _is_ours(backend), compiled).call


class _Watch:
    """Whether calls are watched, and whether there may be code from before, whose graphs nobody looks at."""

    def __init__(self) -> None:
        self.has_begun = False
        self.has_old_code = False


_watch = _Watch()


def watch() -> None:
    """From now on, know of every call of a compiled function: before our backend compiles anything. Importing changes nothing.

    Code that Dynamo compiled before is forgotten and compiled again when it is next called. Otherwise no one would look at its
    graphs, nor at what it decided to run eagerly. Calls that are under way in this thread count as calls of functions of which
    nothing is known. Code that they compiled is then forgotten before the next one.
    """
    if _watch.has_begun:
        return
    _watch.has_begun = True
    dynamo.turn_off_ddp_optimizer()
    dynamo.on_cache_misses(_begin_miss, _note_compilation, _note_eager_frame)
    dynamo.on_compiled_graphs(_watched)
    dynamo.on_calls_of_compiled_functions(_call_of)
    late = dynamo.calls_under_way()
    for frame, backend in late:
        function = CompiledFunction(functions_of(backend), is_ours=False, compiled=None)
        calls.begin_late(function, frame)
    _watch.has_old_code = True
    calls.before_calls(_forget_old_code, first=True)
    if not late:
        _forget_old_code()


def _forget_old_code(*_call: object) -> None:
    """While this thread is in no call: what it converts or runs must stay."""
    if _watch.has_old_code:
        _watch.has_old_code = False
        forget_all_compiled()
