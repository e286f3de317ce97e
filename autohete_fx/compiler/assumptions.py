"""The assumptions that plans make of the program around their graphs, checked before every call.

A plan counts the optimizer states that will be on the device, and gradients of earlier micro-batches where there are any.
Dynamo guards neither. It serves a model with code that was planned for ``autohete_fx.AdamW`` though another optimizer trains it
now, or another model of the same class. It also serves every micro-batch of an accumulation that nobody announced, and forwards
before the backward of an earlier one.

In: the graphs that were compiled for training within a budget, and each call before Dynamo looks for its code. Where more memory
will be taken than a plan counts, Dynamo forgets the code, so that the call compiles and plans afresh. A function that is given
parameters of which nothing tells beforehand is refused once.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from types import CodeType

import torch

from autohete_fx.capture.inputs import GraphInput
from autohete_fx.compiler.model import Model, origin_of
from autohete_fx.compiler.parameters import GraphParameters
from autohete_fx.compiler.problem import state_bytes
from autohete_fx.errors import PlanError
from autohete_fx.internals.compiled_code import forget_compiled
from autohete_fx.internals.tensors import current_graph_task_id
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.optim.owners import num_changes, optimizer_of
from autohete_fx.options import Options
from autohete_fx.runtime.pending import calls

log = logging.getLogger(__name__)


class Assumptions:
    """Those of the plan of one training graph.

    Args:
        parameters: of the graph.
        inputs: of the graph, with which the plan was made.
        options: whose micro-batches, and those in flight, the plan counts with.
    """

    def __init__(self, parameters: GraphParameters, inputs: Sequence[GraphInput], options: Options) -> None:
        self.parameters = parameters
        self.micro_batches, self.in_flight = options.micro_batches, options.in_flight
        self.names = frozenset(parameters.compilation.owners)
        planned = {item.name: item.tensor for item in inputs if item.name in self.names}
        self.state_bytes = self._device_state_bytes(
            {name: p for name, p in planned.items() if isinstance(p, torch.nn.Parameter)}
        )
        self._origin = origin_of(inputs)
        self.outside_bytes = self._outside_bytes()
        self._version = parameters.model.version_of(self._origin)
        self._num_changes = num_changes()
        self._num_arrivals = 0
        _known.add(self)

    @property
    def model(self) -> Model:
        """That the graph belongs to."""
        return self.parameters.model

    @property
    def is_current(self) -> bool:
        """Whether the graph's code still serves."""
        return self._version == self.model.version_of(self._origin)

    def note_run(self) -> None:
        """The graph runs. Raises PlanError where it was given parameters whose optimizer it was not planned for."""
        key = _key(calls.function_called())
        if key is not None:
            _entered.setdefault(key, weakref.WeakSet()).add(self)
        if self._num_arrivals == self.parameters.num_arrivals:
            return
        self._num_arrivals = self.parameters.num_arrivals
        missing = self.missing_bytes(self.parameters.latest)
        if missing > 0:
            self.model.forget()
            raise PlanError(
                "code whose plan counts on an optimizer of autohete_fx, such as AdamW, got a model without one."
                f" {format_bytes(missing)} of optimizer states would be on the device beyond the plan. The code is dropped now."
                " Call the function again: that plans for the optimizer that there is"
            )

    def lacks_outside_bytes(self) -> bool:
        """Whether code outside of the graph takes more than the plan has room for."""
        return any(now > planned for now, planned in zip(self._outside_bytes(), self.outside_bytes, strict=True))

    def _outside_bytes(self) -> tuple[int, ...]:
        """Between forward and backward, and of outputs that live on."""
        outside = self.model.taken_outside(self._origin)
        return outside.peak_bytes, outside.held_bytes, self.model.kept_bytes.get(self._origin, 0)

    def missing_bytes(self, params: Mapping[str, torch.nn.Parameter]) -> int:
        """How many bytes of optimizer states there will be on the device beyond those that the plan counts."""
        return self._device_state_bytes(params) - self.state_bytes

    def has_lost_optimizer(self) -> bool:
        """Whether the parameters' optimizers changed so that the plan's states are not all that will be on the device."""
        if self._num_changes == num_changes():
            return False
        self._num_changes = num_changes()
        return self.missing_bytes(self.parameters.latest) > 0

    def finds_uncounted_gradients(self) -> bool:
        """Whether gradients of an earlier pass are there, and the plan is for one pass."""
        return self.micro_batches == 1 and self.finds_gradients()

    def finds_gradients(self) -> bool:
        """Whether gradients of an earlier pass are there."""
        return any(p.grad is not None for p in self.parameters.latest.values())

    def _device_state_bytes(self, params: Mapping[str, torch.nn.Parameter]) -> int:
        """Of the optimizers that update the parameters now."""
        moved = self.parameters.compilation.moved
        stays = (p for name, p in params.items() if name not in moved or optimizer_of(p) is None)
        return sum(state_bytes(p) for p in stays)


_evaluating: "weakref.WeakKeyDictionary[object, weakref.WeakSet[GraphParameters]]" = weakref.WeakKeyDictionary()
"""By what a call calls: the graphs without gradients that have run in it."""
_trained: "weakref.WeakSet[object]" = weakref.WeakSet()
"""What calls call for whose training the code of evaluations was forgotten."""
_known: "weakref.WeakSet[Assumptions]" = weakref.WeakSet()
_entered: "weakref.WeakKeyDictionary[object, weakref.WeakSet[Assumptions]]" = weakref.WeakKeyDictionary()
"""By what a call calls: the graphs that have run in it."""


def look(function: object, is_ours: bool) -> None:
    """A call begins: have stale code forgotten. ``is_ours``: whether the function was compiled with our backend, whose code alone
    could serve one that is called first."""
    key = _key(function)
    if key is None or not torch.is_grad_enabled():
        return
    _forget_evaluation(key)
    if key not in _entered:
        if is_ours and isinstance(key, torch.nn.Module):
            _look_at_first_call(key)
        return
    graphs = [graph for graph in _entered[key] if graph.is_current]
    for model in {graph.model for graph in graphs}:
        if model.shares.is_waiting and current_graph_task_id() != -1:
            continue  # a backward runs a forward again, as under checkpoint, and needs what the same code saves
        of_model = [graph for graph in graphs if graph.model is model]
        if any([graph.has_lost_optimizer() for graph in of_model]):
            log.info("a compiled model has another optimizer now: it is planned again")
            _plan_again(model)
        elif model.is_outdated:
            log.info("a rank has seen steps that were not planned for: all of them plan again")
            _plan_again(model)
            continue
        elif model.shares.is_outdated:
            log.info(
                "one step has run graphs that were planned as if none did, or one of them again: the model is planned again"
            )
            _count_with_seen(model)
        elif _is_step_over(model) and not model.shares.is_call_over:
            waiting = model.shares.end_call()
            if waiting:
                log.info("all graphs of a call are known now: %d are compiled again for their shares", len(waiting))
                calls.keep_until_end(model)
                model.compile_again(waiting)
        _look_at_passes(model, of_model)


def note_evaluation(parameters: GraphParameters) -> None:
    """A graph without gradients runs, and training may be about to put its parameters elsewhere."""
    if torch.is_grad_enabled() or parameters.model.is_placed:
        return
    key = _key(calls.function_called())
    if key is not None and key not in _trained:
        _evaluating.setdefault(key, weakref.WeakSet()).add(parameters)


def _forget_evaluation(key: object) -> None:
    """Training is about to put parameters where it wants them: what was compiled for where they are is compiled again when next
    evaluated. That happens once: the same code may evaluate one model beside another that it trains."""
    for parameters in _evaluating.pop(key, ()):
        model = parameters.model
        if not model.is_placed and any(param.requires_grad for param in parameters.latest.values()):
            _trained.add(key)
            _plan_again(model)


def _look_at_first_call(module: torch.nn.Module) -> None:
    """Dynamo serves a module with the code of another one of its class."""
    params = dict(module.named_parameters())
    for graph in list(_known):
        if not graph.is_current or not graph.names <= params.keys():
            continue
        if graph.missing_bytes({name: params[name] for name in graph.names}) > 0:
            for code in graph.model.codes.values():
                forget_compiled(code)


def _look_at_passes(model: Model, graphs: list[Assumptions]) -> None:
    """Plan again where a step has more passes, or more in flight, than were planned for, or code between them takes more."""
    in_flight = min(graph.in_flight for graph in graphs)
    if model.seen.in_flight > in_flight:
        log.warning(
            "%d forward passes ran before a backward of theirs began: the model is planned again. The plan counted the activations"
            " of %d. Set the option in_flight to %d, and micro_batches to how many passes a step has, or call backward after each"
            " forward",
            model.seen.in_flight,
            in_flight,
            model.seen.in_flight,
        )
    elif not (any(graph.lacks_outside_bytes() for graph in graphs) or _has_uncounted_passes(model, graphs)):
        return
    _count_with_seen(model)


def _count_with_seen(model: Model) -> None:
    """Plan again with what was seen of steps: in this call, or with other ranks in the next one. One that compiled alone would wait
    for them."""
    model.seen.is_outdated = True
    if not model.is_shared:
        model.hear(model.told())
        _plan_again(model)


def _is_step_over(model: Model) -> bool:
    """Ranks keep results of different calls, but run their backwards together."""
    return model.shares.has_trained if model.is_shared else model.shares.is_step_over


def _has_uncounted_passes(model: Model, graphs: list[Assumptions]) -> bool:
    """Count the passes of a step. For plans of one pass, gradients of an earlier one are more than they count."""
    is_later_pass = model.shares.accumulates or any(graph.finds_gradients() for graph in graphs)
    passes, model.passes = model.passes, max(1, model.passes) + 1 if is_later_pass else 1
    seen, planned = 2 if is_later_pass else passes, min(graph.micro_batches for graph in graphs)
    if seen <= planned:
        return False
    if planned == 1:
        log.warning(
            "a forward pass begins while gradients of an earlier one are there, which a plan for micro_batches=1 does not count:"
            " the model is planned again. Set the option micro_batches to how many passes a step has, or let zero_grad() set"
            " gradients to None"
        )
    model.seen.micro_batches = max(model.seen.micro_batches, seen)
    return True


def _plan_again(model: Model) -> None:
    """In this call. Until its code is there again, nothing but the call references the model."""
    calls.keep_until_end(model)
    model.forget()


def _key(function: object) -> object:
    """What tells one function that is called from others: the module whose it is, or its code."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return owner
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
