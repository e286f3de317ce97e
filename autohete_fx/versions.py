"""Everything that differs between the supported versions of PyTorch, 2.11 to 2.15."""

import contextlib
import functools
import gc
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

_ENTRY = "compile_wrapper"  # the function of Dynamo's that calls a compiled function


def custom_passes(configured: object) -> tuple[Callable[[fx.Graph], None], ...]:
    """What stands in one of Inductor's custom pass options, as a tuple: 2.13 allows sequences, 2.11 one pass."""
    if configured is None:
        return ()
    return tuple(configured) if isinstance(configured, list | tuple) else (configured,)  # type: ignore[return-value]


def run_as_is(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[[list[object]], object]:
    """A graph that runs node by node, each value freed after its last use."""
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()

    def run(args: list[object]) -> object:
        return graph(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    partition_fn: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    inference_pass: Callable[[fx.GraphModule], object],
) -> Callable[..., object]:
    """AOTAutograd with graphs that run as they are."""
    from torch._dynamo.backends.common import aot_autograd

    def infer(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[[list[object]], object]:
        inference_pass(graph)
        return run_as_is(graph, inputs)

    backend: Any = aot_autograd(
        fw_compiler=run_as_is, bw_compiler=run_as_is, inference_compiler=infer, partition_fn=partition_fn
    )
    return backend(gm, list(example_inputs))


def compile_apart(function: Callable[..., object], backend: Callable[..., object]) -> Callable[..., object]:
    """``torch.compile``, with what is compiled kept apart from what other calls compile of the same code: it does not count
    towards their limit of recompilations, nor theirs towards its own.

    2.11 and 2.12 keep what is compiled with the code of a function, so there the function is called by one with code of its own.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        apart: dict[str, Any] = {"isolate_recompiles": True}  # of which the overloads do not know
        return torch.compile(function, backend=backend, **apart)

    def call(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, backend=backend)


def around_backward(outputs: object, around: Callable[..., object]) -> None:
    """From now on, run the compiled backward of what a compiled forward returned as ``around(backward, *args)``.

    AOTAutograd makes an autograd function of each forward that it compiles, and looks up on it what runs the backward.
    """
    for output in outputs if isinstance(outputs, list | tuple) else (outputs,):
        function = getattr(getattr(output, "grad_fn", None), "_forward_cls", None)
        backward = getattr(function, "_backward_impl", None)
        if function is None or backward is None:
            continue
        if not hasattr(backward, "_autohete_is_around"):
            run = functools.wraps(backward)(functools.partial(around, backward))
            run._autohete_is_around = True  # type: ignore[attr-defined]
            function._backward_impl = staticmethod(run)
        return


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


def on_cache_misses(begin: Callable[[], None], compiled: Callable[[], None], given_up: Callable[[], None]) -> None:
    """Call back around what Dynamo does with a frame for which it has no compiled code.

    ``begin`` is called before, then ``compiled`` or, where the frame will run as it is (a limit, a mode, an operation that
    cannot be traced), ``given_up``. Frames that Dynamo leaves alone by rule, such as PyTorch's own, give up nothing.

    What the garbage collector runs, its callbacks and finalizers, is no part of the program, though a collection may begin
    anywhere, also between the entry of a compiled function and its code. It runs as it is, behind ``begin``, which nobody would
    hear raise there.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._dynamo.types import ConvertFrameReturn

    convert: Callable[..., Any] = CatchErrorsWrapper.__call__

    @functools.wraps(convert)
    def call(self: Any, frame: Any, *args: Any) -> Any:
        if _is_of_collector(frame.f_code):
            with contextlib.suppress(Exception):
                begin()
            return ConvertFrameReturn(apply_to_code=False)
        begin()
        result = convert(self, frame, *args)
        if result.guarded_code is not None:
            compiled()
        elif not trace_rules.check(frame.f_code):
            given_up()
        return result

    CatchErrorsWrapper.__call__ = call  # type: ignore[method-assign]


def _is_of_collector(code: CodeType) -> bool:
    """Whether the function that is about to run in this thread is a callback or a finalizer of the garbage collector's, or is
    called by one, other than in a call of a compiled function that this made."""
    callbacks = (weakref.finalize.__call__, *gc.callbacks)
    # By identity: code that Dynamo wrote may not be hashable.
    codes = {id(getattr(c, "__code__", getattr(type(c).__call__, "__code__", None))) for c in callbacks}
    caller: FrameType | None = sys._getframe()
    while id(code) not in codes and code.co_name != "__del__":
        caller = caller.f_back if caller is not None else None
        if caller is None or caller.f_code.co_name == _ENTRY:
            return False
        code = caller.f_code
    return True


def function_being_compiled() -> tuple[str, str]:
    """The function that Dynamo compiles in this thread, by file and name, and the part of it, between two graph breaks; empty where
    Dynamo does not compile.

    What follows a graph break is to Dynamo a function of its own, whose name says which one it resumes.
    """
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return "", ""
    code = translator.output.root_tx.f_code
    name = re.sub(rf"{TORCH_DYNAMO_RESUME_IN_PREFIX}_(\w+)_at_\d+", r"\1", code.co_qualname)
    return f"{code.co_filename}:{name}", code.co_qualname


def frame_of_call(frame: FrameType | None) -> FrameType | None:
    """The frame of Dynamo's that entered the context of a call, by the frame of the context; None where there is none."""
    while frame is not None and frame.f_code.co_name != _ENTRY:
        frame = frame.f_back
    return frame


def function_of_call(frame: FrameType | None) -> object:
    """What the call calls, by that frame."""
    return None if frame is None else frame.f_locals.get("fn")


def on_compiled_graphs(around: Callable[[fx.GraphModule, Callable[..., object]], Callable[..., object]]) -> None:
    """From now on, Dynamo runs what ``around`` makes of a graph and of what its backend, whichever it is, made of it."""
    from torch._dynamo.repro.after_dynamo import WrapBackendDebug

    compile_graph: Callable[..., Any] = WrapBackendDebug.__call__

    @functools.wraps(compile_graph)
    def call(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        return around(gm, compile_graph(self, gm, *args, **kwargs))

    WrapBackendDebug.__call__ = call  # type: ignore[method-assign]


def on_calls_of_compiled_functions(
    context_of: Callable[[object], Callable[[], contextlib.AbstractContextManager[None]]],
) -> None:
    """Run every call of a function that is compiled from now on in a context: ``context_of(backend)`` makes such contexts.

    The context is entered before guards are evaluated. Dynamo asks a backend for it, by the attribute ``backend_ctx_ctor``,
    but the object that it asks is its own wrapper, which has that attribute only if the backend is a plain function. Here
    the wrapper's class gets it; what a backend brings itself is entered inside.
    """
    from torch._dynamo.repro.after_dynamo import WrapBackendDebug

    def both_of(wrapper: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
        ours = context_of(wrapper._torchdynamo_orig_backend)
        theirs = vars(wrapper).get("backend_ctx_ctor", contextlib.nullcontext)

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            with ours(), theirs():
                yield

        return ours if theirs is contextlib.nullcontext else both

    WrapBackendDebug.backend_ctx_ctor = property(both_of)  # type: ignore[attr-defined]
