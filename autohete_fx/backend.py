"""``torch.compile(model, backend="autohete")``: the whole flow on one page.

Dynamo hands over a graph and the real parameters. The partitioner decides what follows, because the joint
forward and backward graph exists only there: group, profile, plan, partition, rewrite. The inner compiler then compiles the
rewritten graphs; its last graph pass pins the inserted nodes. Parameters move to where the plan wants them when
compilation is done. A process that finds the compiled code in a cache runs none of this: it reads the stored
`Compilation` and places the parameters.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from autohete_fx.capture.inputs import GraphInput, graph_inputs, parameters_of
from autohete_fx.compiler import assumptions
from autohete_fx.compiler.agreement import Agreement
from autohete_fx.compiler.captured import CapturedGraph
from autohete_fx.compiler.compilation import record
from autohete_fx.compiler.graph import GraphCompiler
from autohete_fx.compiler.model import find_model, graph_key, held_inputs
from autohete_fx.compiler.reporting import reported
from autohete_fx.compiler.running import running, timed
from autohete_fx.compiler.telling import tell
from autohete_fx.errors import AutoHeteError
from autohete_fx.internals import dynamo, logs
from autohete_fx.options import Options
from autohete_fx.runtime.pending import calls, watching
from autohete_fx.runtime.pending.fence import tensors_in


def __getattr__(name: str) -> Callable[..., object]:
    """The backend, for whoever takes it to compile with it, as Dynamo does at the first ``torch.compile(..., backend="autohete")``:
    from then on calls of compiled functions are watched. Importing this module changes nothing of PyTorch."""
    if name != "autohete":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    watching.watch()
    return _autohete


def _autohete(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """The backend function that ``torch.compile`` calls once a graph.

    Raises:
        OptionError: an option is unknown or has a bad value.
        InfeasiblePlanError: no plan fits the budget.
        PlanError: the given plan does not fit the graph.
    """
    began_s = time.perf_counter()
    logs.follow()
    try:
        calls.note_compiled_graph(tensors_in(example_inputs))
        inputs = held_inputs(graph_inputs(gm, example_inputs, calls.modules_called()))
        agreement = Agreement(parameters_of(inputs).values())
        with agreement.announced(inputs):
            return _compile(gm, example_inputs, inputs, Options.from_user(options, mode), agreement, began_s)
    except AutoHeteError as error:
        raise dynamo.surfacing(error) from error.__cause__


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    inputs: Sequence[GraphInput],
    chosen: Options,
    agreement: Agreement,
    began_s: float,
) -> Callable[..., object]:
    model = find_model(gm, inputs, chosen)
    with model.compiling():
        options = model.seen_in(chosen)
        captured = CapturedGraph(gm=gm, inputs=inputs, options=options, model=model, agreement=agreement)
        compiler = GraphCompiler(captured)
        compiled = compiler.compile(example_inputs)  # group, profile, plan, rewrite, and the inner compiler
        compilation = compiler.finish(time.perf_counter() - began_s)  # parameters move to where the plan has them
        compilation = timed(compilation, model.session, options.micro_batches)
        compilation = reported(compilation, options.report_dir, model.session.device, graph_key(inputs))
        record(compilation)
        tell(compilation)
        return running(compiled, compilation, inputs, model, options, compiler.same_call)


_autohete.__name__ = _autohete.__qualname__ = "autohete"
calls.before_calls(assumptions.look)
