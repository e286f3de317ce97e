"""A compiled graph when it runs: what happens before, around and after each call of its code.

In: the function that the inner compiler returned, and what was decided for it. Out: the function that Dynamo calls. It keeps
the model's runtime alive and places parameters that are new to it. It waits for updates under way, times steps, and cleans up
after an exception.
"""

import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from autohete_fx.capture.inputs import GraphInput
from autohete_fx.compiler.assumptions import Assumptions, note_evaluation
from autohete_fx.compiler.compilation import Compilation
from autohete_fx.compiler.fitting import Budget
from autohete_fx.compiler.fixed_bytes import unread_bytes
from autohete_fx.compiler.kept import KeptOutputs
from autohete_fx.compiler.model import Model, Origin, origin_of
from autohete_fx.compiler.outside import Outside
from autohete_fx.compiler.parameters import GraphParameters
from autohete_fx.compiler.problem import state_bytes
from autohete_fx.compiler.shares import Run
from autohete_fx.internals import dynamo, versions
from autohete_fx.ir import LaneRecord, Overlap, Schedule
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.optim import others
from autohete_fx.options import Options
from autohete_fx.planner.infeasible import advice_of, broken_up, too_small
from autohete_fx.runtime import shortage
from autohete_fx.runtime.held import held
from autohete_fx.runtime.pending import calls
from autohete_fx.runtime.pending.fence import tensors_in
from autohete_fx.runtime.placement import placement_of
from autohete_fx.runtime.session import Session
from autohete_fx.runtime.shard.same_call import SameCall
from autohete_fx.runtime.steps import StepClock

log = logging.getLogger(__name__)

_STEPS_TO_LOG = 20
"""After so many steps, prediction and measurement are logged side by side, once a graph."""

_MODEL, _RUN = "autohete_fx", "autohete_fx.run"
"""The keys under which a node of autograd's graph keeps the model, which its backward may outlive, and the run of its forward."""


def timed(compilation: Compilation, session: Session, micro_batches: int) -> Compilation:
    """The compilation of a training graph with a clock for its steps; any other as it is."""
    if not compilation.training:
        return compilation
    return dataclasses.replace(compilation, clock=StepClock(session.device, micro_batches, _records_of(session)))


def _records_of(session: Session) -> Callable[[], tuple[LaneRecord, ...]]:
    """What the session's lanes did; reports outlive models and must not keep them."""
    reference = weakref.ref(session)

    def records() -> tuple[LaneRecord, ...]:
        found = reference()
        return () if found is None else found.lanes.records()

    return records


def running(
    compiled: Callable[..., object],
    compilation: Compilation,
    inputs: Sequence[GraphInput],
    model: Model,
    options: Options,
    same_call: SameCall | None,
) -> Callable[..., object]:
    """The function that Dynamo calls for a graph.

    Before the code begins it waits for the updates that no node of the graph waits for. They are updates of parameters that the
    graph does not read. Others are of memory that any other input shares, such as a buffer that is a view of a weight.

    Args:
        compiled: the graph's code.
        inputs: of the graph, as Dynamo gave them.
        model: to which it belongs.
        options: with which it was planned.
        same_call: around each call where other ranks run the graph, too.
    """
    parameters = GraphParameters(inputs, compilation, model)
    model.is_shared |= same_call is not None
    origin = origin_of(inputs)
    assumed = None
    if compilation.training and compilation.device_budget_bytes is not None:
        assumed = Assumptions(parameters, inputs, options)
        others.watch(item.tensor for item in inputs if item.is_parameter and item.tensor is not None)
    explain = functools.partial(_shortage, model.session.device, compilation)
    guarded = _cleaning_up(weakref.ref(model.session), explain, same_call)
    refuse = functools.partial(_refuse_call, weakref.ref(model), compilation, options.micro_batches)
    is_watched = assumed is not None and same_call is None
    outside = Outside(weakref.ref(model), origin, compilation, is_watched=is_watched)
    kept = KeptOutputs(weakref.ref(model), origin, compilation, parameters, is_watched=is_watched)
    backward = _adding(weakref.ref(model), guarded, refuse, outside, kept, compilation, same_call)

    @functools.wraps(compiled, updated=())
    def run(*args: object) -> object:
        if compilation.clock is not None and compilation.clock.begin_pass() == _STEPS_TO_LOG:
            log.info("after %d steps\n%s", _STEPS_TO_LOG, compilation.comparison_table())
        updates = model.session.updates
        calls.note_model(model)
        calls.refuse_early(tensors_in(args), updates)
        calls.settle_others(updates)
        awaited = parameters.arrive(args)
        if not compilation.training:
            note_evaluation(parameters)
        made = None if assumed is None else _noted(assumed, origin, compilation, parameters, model)
        updates.wait_all(but=awaited)
        if updates.is_pending:
            for t in tensors_in(args):
                if id(held(t)) not in awaited:
                    updates.wait_for(t)
        if compilation.training:
            updates.shortage = explain
            updates.schedule = compilation.plan.schedule if calls.is_within_call() else Schedule()
            if updates.schedule.overlap is Overlap.BACKWARD:
                calls.guard_backward(updates)
        outside.begin_forward()
        kept.begin_forward(tensors_in(args))
        begin_s = time.perf_counter()
        with contextlib.nullcontext() if same_call is None else same_call.checked(args, model.told(), model.hear):
            outputs = guarded(compiled, *args)
        if compilation.clock is not None:
            compilation.clock.end_pass("forward", begin_s)
        if compilation.training:
            versions.around_backward(outputs, backward)
        for t in tensors_in((outputs,)):
            if t.grad_fn is not None:
                metadata: Any = t.grad_fn.metadata  # a dictionary, which PyTorch's stub calls a method
                metadata.update({_MODEL: model, _RUN: made})
        outside.end_forward(tensors_in((outputs,)))
        kept.end_forward(tensors_in((outputs,)))
        return outputs

    if getattr(compiled, "_boxed_call", False):
        run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _noted(
    assumed: Assumptions, origin: Origin, compilation: Compilation, parameters: GraphParameters, model: Model
) -> Run:
    """A run of a graph that has a budget begins: it is noted for what later plans assume."""
    assumed.note_run()
    call = calls.outermost()
    made = Run(
        graph=origin,
        footprint=compilation.footprint,
        call=None if call is None else weakref.ref(call),
        parameters=parameters.identities,
    )
    if call is not None:
        call.if_it_fails.append(made.end)
    model.shares.note_run(made, assumed.finds_uncounted_gradients)
    return made


def _cleaning_up(
    session: "weakref.ref[Session]", explain: Callable[[BaseException], str], same_call: SameCall | None
) -> Callable[..., object]:
    """What calls a compiled forward or backward, ends its copies when it raises, and says more where memory ran out. Other ranks
    learn of it."""

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
            if same_call is not None and not versions.is_early_stop(error):
                same_call.note_failure(error)
            raise

    return call


def _refuse_call(
    reference: "weakref.ref[Model]", compilation: Compilation, micro_batches: int, node: torch.autograd.graph.Node
) -> None:
    """The backward of an autograd node begins, and all graphs of the call are known. Raises InfeasiblePlanError where those that
    take least, because none knew itself the last, do not fit beside each other."""
    budget, model = compilation.device_budget_bytes, reference()
    if compilation.unsettled is None or budget is None or model is None:
        return
    noted = [tensor for reference in model.shares.unread if (tensor := reference()) is not None]
    unread = [tensor for tensor in noted if placement_of(tensor) is None]  # others count where they are placed
    if not model.shares.has_trained:
        model.shares.eager_bytes = _eager_bytes(unread, node)
    needed = model.shares.least_bytes(micro_batches) + unread_bytes(unread, model.session.device.type)
    needed += model.shares.eager_bytes
    if model.shares.unsettled and needed > budget:
        what = f"The plans that take least need {format_bytes(needed)}"
        if model.shares.eager_bytes:
            eager = format_bytes(model.shares.eager_bytes)
            what += (
                f", with {eager} of gradients and optimizer states of parameters that eager code reads between graphs"
            )
        advice = advice_of(compilation.unsettled, *(other.problem for other in model.shares.unsettled.values()))
        enough = Budget(device_bytes=budget).enough_for(needed)
        refusal = too_small(budget, enough, what, advice=advice)
        raise dynamo.surfacing(broken_up(refusal, model.shares.graph_breaks))


def _eager_bytes(unread: Sequence[torch.Tensor], node: torch.autograd.graph.Node) -> int:
    """Gradients and optimizer states of parameters that no graph reads, but eager code, such as experts. The node's backward is the
    first of a graph: eager code after it has left gradients, and what is before it leads to leaves."""
    seen, found, trained = {node}, [node], set[int]()
    for each in found:
        trained.add(id(getattr(each, "variable", None)))  # a leaf's
        following = {other for other, _ in each.next_functions if other is not None} - seen
        seen |= following
        found += following
    params = (tensor for tensor in unread if isinstance(tensor, torch.nn.Parameter))
    return sum(p.nbytes + state_bytes(p) for p in params if id(p) in trained or p.grad is not None)


def _adding(
    reference: "weakref.ref[Model]",
    guarded: Callable[..., object],
    refuse: Callable[[torch.autograd.graph.Node], None],
    outside: Outside,
    kept: KeptOutputs,
    compilation: Compilation,
    same_call: SameCall | None,
) -> Callable[..., object]:
    """What calls a compiled backward, and times it: autograd does not get the gradients that updates under way add to ``.grad``."""

    clock = compilation.clock

    def call(compiled: Callable[..., object], node: Any, *args: Any) -> object:
        outside.begin_backward(node, *args)
        kept.begin_backward()
        refuse(node)
        if same_call is not None:
            same_call.note_backward()
        begin_s = time.perf_counter()
        if (is_kept := versions.is_graph_kept()) and compilation.device_budget_bytes is not None:
            _tell_that_graphs_are_kept()
        with versions.keep_saved(node, *args) if is_kept else contextlib.nullcontext():
            gradients, model = guarded(compiled, node, *args), reference()
        if clock is not None:
            clock.end_pass("backward", begin_s)
        outside.end_backward()
        assert model is not None and isinstance(gradients, list | tuple)
        if (run := node.metadata.get(_RUN)) is not None:
            model.seen.in_flight = max(model.seen.in_flight, model.shares.note_backward(run))
        return type(gradients)(model.session.updates.early.left_to_autograd(gradients))

    # Where a whole training step is compiled, Dynamo would trace this too, and cannot trace a clock.
    return cast("Callable[..., object]", torch.compiler.disable(call))


@functools.cache
def _tell_that_graphs_are_kept() -> None:
    log.warning(
        "a backward keeps its graph (retain_graph=True or create_graph=True). That is exact but activations stay on the device, and"
        " those that its code writes over are copied: no memory_budget counts them. Call backward once, on the sum of the losses"
    )


def _shortage(device: torch.device, compilation: Compilation, error: BaseException) -> str:
    plan = compilation.plan
    name = f"plan {plan.digest} of {len(plan.labels)} blocks ({plan.status})"
    use = shortage.device_use(error, device)
    return shortage.shortage_text(use, name, plan.peak_bytes, compilation.device_budget_bytes)
