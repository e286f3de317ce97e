"""See what the backend would do with a model, without training it.

In: a model and one batch. Out: the `Compilation` of each graph. The model runs its forward once, in eager mode; its
parameters, buffers and the random state are as before, also after an error. Nothing moves and nothing is stored.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import fx
from torch.nn.parameter import UninitializedBuffer

from autohete_fx.capture.inputs import graph_inputs, parameters_of
from autohete_fx.compiler.agreement import Agreement
from autohete_fx.compiler.captured import CapturedGraph
from autohete_fx.compiler.compilation import Compilation
from autohete_fx.compiler.graph import GraphCompiler
from autohete_fx.compiler.model import graph_key, held_inputs, new_model
from autohete_fx.compiler.reporting import reported
from autohete_fx.compiler.telling import tell
from autohete_fx.errors import AutoHeteError, CaptureError
from autohete_fx.internals import dynamo, logs, versions
from autohete_fx.options import Options
from autohete_fx.runtime.pending import calls, watching


def _modules_of(call: "functools.partial[object]") -> Iterator[torch.nn.Module]:
    """The modules that a function is of (`dynamo.modules_of`), is given, or finds among its globals."""
    code, variables = getattr(call.func, "__code__", None), getattr(call.func, "__globals__", {})
    named = (variables.get(name) for name in code.co_names) if code is not None else ()
    found = (*dynamo.modules_of(call.func), *call.args, *call.keywords.values(), *named)
    return (each for each in found if isinstance(each, torch.nn.Module))


@contextlib.contextmanager
def _buffers_kept(call: "functools.partial[object]") -> Iterator[None]:
    """Afterwards the modules of a call have the buffers that they had, with their values. Those that a first forward makes stay."""
    modules = dict.fromkeys(module for root in _modules_of(call) for module in root.modules())
    kept = [
        (module, name, b, b.detach().clone())
        for module in modules
        for name, b in module.named_buffers(recurse=False)
        if not isinstance(b, UninitializedBuffer)
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            writing = torch.inference_mode() if buffer.is_inference() else torch.no_grad()
            with writing, contextlib.suppress(RuntimeError):  # an expanded one, which nobody can have written either
                buffer.copy_(value)
            setattr(module, name, buffer)


def preview(
    model: Callable[..., object],
    *inputs: object,
    options: Mapping[str, object] | None = None,
    **keyword_inputs: object,
) -> list[Compilation]:
    """Plan and rewrite every graph of ``model(*inputs, **keyword_inputs)``.

    Args:
        model: a module or function, not compiled yet.
        inputs, keyword_inputs: one batch, as for a training step.
        options: as for the backend.

    Returns:
        One compilation a graph, in execution order; usually one.

    Raises:
        OptionError, InfeasiblePlanError, PlanError: as the backend does.
        CaptureError: Dynamo compiled nothing.
    """
    chosen = Options.from_user(options)
    found: list[Compilation] = []
    watching.watch()

    def look(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        logs.follow()
        sources = held_inputs(graph_inputs(gm, example_inputs, calls.modules_called()))
        owner = new_model(gm, sources, chosen)
        try:
            agreement = Agreement(parameters_of(sources).values())
            with agreement.announced(sources):
                captured = CapturedGraph(gm=gm, inputs=sources, options=chosen, model=owner, agreement=agreement)
                compilation = GraphCompiler(captured).look(example_inputs)
                found.append(reported(compilation, chosen.report_dir, owner.session.device, graph_key(sources)))
                tell(compilation)
        except AutoHeteError as error:
            raise dynamo.surfacing(error) from error.__cause__
        finally:
            owner.session.close()  # a compilation that follows must not take this for a twin
        return gm.forward

    with (
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
        _buffers_kept(functools.partial(model, *inputs, **keyword_inputs)),
    ):
        versions.compile_apart(model, look)(*inputs, **keyword_inputs)
    if not found:
        raise CaptureError(
            "the model ran, but Dynamo compiled no graph of it, so there is nothing to preview; TORCH_LOGS=graph_breaks says"
            " what it could not trace, and torch.compiler.reset() forgets what it gave up"
        )
    return found
