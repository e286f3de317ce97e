"""Dynamo: what it compiles now and why it breaks graphs, and hooks around its calls, its compilations and its failures."""

import contextlib
import functools
import gc
import inspect
import re
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import fx
from torch._dynamo.exc import Unsupported as Unsupported

from autohete_fx.errors import AutoHeteError
from autohete_fx.internals import garbage
from autohete_fx.internals.compiled_code import looked_at
from autohete_fx.internals.stack import on_one_chunk

_TORCH = Path(torch.__file__).parent
_WRAPPERS = (str(_TORCH / "_dynamo"), str(_TORCH / "nn" / "parallel"))
_LIBRARY, _INSTALLED = sysconfig.get_path("stdlib"), ("site-packages", "dist-packages")

_ENTRY = "compile_wrapper"  # the function of Dynamo's that calls a compiled function


def num_graph_breaks() -> int:
    """How often Dynamo broke a graph, or gave up on a frame, in this process."""
    from torch._dynamo.utils import counters

    frames = counters["frames"]
    return sum(counters["graph_break"].values()) + frames["total"] - frames["ok"]


def is_stance_default() -> bool:
    """Whether compiled functions run what their own backend compiled, or compile it: ``torch.compiler.set_stance`` and
    ``torch._dynamo.config.disable`` say otherwise."""
    from torch._dynamo import config, eval_frame

    return eval_frame._stance.stance == "default" and eval_frame._stance.backend is None and not config.disable


class _Frame(threading.local):
    """The frame that Dynamo converts in this thread now.

    Attributes:
        is_split: whether Dynamo may split its graph for DistributedDataParallel.
        loop_break: why and where a graph broke within a loop, because of which the frame runs as it is; empty where none did.
        has_objects: whether the trace of a graph refers to objects of the program.
        began_s: when that began, by `time.perf_counter`; None where nobody looked.
    """

    is_split = True
    loop_break = ""
    has_objects = False
    began_s: float | None = None


_frame = _Frame()


@contextlib.contextmanager
def _converting(*, is_split: bool) -> Iterator[None]:
    before = _frame.is_split, _frame.has_objects, _frame.began_s
    _frame.is_split, _frame.loop_break, _frame.has_objects, _frame.began_s = is_split, "", False, time.perf_counter()
    try:
        yield
    finally:
        _frame.is_split, _frame.has_objects, _frame.began_s = before


def conversion_began_s() -> float | None:
    """When Dynamo began with the frame that it converts in this thread, by `time.perf_counter`; None where it converts none."""
    return _frame.began_s


def turn_off_ddp_optimizer() -> None:
    """From now on, graphs of our backend stay whole in a DistributedDataParallel.

    Dynamo's DDPOptimizer, its default there, would split them into one a bucket of gradients, and none would count the others in
    its budget.
    """
    from torch._dynamo import utils

    mode_of = utils.get_optimize_ddp_mode

    @functools.wraps(mode_of)
    def mode() -> str:
        found = mode_of()
        return "no_optimization" if found == "ddp_optimizer" and not _frame.is_split else found

    utils.get_optimize_ddp_mode = mode


def module_of_backend(backend: object) -> str:
    """The module of a function, or of the one of which ``torch.compile`` makes another with options; empty where it has none."""
    return getattr(getattr(backend, "compiler_fn", backend), "__module__", None) or ""


def on_cache_misses(
    begin: Callable[[CodeType | None], None], compiled: Callable[[], None], given_up: Callable[[CodeType, str], None]
) -> None:
    """Call back around what Dynamo does with a frame for which it has no compiled code.

    ``begin`` is called before, with the frame's code where Dynamo may compile it and a user may have written it. Then
    ``compiled`` is called, or ``given_up`` where the frame will run as it is (a limit, a mode, an operation that cannot be
    traced). ``given_up`` gets the break in a loop that led to it, as ``file:line: reason``, or nothing. Frames that Dynamo
    leaves alone by rule, such as PyTorch's own, give up nothing.

    Garbage is collected before the code runs, where our backend compiled and there may be need. Traces are in cycles. They keep
    the objects that they know, such as a cache of keys and values, with the tensors that the code puts there. A trace that ended at
    a break keeps the tensors that its function got. Dynamo collects young garbage alone, and what is compiled for long gets old.

    Callbacks and finalizers that the garbage collector runs are no part of the program. A collection may begin anywhere, also
    between the entry of a compiled function and its code. It runs as it is, after ``begin``, which nobody would hear raise
    there.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._dynamo.types import ConvertFrameReturn

    convert: Callable[..., Any] = CatchErrorsWrapper.__call__

    @functools.wraps(convert)
    def call(self: Any, frame: Any, *args: Any) -> Any:
        if _is_of_collector(frame.f_code):
            with contextlib.suppress(Exception):
                begin(None)
            return ConvertFrameReturn(apply_to_code=False)
        is_left_alone = trace_rules.check(frame.f_code)
        with looked_at(frame.f_code):
            begin(None if is_left_alone or _is_of_wrapper(frame.f_code) else frame.f_code)
            backend = getattr(getattr(self, "_torchdynamo_orig_backend", None), "_torchdynamo_orig_backend", None)
            backend = getattr(backend, "_torchdynamo_orig_backend", backend)
            is_ours = module_of_backend(backend).startswith("autohete_fx.")
            with _converting(is_split=not is_ours):
                num_breaks = num_graph_breaks()
                result = convert(self, frame, *args)
                has_old_traces = _frame.has_objects or num_graph_breaks() != num_breaks
            if is_ours and has_old_traces:
                garbage.collect()
            if result.guarded_code is not None:
                compiled()
            elif not is_left_alone:
                given_up(frame.f_code, _frame.loop_break)
            return result

    on_one_chunk(call)
    CatchErrorsWrapper.__call__ = call  # type: ignore[method-assign]
    _note_loop_breaks()


def _is_of_wrapper(code: CodeType) -> bool:
    """Whether the code is no user's though Dynamo may compile it: Dynamo's own, DistributedDataParallel's, or the standard
    library's, which DistributedDataParallel calls before it calls a model."""
    path = code.co_filename
    is_library = path.startswith(_LIBRARY) and not any(folder in path for folder in _INSTALLED)
    return is_library or path.startswith(_WRAPPERS)


def _note_loop_breaks() -> None:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    give_up = InstructionTranslatorBase.raise_loop_graph_break

    @functools.wraps(give_up)
    def note(code: CodeType, error: Any) -> NoReturn:
        _frame.loop_break = _located(getattr(error, "msg", str(error)), getattr(error, "real_stack", ()))
        give_up(code, error)

    InstructionTranslatorBase.raise_loop_graph_break = staticmethod(note)  # type: ignore[method-assign]


_WEAK = frozenset(kind.__init__.__code__.co_filename for kind in (weakref.WeakSet, weakref.WeakValueDictionary))
"""Files of the standard library whose functions a tensor's end may call, wherever a compiled graph replaces it."""


def _is_of_collector(code: CodeType) -> bool:
    """Whether the function that is about to run in this thread is a callback or a finalizer of the garbage collector's, or a
    callback by which a weak collection forgets what died, or is called by one, other than in a call of a compiled function that
    this made."""
    callbacks = (weakref.finalize.__call__, *gc.callbacks)
    # By identity: code that Dynamo wrote may not be hashable.
    codes = {id(getattr(c, "__code__", getattr(type(c).__call__, "__code__", None))) for c in callbacks}
    caller: FrameType | None = sys._getframe(1)  # this frame would keep itself, and with it all tensors of its callers
    while id(code) not in codes and code.co_name != "__del__" and code.co_filename not in _WEAK:
        if caller is None or caller.f_code.co_name == _ENTRY:
            return False
        code, caller = caller.f_code, caller.f_back
    return True


def function_being_compiled() -> tuple[str, str]:
    """The function that Dynamo compiles in this thread, by file and name, and the part of it, between two graph breaks.

    Empty where Dynamo does not compile.

    To Dynamo the code after a graph break is a function of its own, whose name says which one it resumes.
    """
    code = code_being_compiled()
    return ("", "") if code is None else (function_of(code), code.co_qualname)


def function_of(code: CodeType) -> str:
    """The function of the user's that code belongs to, by file and name: its own, or what follows a graph break in it."""
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX

    name = re.sub(rf"{TORCH_DYNAMO_RESUME_IN_PREFIX}_(\w+)_at_\d+", r"\1", code.co_qualname)
    return f"{code.co_filename}:{name}"


def graph_break_behind(gm: fx.GraphModule) -> str | None:
    """Why Dynamo ended a graph before its function ends, and where: ``file:line: reason``; None where it did not."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return _located(reason.reason, reason.user_stack)


def _located(reason: str, stack: Sequence[FrameSummary]) -> str:
    """A reason of Dynamo's in one line, after the innermost place of a stack of the user's: ``file:line: reason``."""
    where = f"{stack[-1].filename}:{stack[-1].lineno}: " if stack else ""
    return where + _first_line(reason)


def _first_line(reason: str) -> str:
    """And what it explains."""
    lines = [line.strip().removeprefix("Explanation: ") for line in reason.strip().splitlines()]
    return "; ".join(line.rstrip(".") for line in lines[:2] if line)


def code_being_compiled() -> CodeType | None:
    """The code that Dynamo compiles in this thread; None where it does not compile."""
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)
    return None if translator is None else translator.output.root_tx.f_code


def frame_of_call(frame: FrameType | None) -> FrameType | None:
    """The frame of Dynamo's that entered the context of a call, by the frame of the context; None where there is none."""
    while frame is not None and frame.f_code.co_name != _ENTRY:
        frame = frame.f_back
    return frame


def function_of_call(frame: FrameType | None) -> object:
    """The function that the call calls, by that frame."""
    return None if frame is None else frame.f_locals.get("fn")


def modules_of(function: object) -> list[torch.nn.Module]:
    """The modules that a compiled function is of: the one that it is, or is a method of.

    Else those that it, or a function that it closes over, closes over.
    """
    from torch.nn.parallel import DistributedDataParallel

    known = (FunctionType, MethodType, torch.nn.Module)
    functions, found = [function], []
    for each in functions:
        each = inspect.unwrap(each) if isinstance(each, FunctionType) else each
        found.append(getattr(each, "__self__", each))
        for cell in getattr(each, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # one that is still empty
                content = cell.cell_contents
                if isinstance(content, known) and all(content is not other for other in functions):
                    functions.append(content)
    modules = (each for each in found if isinstance(each, torch.nn.Module))
    return [module.module if isinstance(module, DistributedDataParallel) else module for module in modules]


def on_compiled_graphs(around: Callable[[fx.GraphModule, Callable[..., object]], Callable[..., object]]) -> None:
    """From now on, Dynamo runs what ``around`` makes of a graph and of what its backend, whichever it is, made of it."""
    from torch._dynamo.repro.after_dynamo import WrapBackendDebug

    compile_graph: Callable[..., Any] = WrapBackendDebug.__call__

    @functools.wraps(compile_graph)
    def call(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _frame.has_objects = _frame.has_objects or garbage.traces_objects()
        return around(gm, compile_graph(self, gm, *args, **kwargs))

    WrapBackendDebug.__call__ = call  # type: ignore[method-assign]


def on_calls_of_compiled_functions(
    context_of: Callable[[object, object], Callable[[], contextlib.AbstractContextManager[None]]],
) -> None:
    """Run every call of a compiled function from now on in a context, whenever the function was compiled: what
    ``context_of(backend, function)`` returns makes such contexts. The function is None where it is not known, such as of a
    decorator, or of what was compiled before.

    The context is entered before guards are evaluated and before what Dynamo and the backend enter, and is left after that. Each of
    Dynamo's contexts, one a compiled function, reads at every call what is to be entered from an attribute of its own. Here their
    class gets a property of that name, which stands before the attributes of those that are there already.
    """
    from torch._dynamo.eval_frame import OptimizeContext, innermost_backend

    name, compile_code = "enter_exit_hooks", inspect.unwrap(torch.compile).__code__
    assert not hasattr(OptimizeContext, name)

    def found(self: Any) -> "_Entered":
        own = vars(self)[name]
        if not isinstance(own, _Entered):  # as Dynamo has made it
            vars(self)[name] = own = _Entered(own, context_of(innermost_backend(self.callback), given_to_compile()))
        return own

    def put(self: Any, own: list[Callable[[], object]]) -> None:
        vars(self)[name] = own

    def given_to_compile() -> object:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not compile_code:
            frame = frame.f_back
        return None if frame is None else frame.f_locals.get("model")

    setattr(OptimizeContext, name, property(found, put))


class _Entered(list[Callable[[], object]]):
    """What one of Dynamo's contexts enters at a call, each of which returns how it is left; all are left in the same order. Around
    them stands a context that is made at each call."""

    def __init__(
        self, own: list[Callable[[], object]], make: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        super().__init__(own)
        self._make = make

    def __iter__(self) -> Iterator[Callable[[], object]]:
        context = self._make()

        def enter() -> Callable[[], None]:
            context.__enter__()
            return lambda: None

        yield enter
        yield from super().__iter__()
        yield lambda: functools.partial(context.__exit__, None, None, None)


def calls_under_way() -> list[tuple[FrameType, object]]:
    """The calls of compiled functions in this thread, the outermost first: the frame of Dynamo's, and the backend if there is
    one."""
    from torch._dynamo.eval_frame import innermost_backend

    found: list[tuple[FrameType, object]] = []
    frame = frame_of_call(sys._getframe())
    while frame is not None:
        callback = getattr(frame.f_locals.get("self"), "callback", None)
        found.append((frame, innermost_backend(callback) if callable(callback) else None))
        frame = frame_of_call(frame.f_back)
    return found[::-1]


def goes_on(error: BaseException) -> bool:
    """Whether Dynamo takes an error of a backend for one of its own.

    It analyses the function again then, or skips it, and needs what it has compiled.
    """
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def surfacing(error: AutoHeteError) -> AutoHeteError:
    """The same error, of a class that Dynamo lets through: it wraps any other in a BackendCompilerFailed."""
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)
    surfacing_kind = type(
        kind.__name__, (kind, ShortenTraceback), {"__module__": kind.__module__, "first_useful_frame": None}
    )
    copy = surfacing_kind.__new__(surfacing_kind, *error.args)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    return copy
