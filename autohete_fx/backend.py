"""``torch.compile(model, backend="autohete")``: the whole flow on one page.

Dynamo hands over a graph and the real parameters. What follows is decided in the partitioner, because that is where the
joint forward and backward graph exists: group, profile, plan, partition, rewrite. The inner compiler then compiles the
rewritten graphs; its last graph pass pins the inserted nodes. Parameters move to where the plan wants them when
compilation is done. A process that finds the compiled code in a cache runs none of this: it reads the stored
`Compilation` and places the parameters.
"""

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autohete_fx.capture.inputs import graph_inputs
from autohete_fx.compiler import assumptions
from autohete_fx.compiler import compilation as compilation_module
from autohete_fx.compiler.assumptions import Assumptions
from autohete_fx.compiler.compilation import Compilation
from autohete_fx.compiler.graph import GraphCompiler
from autohete_fx.compiler.model import Model, find_model
from autohete_fx.compiler.parameters import GraphParameters
from autohete_fx.errors import AutoHeteError
from autohete_fx.internals import dynamo, versions
from autohete_fx.ir import LaneRecord, Overlap, Schedule
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.options import Options
from autohete_fx.planner.infeasible import too_small
from autohete_fx.runtime import shortage
from autohete_fx.runtime.pending import calls
from autohete_fx.runtime.pending.fence import tensors_in
from autohete_fx.runtime.session import Session
from autohete_fx.runtime.steps import StepClock

log = logging.getLogger(__name__)

_STEPS_TO_LOG = 20
"""After so many steps, prediction and measurement are logged side by side, once a graph."""

_MODEL = "autohete_fx"
"""The key under which a node of autograd's graph keeps the model."""


def autohete(
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
    try:
        return _compile(gm, example_inputs, Options.from_user(options, mode))
    except AutoHeteError as error:
        raise dynamo.surfacing(error) from error.__cause__


def _compile(gm: fx.GraphModule, example_inputs: Sequence[object], chosen: Options) -> Callable[..., object]:
    calls.note_compiled_graph(tensors_in(example_inputs))
    inputs = graph_inputs(gm, example_inputs, calls.modules_called())
    model = find_model(gm, inputs, chosen)
    chosen = dataclasses.replace(chosen, micro_batches=max(chosen.micro_batches, model.micro_batches))
    begin = time.perf_counter()
    compiler = GraphCompiler(gm=gm, inputs=inputs, options=chosen, model=model)
    try:
        compiled = compiler.compile(example_inputs)
    except AutoHeteError:
        model.give_up_call()
        raise
    result = compiler.finish(time.perf_counter() - begin)
    if result.training:
        clock = StepClock(model.session.device, chosen.micro_batches, _records_of(model.session))
        result = dataclasses.replace(result, clock=clock)
    compilation_module.record(result)
    log.info("%s", result)
    parameters = GraphParameters(inputs, result, model)
    assumed = None
    if result.training and result.device_budget_bytes is not None:
        assumed = Assumptions(parameters, inputs, chosen.micro_batches)
    return _owning(compiled, model, result, parameters, assumed)


def _records_of(session: Session) -> Callable[[], tuple[LaneRecord, ...]]:
    """What the session's lanes did; reports outlive models and must not keep them."""
    reference = weakref.ref(session)

    def records() -> tuple[LaneRecord, ...]:
        found = reference()
        return () if found is None else found.lanes.records()

    return records


def _owning(
    compiled: Callable[..., object],
    model: Model,
    compilation: Compilation,
    parameters: GraphParameters,
    assumed: Assumptions | None,
) -> Callable[..., object]:
    """The compiled function, which keeps the model's runtime alive, times its steps, and cleans up behind an exception.

    Before it begins it waits for the updates that no node of the graph waits for: those of parameters that the graph does not
    read, and those of memory that any other input shares, such as a buffer that is a view of a weight.
    """
    explain = functools.partial(_shortage, model.session.device, compilation)
    guarded = _cleaning_up(weakref.ref(model.session), explain)
    backward = _adding(weakref.ref(model.session), guarded, _refusal(compilation))

    @functools.wraps(compiled, updated=())
    def run(*args: object) -> object:
        if compilation.clock is not None and compilation.clock.begin_pass() == _STEPS_TO_LOG:
            log.info("after %d steps\n%s", _STEPS_TO_LOG, compilation.comparison_table())
        updates = model.session.updates
        calls.note_model(model)
        calls.refuse_early(tensors_in(args), updates)
        calls.settle_others(updates)
        awaited = parameters.arrive(args)
        if assumed is not None:
            assumed.note_run()
        updates.wait_all(but=awaited)
        if updates.is_pending:
            for t in tensors_in(args):
                if id(t) not in awaited:
                    updates.wait_for(t)
        if compilation.training:
            updates.shortage = explain
            updates.schedule = compilation.plan.schedule if calls.is_within_call() else Schedule()
            if updates.schedule.overlap is Overlap.BACKWARD:
                calls.guard_backward(updates)
        outputs = guarded(compiled, *args)
        if compilation.training:
            versions.around_backward(outputs, backward)
        for t in tensors_in((outputs,)):
            if t.grad_fn is not None:  # a backward may outlive the compiled model
                kept: Any = t.grad_fn.metadata  # a dictionary, which PyTorch's stub calls a method
                kept[_MODEL] = model
        return outputs

    if getattr(compiled, "_boxed_call", False):
        run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _cleaning_up(session: "weakref.ref[Session]", explain: Callable[[BaseException], str]) -> Callable[..., object]:
    """What calls a compiled forward or backward, ends its copies when it raises, and says more where memory ran out."""

    def call(compiled: Callable[..., object], *args: object) -> object:
        try:
            return compiled(*args)
        except BaseException as error:
            owner = session()
            if owner is not None:
                for failure in owner.abandon():
                    error.add_note(f"a copy that was under way failed too: {failure!r}")
                if isinstance(error, torch.OutOfMemoryError):
                    error.add_note(explain(error))
            raise

    return call


def _refusal(compilation: Compilation) -> AutoHeteError | None:
    """Of a graph that does not fit even with a plan that takes least, where graphs behind it were to tell what all need: raised by
    its backward, if there are none."""
    peak, budget = compilation.plan.peak_bytes, compilation.device_budget_bytes
    if compilation.unsettled is None or budget is None or peak <= budget:
        return None
    return dynamo.surfacing(too_small(budget, peak, f"The plan that takes least needs {format_bytes(peak)}"))


def _adding(
    session: "weakref.ref[Session]", guarded: Callable[..., object], refusal: AutoHeteError | None
) -> Callable[..., object]:
    """What calls a compiled backward: autograd does not get the gradients that updates under way add to ``.grad``."""

    def call(compiled: Callable[..., object], *args: object) -> object:
        if refusal is not None:
            raise refusal
        gradients, owner = guarded(compiled, *args), session()
        assert owner is not None and isinstance(gradients, list | tuple)
        return type(gradients)(owner.updates.early.left_to_autograd(gradients))

    return call


def _shortage(device: torch.device, compilation: Compilation, error: BaseException) -> str:
    plan = compilation.plan
    name = f"plan {plan.digest} of {len(plan.labels)} blocks ({plan.status})"
    use = shortage.device_use(error, device)
    return shortage.shortage_text(use, name, plan.peak_bytes, compilation.device_budget_bytes)


calls.before_calls(assumptions.look)

__all__ = ["autohete"]
