"""Calls of compiled functions, as seen from the fence.

Dynamo decides by guards which compiled code serves a call, and guards the stack of PyTorch's modes, too. With the fence on the
stack it would compile everything once more. Therefore every call of a compiled function, whatever its backend, first lowers the
fences of its thread. When it returns it raises those that are still needed.

Inside, nothing guards pending memory but the nodes that our passes inserted. That is enough where the call runs one graph
of ours and nothing else, which is how transformers compile. Any other call waits for all updates before it begins:

* a function that was compiled by another backend;
* a function whose compilation broke its graph, because what lies between graphs is eager code;
* one that is being compiled, because who knows what it will turn out to be;
* a frame that Dynamo finds no code for and runs as it is (its limit of recompilations, a dispatch mode of the user's). From
  then on its function counts, because Dynamo does not say so again;
* any function where the user told Dynamo to run others, or none (``torch.compiler.set_stance``).

The same holds for what the garbage collector runs inside a call; it says nothing of the function.

Between a backward pass that started updates and the step, waiting is not enough. A call may do nothing to their parameters, and
may only read their gradients. Inputs of a graph of any backend are looked at when it runs. A function that is known to run more
than one graph, or none, is refused. One that turns out to do so, or a graph that cannot be looked at, spoils the step.

All this begins with `watching.watch`, when somebody takes our backend to compile with it. Until then nothing of ours can be
pending.

An interrupt may come between the beginning of a call and Dynamo's own care for its end. Then a call is left whose frame is not
on this thread's stack any more. It is over, and the next call or step of the thread raises its fences again.
"""

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType, TracebackType

from torch import Tensor, nn

from autohete_fx.errors import OptimizerStateError
from autohete_fx.internals import dynamo
from autohete_fx.runtime.pending import unplanned
from autohete_fx.runtime.pending.fence import Fence, Guarded, lower_fences, raise_fences, standing_fences
from autohete_fx.runtime.pending.updates import Updates

log = logging.getLogger(__name__)


_NOTHING_COMPILED = (
    "Dynamo compiled nothing of a function with the backend autohete and runs it eagerly: that is exact, but no memory_budget"
    " holds. "
)
_OWN_CLASS = (
    "Up to PyTorch 2.13 compile() compiles nothing of a module whose own class is PyTorch's, such as nn.Sequential: compile"
    " a module of your own that holds it. Else TORCH_LOGS=graph_breaks says what could not be traced"
)


class CompiledFunctions:
    """The functions that equal backends compile: they share what Dynamo has cached.

    Attributes:
        is_whole: whether each of their calls runs one graph of ours and nothing else; None before the first compilation.
        unseen: code of those whose calls do what nobody looks at.
    """

    def __init__(self) -> None:
        self.is_whole: bool | None = None
        self.unseen: weakref.WeakSet[CodeType] = weakref.WeakSet()


class CompiledFunction:
    """A function that one call of ``torch.compile`` returned.

    Attributes:
        functions: those of its backend.
        is_ours: whether that is the backend of this package.
        has_returned: whether any call of the function has.

    Args:
        compiled: what it was made of; None where that is not known.
    """

    def __init__(self, functions: CompiledFunctions, is_ours: bool, compiled: object) -> None:
        self.functions = functions
        self.is_ours = is_ours
        self.has_returned = False
        if is_ours:
            unplanned.await_call(self, compiled)

    def call(self) -> "Call":
        """The context of one call."""
        unplanned.note_call(self)
        return Call(self)


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


class Call:
    """One call, as a context.

    Attributes:
        function: the one that is called.
        handled: the exception that the caller was handling when the call began.
        frame: of the function that began it, on the stack as long as it runs; None where that is not known.
        fences: those that were lowered, and that are to be raised after it.
        kept: what lives at least as long.
        if_it_fails: what is called where an error ends it.
        model: of the graph that ran last.
        eager_function: the first one that Dynamo could not compile because a graph breaks in a loop, where it begins and where
            it breaks. Where there is none, the first one that it could not compile; else empty.
        breaks_in_loop: whether that is of the first kind.
        root: the first function of the user's for which Dynamo had no code, by file and name; None where there was none. Empty
            where the one that was called has been given up.
        failure: of an update, where a frame met it. The interpreter drops what callbacks of weak references and finalizers
            raise. Dynamo then runs the rest of the call eagerly: nothing else in it may notice.
    """

    def __init__(self, function: CompiledFunction) -> None:
        self.function = function
        self.functions = function.functions
        self.handled: BaseException | None = None
        self.frame: FrameType | None = None
        self.fences: list[Fence] = []
        self.kept: list[object] = []
        self.if_it_fails: list[Callable[[], None]] = []
        self.root: str | None = None
        self.model: weakref.ref[object] | None = None
        self.eager_function = ""
        self.breaks_in_loop = False
        self.failure: OptimizerStateError | None = None
        self.num_breaks = 0
        self.num_compilations = 0
        self.num_graphs_compiled = 0
        self.num_graphs_seen = 0
        self.has_run_graphs = False
        self.has_eager_frames = False

    def __enter__(self) -> None:
        under_way()  # raises what an interrupted one has left lowered
        self.num_breaks = dynamo.num_graph_breaks()
        self.handled = sys.exception()
        self.frame = dynamo.frame_of_call(sys._getframe())
        self.fences = standing_fences()
        try:
            _thread.calls.append(self)  # before the fences fall: from here on somebody knows of them
            lower_fences()
            if len(_thread.calls) == 1:
                for look in _looks:
                    look(dynamo.function_of_call(self.frame), self.function.is_ours)
            is_stance_default = dynamo.is_stance_default()
            if not self.functions.is_whole or not is_stance_default:
                if not is_stance_default or self._code() in self.functions.unseen:
                    self.refuse_early()
                self.settle()
        except BaseException:  # nobody will call __exit__
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # Dynamo gives its contexts no exception, also where one is on its way out of the call.
            has_returned = sys.exception() is self.handled
            if not has_returned:
                for end in self.if_it_fails:
                    end()
            if self.failure is not None:
                raise self.failure
            if self.num_compilations or self.has_eager_frames:
                self._judge()
            if has_returned and self.function.is_ours and not self.function.has_returned:
                self.function.has_returned = True
                if not (self.has_run_graphs or self.num_compilations) and dynamo.is_stance_default():
                    tried = self.eager_function or ("the module's forward in an earlier call" if is_given_up() else "")
                    why = f"It could not compile {tried}. TORCH_LOGS=graph_breaks says why" if tried else _OWN_CLASS
                    log.warning("%s%s", _NOTHING_COMPILED, why)
            for updates in self.updates():
                updates.prune()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Raise what is still needed. An interrupt leaves the call to `under_way`, which does it again."""
        raise_fences([fence for fence in self.fences if (u := fence.updates) is not None and u.needs_fence])
        _thread.calls[:] = [call for call in _thread.calls if call is not self]
        self.frame = self.handled = None

    def updates(self) -> list[Guarded]:
        """Those whose fences were lowered."""
        return [fence.updates for fence in self.fences if fence.updates is not None]

    def refuse_early(self) -> None:
        """Raise OptimizerStateError where an update started in a backward that no step followed: what runs now is not seen."""
        for updates in self.updates():
            updates.early.refuse_unseen("a compiled function that may use any parameter was called")

    def settle(self, but: Guarded | None = None) -> None:
        """Wait for the updates whose fences were lowered, except those of one model."""
        for updates in self.updates():
            if updates is not but:
                updates.wait_all()

    def _judge(self) -> None:
        broke = dynamo.num_graph_breaks() != self.num_breaks
        if broke or self.has_eager_frames or self.num_compilations != 1 or self.num_graphs_seen > 1:
            self.functions.unseen.add(self._code())
            for updates in self.updates():
                updates.early.complain(
                    "and the parameter itself were in reach of a compiled function with graph breaks"
                )
        if not self.num_compilations:
            return
        is_ours = self.num_graphs_compiled > 0
        is_whole = self.num_compilations == self.num_graphs_compiled == 1 and not broke
        if is_ours and not is_whole and self.functions.is_whole is not False:
            log.info(
                "a compiled function has graph breaks: its calls wait for all updates of the optimizer before they begin,"
                " instead of overlapping with them"
            )
        self.functions.is_whole = is_whole and self.functions.is_whole is not False

    def _code(self) -> CodeType:
        """Of the function that is called; of all modules together."""
        return getattr(dynamo.function_of_call(self.frame), "__code__", Call.__enter__.__code__)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_thread = _Thread()
_given_up: weakref.WeakSet[CodeType] = weakref.WeakSet()
_looks: list[Callable[[object, bool], None]] = []


def before_calls(look: Callable[[object, bool], None], *, first: bool = False) -> None:
    """From now on, call ``look`` before Dynamo looks for the code of a call that is within no other.

    ``look`` gets the call's function and whether our backend compiled it. ``first``: before all others that were given so far.
    """
    _looks.insert(0 if first else len(_looks), look)


def begin_late(function: CompiledFunction, frame: FrameType) -> None:
    """A call that began before anybody watched: this thread runs its frame, inside of the calls that are known."""
    call = Call(function)
    call.frame, call.handled = frame, sys.exception()
    _thread.calls.append(call)


def note_graph_run() -> bool:
    """A graph of any backend runs in the calls of this thread; returns whether any of them has lowered a fence."""
    for call in _thread.calls:
        call.has_run_graphs = True
    return any(call.fences for call in _thread.calls)


def keep_until_end(value: object) -> None:
    """Keep ``value`` until the outermost call of this thread ends: nothing else need reference it until then."""
    under_way()[0].kept.append(value)


def note_model(model: object) -> None:
    """A graph of the model runs in the outermost call of this thread, if there is one."""
    for call in under_way()[:1]:
        call.model = weakref.ref(model)


def model_of_call() -> object:
    """The model of the graph that ran last in the outermost call of this thread; None where none did."""
    call = next(iter(under_way()), None)
    return None if call is None or call.model is None else call.model()


def is_compiling_root() -> bool:
    """Whether Dynamo compiles the function that the outermost call of this thread is of, or what follows a graph break in it.

    A function that it calls does not count: others may run beside that.
    """
    calls = under_way()
    return not calls or calls[0].root == dynamo.function_being_compiled()[0]


def note_given_up(code: CodeType) -> None:
    """Dynamo runs code eagerly, now and in later calls until it is reset."""
    _given_up.add(code)


def note_attempt(code: CodeType) -> None:
    """Dynamo tries to compile code: if it had given it up, it has been reset since."""
    _given_up.discard(code)


def is_given_up() -> bool:
    """Whether Dynamo runs the module that the outermost call of this thread is of eagerly, and compiles only what that calls."""
    owner = getattr(function_called(), "__self__", None)
    return isinstance(owner, nn.Module) and getattr(owner.forward, "__code__", None) in _given_up


def outermost() -> Call | None:
    """The object that stands for the outermost call of this thread; None outside of calls."""
    return next(iter(under_way()), None)


def eager_function() -> str:
    """Which function of the outermost call Dynamo could not compile, and why as far as is known; empty where it compiled all."""
    call = next(iter(under_way()), None)
    return "" if call is None else call.eager_function


def function_called() -> object:
    """The function that the outermost call of this thread calls; None outside of calls."""
    calls = under_way()
    return dynamo.function_of_call(calls[0].frame) if calls else None


def under_way() -> list[Call]:
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


def note_compiled_graph(inputs: Iterable[Tensor]) -> None:
    """Our backend compiles a graph, and may move the parameters among its inputs."""
    tensors = list(inputs)
    unplanned.note_compilation(tensors)
    for updates in {found for call in under_way() for found in call.updates()}:
        updates.early.refuse(tensors)
    for call in under_way()[-1:]:
        call.num_graphs_compiled += 1


def modules_called() -> list[nn.Module]:
    """Those that the calls which this thread is in are of, the outermost first, as far as is known."""
    return [module for call in under_way() for module in dynamo.modules_of(dynamo.function_of_call(call.frame))]


def guard_backward(updates: Updates) -> None:
    """The call runs a forward whose backward may start updates: the fence must see that, where nothing else is called."""
    calls = under_way()
    if calls and all(call.functions.is_whole for call in calls):
        if updates.fence not in calls[0].fences:
            calls[0].fences.append(updates.fence)
        updates.early.is_expected = True


def refuse_early(args: Iterable[Tensor], updates: Guarded) -> None:
    """Raise OptimizerStateError where a graph gets a parameter whose update started in a backward that no step followed."""
    for other in {updates, *(found for call in under_way() for found in call.updates())}:
        other.early.refuse(args)


def settle_others(updates: Guarded) -> None:
    """Wait for the updates of other models whose fences were lowered.

    A model's graph waits for its own alone, and Dynamo may serve a call with the graph of another model of the same class.
    """
    for call in under_way():
        call.settle(but=updates)


def is_within_call() -> bool:
    """Whether this thread runs a compiled function, whose entry was seen."""
    return bool(under_way())
