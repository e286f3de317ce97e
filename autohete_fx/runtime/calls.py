"""Calls of compiled functions, as seen from the fence.

Dynamo decides by guards which compiled code serves a call, and the stack of PyTorch's modes is among what it guards: with
the fence on the stack it would compile everything once more. Therefore every call of a compiled function, whatever its
backend, lowers the fences of its thread first and raises those that are still needed when it returns.

Inside, nothing guards pending memory but the nodes that our passes inserted. That is enough where the call runs one graph
of ours and nothing else, which is how transformers compile. Any other call waits for all updates before it begins:

* a function that was compiled by another backend;
* a function whose compilation broke its graph, because what lies between graphs is eager code;
* one that is being compiled, because who knows what it will turn out to be;
* a frame that Dynamo finds no code for and runs as it is (its limit of recompilations, a dispatch mode of the user's), and
  from then on its function, because Dynamo does not say so again;
* any function where the user told Dynamo to run others, or none (``torch.compiler.set_stance``).

An interrupt may come between the beginning of a call and Dynamo's own care for its end. Then a call is left whose frame is not on
this thread's stack any more: it is over, and its fences are raised again, by the next call or step of the thread.
"""

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Iterable
from types import FrameType, TracebackType

from torch import Tensor

from autohete_fx import versions
from autohete_fx.runtime.fence import Fence, lower_fences, raise_fences, standing_fences
from autohete_fx.runtime.updates import Updates

log = logging.getLogger(__name__)


class CompiledFunctions:
    """What is known of the functions that equal backends compile: they share what Dynamo has cached.

    Attributes:
        is_whole: whether each of their calls runs one graph of ours and nothing else; None before the first compilation.
    """

    def __init__(self) -> None:
        self.is_whole: bool | None = None

    def call(self) -> "_Call":
        """The context of one call."""
        return _Call(self)


_known: list[tuple[weakref.ref[object], CompiledFunctions]] = []


def functions_of(backend: object) -> CompiledFunctions:
    """The functions of a backend, as Dynamo compares backends."""
    _known[:] = [(reference, functions) for reference, functions in _known if reference() is not None]
    for reference, functions in _known:
        other = reference()
        if other is backend or (type(other) is type(backend) and other == backend):
            return functions
    functions = CompiledFunctions()
    with contextlib.suppress(TypeError):  # what cannot be referenced weakly shares with nobody
        _known.append((weakref.ref(backend), functions))
    return functions


class _Call:
    """One call, as a context.

    Attributes:
        frame: of the function that began it, on the stack as long as it runs; None where that is not known.
        fences: those that were lowered, and that are to be raised behind it.
    """

    def __init__(self, functions: CompiledFunctions) -> None:
        self.functions = functions
        self.frame: FrameType | None = None
        self.fences: list[Fence] = []
        self.num_compilations = 0
        self.num_graphs_compiled = 0

    def __enter__(self) -> None:
        _calls()  # raises what an interrupted one has left lowered
        self.num_breaks = versions.num_graph_breaks()
        self.frame = versions.frame_of_call(sys._getframe())
        self.fences = standing_fences()
        try:
            _thread.calls.append(self)  # before the fences fall: from here on somebody knows of them
            lower_fences()
            if not self.functions.is_whole or not versions.is_stance_default():
                self.refuse_early()
                self.settle()
        except BaseException:  # nobody will call __exit__
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self.num_compilations and error is None:
                self._judge()
            for updates in self.updates():
                updates.prune()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Raise what is still needed. An interrupt leaves the call to `_calls`, which does it again."""
        raise_fences([fence for fence in self.fences if (u := fence.updates) is not None and u.needs_fence])
        _thread.calls[:] = [call for call in _thread.calls if call is not self]
        self.frame = None

    def updates(self) -> list[Updates]:
        """Those whose fences were lowered."""
        return [fence.updates for fence in self.fences if fence.updates is not None]

    def refuse_early(self) -> None:
        """Raise OptimizerStateError where an update started in a backward that no step followed: what runs now is not seen."""
        for updates in self.updates():
            updates.early.refuse_unseen("a compiled function that may use any parameter was called")

    def settle(self, but: Updates | None = None) -> None:
        """Wait for the updates whose fences were lowered, except those of one model."""
        for updates in self.updates():
            if updates is not but:
                updates.wait_all()

    def _judge(self) -> None:
        is_ours = self.num_graphs_compiled > 0
        is_whole = self.num_compilations == self.num_graphs_compiled == 1
        is_whole = is_whole and versions.num_graph_breaks() == self.num_breaks
        if is_ours and not is_whole and self.functions.is_whole is not False:
            log.info(
                "a compiled function has graph breaks: its calls wait for all updates of the optimizer before they begin,"
                " instead of overlapping with them"
            )
        self.functions.is_whole = is_whole and self.functions.is_whole is not False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


_thread = _Thread()


def _calls() -> list[_Call]:
    """The calls that this thread is in, the outermost first. Those that an interrupt has left are ended."""
    if not _thread.calls:
        return _thread.calls
    frame, running = sys._getframe(), set()
    while frame is not None:
        running.add(id(frame))
        frame = frame.f_back
    for call in [call for call in _thread.calls if call.frame is not None and id(call.frame) not in running]:
        outer = _thread.calls[: _thread.calls.index(call)]
        if outer:  # which raises them when it ends
            outer[-1].fences += [fence for fence in call.fences if fence not in outer[-1].fences]
            call.fences = []
        call._leave()
    return _thread.calls


def note_compiled_graph() -> None:
    """Our backend compiles a graph."""
    for call in _calls()[-1:]:
        call.num_graphs_compiled += 1


def guard_backward(updates: Updates) -> None:
    """The call runs a forward whose backward may start updates: the fence must see that, where nothing else is called."""
    calls = _calls()
    if calls and all(call.functions.is_whole for call in calls):
        if updates.fence not in calls[0].fences:
            calls[0].fences.append(updates.fence)
        updates.early.is_expected = True


def refuse_early(args: Iterable[Tensor], updates: Updates) -> None:
    """Raise OptimizerStateError where a graph gets a parameter whose update started in a backward that no step followed."""
    for other in {updates, *(found for call in _calls() for found in call.updates())}:
        other.early.refuse(args)


def settle_others(updates: Updates) -> None:
    """Wait for the updates of other models whose fences were lowered: a model's graph waits for its own alone, and Dynamo may
    serve a call with the graph of another model of the same class."""
    for call in _calls():
        call.settle(but=updates)


def is_within_call() -> bool:
    """Whether this thread runs a compiled function, whose entry was seen."""
    return bool(_calls())


def _begin_miss() -> None:
    for call in _calls():
        call.refuse_early()
        call.settle()


def _note_compilation() -> None:
    for call in _calls():
        call.num_compilations += 1


def _note_eager_frame() -> None:
    for call in _calls():
        call.functions.is_whole = False


versions.on_cache_misses(_begin_miss, _note_compilation, _note_eager_frame)
versions.on_calls_of_compiled_functions(lambda backend: functions_of(backend).call)
