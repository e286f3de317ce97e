"""Models: what all graphs that share parameters share, namely a runtime session and one memory budget.

A graph break makes several graphs of one model, a new shape or ``no_grad`` another; they are told to be one model by
the parameters that they read, or by the autohete_fx optimizer that holds them.
Each training graph leaves a note of the device memory that it takes beside the others. Their parameters are placed here.
"""

import hashlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.capture.inputs import GraphInput, device_of
from autohete_fx.compiler.compilation import Compilation
from autohete_fx.compiler.keys import graph_digest
from autohete_fx.compiler.shares import Origin, Shares
from autohete_fx.internals import dynamo
from autohete_fx.ir import Optimizer, Overlap
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.machine.budgets import host_budget_bytes
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.optim.start import start_update
from autohete_fx.options import Options
from autohete_fx.runtime.pending import calls, unplanned
from autohete_fx.runtime.placement import Placement, moved_states, place_param, placement_of
from autohete_fx.runtime.session import Session, is_live

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Model:
    """One compiled model.

    Attributes:
        session: its runtime.
        shares: what each of its training graphs takes on the device.
        is_placed: whether a training graph has decided where parameters live.
        micro_batches: the most forward passes that a step of it was seen to take.
        passes: those of the step that is under way.
        codes: of the functions that its graphs were compiled of.
        has_warned: whether the user was told that the budget counts one of several modules that share code.
    """

    session: Session
    shares: Shares = field(default_factory=Shares)
    is_placed: bool = False
    micro_batches: int = 1
    passes: int = 0
    codes: dict[Origin, CodeType] = field(default_factory=dict)
    has_warned: bool = False
    _versions: dict[Origin, int] = field(default_factory=dict)

    def forget(self) -> None:
        """Have all of its graphs compiled, and planned, again: plans need not put parameters where they are now."""
        self.shares = Shares()
        self.is_placed = False
        self.compile_again(list(self.codes))

    def compile_again(self, graphs: Iterable[Origin]) -> None:
        """Have Dynamo forget the code of these graphs."""
        for graph in graphs:
            code = self.codes.pop(graph, None)
            if code is not None:
                dynamo.forget_compiled(code)
            self._versions[graph] = self.version_of(graph) + 1

    def version_of(self, graph: Origin) -> int:
        """How often its code was forgotten."""
        return self._versions.get(graph, 0)

    def give_up_call(self) -> None:
        """A graph could not be compiled: if it is one of the first call, the next call begins from nothing."""
        if not self.shares.is_call_over:
            self.forget()


_models: "WeakIdKeyDictionary" = WeakIdKeyDictionary()  # parameter -> weak reference to its Model


def origin_of(inputs: Sequence[GraphInput]) -> Origin:
    """Of the graph that Dynamo is compiling now."""
    function, part = dynamo.function_being_compiled()
    return Origin(function, part, frozenset(item.name for item in inputs if item.is_parameter))


def find_model(gm: fx.GraphModule, inputs: Sequence[GraphInput], options: Options) -> Model:
    """The model that the graph's parameters belong to, or a new one."""
    parameters = [item.tensor for item in inputs if item.is_parameter and item.tensor is not None]
    # A graph break leaves graphs without a parameter in common; one optimizer holds them all.
    owners = {id(o): o for p in parameters if (o := optimizer_of(p)) is not None}
    siblings = [p for owner in owners.values() for group in owner.param_groups for p in group["params"]]
    known = (reference() for p in (*parameters, *siblings) if (reference := _models.get(p)) is not None)
    model = next((m for m in known if m is not None), None)
    if model is None and not parameters:
        found = calls.model_of_call()  # what follows a graph break, such as a loss
        model = found if isinstance(found, Model) and found.session.device == device_of(inputs) else None
    model = model or new_model(gm, inputs, options)
    for parameter in parameters:
        _models[parameter] = weakref.ref(model)
    code = dynamo.code_being_compiled()
    if code is not None:
        model.codes[origin_of(inputs)] = code
    return model


def new_model(gm: fx.GraphModule, inputs: Sequence[GraphInput], options: Options) -> Model:
    """A model of its own, which no parameter is known to belong to."""
    device = device_of(inputs)
    session = Session(
        _fresh_digest(graph_digest(gm, inputs, options)),
        device,
        offload_dir=options.offload_dir,
        host_budget_bytes=None if options.host_budget is None else host_budget_bytes(device, options),
    )
    model = Model(session=session)
    weakref.finalize(model, session.close)
    return model


def _fresh_digest(digest: str) -> str:
    """The digest, salted by how many live models have it already: the n-th twin finds the n-th twin's cached code."""
    candidate, twin = digest, 0
    while is_live(candidate):
        twin += 1
        candidate = hashlib.sha256(f"{digest}/{twin}".encode()).hexdigest()[:16]
    return candidate


def place(
    params: Mapping[str, torch.nn.Parameter], compilation: Compilation, model: Model, *, but: Collection[str] = ()
) -> None:
    """Put parameters of the model where the plan has their blocks'.

    Args:
        params: by name, at least those that ``compilation`` knows the owners of.
        but: names of those that stay where they are.
    """
    plan, session = compilation.plan, model.session
    session.updates.early.starter = start_update
    moved = moved_states(plan.decisions, compilation.owners, params)
    for name, block in compilation.owners.items():
        if name in but:
            continue
        decision = plan.decisions[block]
        optimizer = moved.get(name, Optimizer.DEVICE)
        _models[params[name]] = weakref.ref(model)
        placement = Placement(
            params=decision.params,
            optimizer=optimizer,
            tier=session.tier,
            block=block,
            updates=session.updates,
            disk=session.disk if optimizer is Optimizer.DISK else None,
        )
        place_param(params[name], placement)
    # Now rather than in the first step: at once, no more than that, and a refusal finds a model that has not trained. What a second
    # model or graph takes of the same tier comes as it is needed: it cannot be told from a second shape of what is there.
    session.tier.reserve(plan.host_bytes)


class GraphParameters:
    """The movable parameters that a compiled graph is called with.

    Dynamo serves a second model of one class and options with the first one's code, and tells nobody. The parameters of
    that model join the first one's session, on which the code runs, and are placed when they first come. Where the first model is
    still there, the budget does not count the second one, which a warning says.

    Args:
        inputs: of the graph.
        compilation: what was decided for it.
        model: whose session the code refers to.

    Attributes:
        num_arrivals: how often it was called with others than the call before.
    """

    def __init__(self, inputs: Sequence[GraphInput], compilation: Compilation, model: Model) -> None:
        self.compilation = compilation
        self.model = model
        self._indices = {item.name: item.index for item in inputs if item.name in compilation.owners}
        self._seen: list[weakref.ref[torch.nn.Parameter]] = []
        self._awaited: frozenset[int] = frozenset()
        self._call: Callable[[], object] = _nothing
        self.num_arrivals = 0

    @property
    def latest(self) -> dict[str, torch.nn.Parameter]:
        """Those of the latest call, by name; none where it has not been called or any of them is gone."""
        found = dict(zip(self._indices, (seen() for seen in self._seen), strict=False))
        return {} if None in found.values() else {name: p for name, p in found.items() if p is not None}

    def arrive(self, args: Sequence[Any]) -> frozenset[int]:
        """Place those of a call that no plan has placed yet. Returns the identities of those whose updates the graph's nodes
        wait for."""
        given = args[0] if len(args) == 1 and isinstance(args[0], list) else args  # one list where the call is boxed
        params = {name: given[index] for name, index in self._indices.items()}
        if not (self._seen and all(seen() is param for seen, param in zip(self._seen, params.values(), strict=True))):
            self._warn_of_others(params)
            unplanned.note_graph(
                params,
                is_training=self.compilation.training,
                is_limited=self.compilation.device_budget_bytes is not None,
            )
            planned = {name for name, param in params.items() if _is_planned(param)}
            if len(planned) < len(params):
                place(params, self.compilation, self.model, but=planned)
            self._seen = [weakref.ref(param) for param in params.values()]
            self.num_arrivals += 1
            self._awaited = self._awaited_of(params)
        return self._awaited

    def _warn_of_others(self, params: Mapping[str, torch.nn.Parameter]) -> None:
        """Once, where training has a budget and the code comes to serve other parameters while those that it served live."""
        before, given = [seen() for seen in self._seen], set(map(id, params.values()))
        is_limited = self.compilation.training and self.compilation.device_budget_bytes is not None
        call = calls.outermost()
        is_same_call, self._call = call is not None and self._call() is call, weakref.ref(call) if call else _nothing
        if not before or not is_limited or self.model.has_warned or any(p is None or id(p) in given for p in before):
            return
        self.model.has_warned = True
        if is_same_call:
            log.warning(
                "a call runs code that was compiled for one module for others of its class, too: Dynamo compiled them one by one,"
                " because it could not compile the function that calls them (%s). memory_budget counts one of them. Each leaves %s"
                " on the device between forward and backward and after it. Take the graph break out of the loop over them, which"
                " TORCH_LOGS=graph_breaks names",
                calls.eager_function() or "it was given up in an earlier call",
                format_bytes(self.compilation.footprint.total_bytes),
            )
        else:
            log.warning(
                "the code that was compiled for one module serves another one of its class now, and the first one is still alive: a"
                " variable or the traceback of an exception keeps it, or both are blocks of one model. Both are on the device, and"
                " memory_budget counts one of them. Delete the first one and its optimizer, and call torch._dynamo.reset(), before"
                " another one is made; or compile the module that holds both, where both are needed"
            )

    def _awaited_of(self, params: Mapping[str, torch.nn.Parameter]) -> frozenset[int]:
        plan = self.compilation.plan
        if plan.schedule.overlap is Overlap.NONE:
            return frozenset()
        return frozenset(id(params[name]) for name in moved_states(plan.decisions, self.compilation.owners, params))


def _nothing() -> None:
    """What a reference to nothing gives."""


def _is_planned(param: torch.nn.Parameter) -> bool:
    """Whether a plan has placed it; ``autohete_fx.place`` puts parameters on the host for none."""
    placement = placement_of(param)
    return placement is not None and placement.updates is not None
