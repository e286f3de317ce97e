"""Parameters put where a plan has them, when it is made and when a compiled graph first gets them."""

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeGuard

import torch

from autohete_fx.capture.inputs import GraphInput
from autohete_fx.compiler.compilation import Compilation
from autohete_fx.compiler.model import Model, note_model
from autohete_fx.errors import HostMemoryError
from autohete_fx.internals import garbage
from autohete_fx.internals.modes import DisableTorchFunction, disable_current_modes
from autohete_fx.ir import Optimizer, Overlap, Params
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.optim.start import start_update
from autohete_fx.optim.state import is_settled, settle, state_placement_of
from autohete_fx.runtime.held import held, whole_of
from autohete_fx.runtime.pending import calls, unplanned
from autohete_fx.runtime.pending.addresses import address_of
from autohete_fx.runtime.placement import Placement, place_param, placement_of
from autohete_fx.runtime.shard import step
from autohete_fx.runtime.shard.parts import part_of
from autohete_fx.runtime.tiers.host import is_home

log = logging.getLogger(__name__)


def place_parameters(
    params: Mapping[str, torch.nn.Parameter], compilation: Compilation, model: Model, *, but: Collection[str] = ()
) -> None:
    """Put parameters of the model where the plan has their blocks'. Their optimizer states and collected gradients come along: from
    the next pass on, a plan for training counts those where it wants them.

    Args:
        params: by name, at least those that ``compilation`` knows the owners of.
        but: names of those that stay where they are.

    Raises:
        HostMemoryError: the host has no room. All values are where they were, or where they belong.
    """
    plan, session = compilation.plan, model.session
    session.updates.early.starter = start_update
    if compilation.training:
        session.wholes.forget()
    place = functools.partial(_place, params, compilation, model)
    given = [name for name in compilation.owners if name not in but]
    on_host = {name for name, block in compilation.owners.items() if plan.decisions[block].params is Params.HOST}
    leaves = on_host | compilation.moved.keys()
    leaving, coming = [name for name in given if name in leaves], [name for name in given if name not in leaves]
    try:
        place(leaving)  # so that there is room on the device
    except HostMemoryError:  # on the host there may be, once the others have left it
        place(coming)
        place(leaving)
    else:
        place(coming)
    # Now rather than in the first step: at once, no more than that, and a refusal finds a model that has not trained. What a second
    # model or graph takes of the same tier comes as it is needed: it cannot be told from a second shape of what is there.
    session.tier.reserve(plan.host_bytes)


def _place(
    params: Mapping[str, torch.nn.Parameter], compilation: Compilation, model: Model, names: Collection[str]
) -> None:
    for name in names:
        param, session, block = params[name], model.session, compilation.owners[name]
        before, optimizer = placement_of(param), compilation.moved.get(name, Optimizer.DEVICE)
        if before is not None and not param.requires_grad:
            optimizer = before.optimizer  # of states that it has from when it was trained
        if before is not None and before.updates is not None:
            before.updates.wait_all(on_cpu=True)
        note_model(param, model)
        placement = Placement(
            params=compilation.plan.decisions[block].params,
            optimizer=optimizer,
            tier=session.tier,
            block=block,
            updates=session.updates,
            disk=session.disk if optimizer is Optimizer.DISK else None,
        )
        place_param(param, placement)
        if compilation.training:
            model.placed[param] = True
            _bring_along(param, placement)


def _bring_along(param: torch.nn.Parameter, placement: Placement) -> None:
    """The states of a parameter, and what is collected of its gradient where the host updates it."""
    owner, whole = optimizer_of(param), whole_of(param)
    if owner is None or not param.requires_grad:
        return
    if placement.params is Params.HOST or not placement.optimizer.updates_on_host:
        owner.host_copies.discard(param)
    rule, belongs = owner.rule_of(param), state_placement_of(param)
    state = owner.state.get(param if whole is None else whole, {})
    with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        if state and not is_settled(rule, param, state, belongs):
            settle(rule, param, state, belongs)
            owner.has_stepped = False
        if placement.optimizer.updates_on_host and belongs.tier is not None and _is_own(param.grad, param):
            param.grad.data = belongs.tier.empty_like(param.grad).copy_(param.grad)


def _is_own(grad: torch.Tensor | None, param: torch.nn.Parameter) -> TypeGuard[torch.Tensor]:
    """Whether a gradient is on the device, in memory that nothing else shares, as a view of a bucket does, and is whole."""
    if grad is None or grad.layout is not torch.strided or part_of(param) is not None:
        return False
    return not is_home(grad) and grad.untyped_storage().nbytes() == grad.nbytes


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
        identities: of all parameters of the latest call.
    """

    def __init__(self, inputs: Sequence[GraphInput], compilation: Compilation, model: Model) -> None:
        self.compilation = compilation
        self.model = model
        self._indices = {item.name: item.index for item in inputs if item.name in compilation.owners}
        tensors = ((item.index, item.tensor) for item in inputs if item.is_parameter)
        parts = ((index, None if param is None else part_of(param)) for index, param in tensors)
        self._parts = [index for index, part in parts if part is not None and part.is_joint]
        self._seen: list[weakref.ref[torch.nn.Parameter]] = []
        self._awaited: frozenset[int] = frozenset()
        self._call: Callable[[], object] = _nothing
        self.num_arrivals = 0
        self.identities: tuple[int, ...] = ()
        self._addresses: list[int | None] = []
        self._has_warned = False
        self._all = [item.index for item in inputs if item.is_parameter]

    @property
    def latest(self) -> dict[str, torch.nn.Parameter]:
        """Those of the latest call, by name; none where it has not been called or any of them is gone."""
        found = dict(zip(self._indices, (seen() for seen in self._seen), strict=False))
        return {} if None in found.values() else {name: p for name, p in found.items() if p is not None}

    def arrive(self, args: Sequence[Any]) -> frozenset[int]:
        """Place those of a call that no plan has placed yet. Returns the identities of those whose updates the graph's nodes
        wait for.

        Raises:
            ShardError: a gradient that the call will add to is not as backward has left it.
        """
        given = args[0] if len(args) == 1 and isinstance(args[0], list) else args  # one list where the call is boxed
        self.identities = tuple(id(given[index]) for index in self._all)
        params = {name: held(given[index]) for name, index in self._indices.items()}
        if not (self._seen and all(seen() is param for seen, param in zip(self._seen, params.values(), strict=True))):
            self._warn_of_others(params)
            unplanned.note_run(
                params,
                (held(given[index]) for index in self._all),
                is_training=self.compilation.training,
                is_limited=self.compilation.device_budget_bytes is not None,
            )
            planned = {name for name, param in params.items() if self._is_planned(param)}
            if len(planned) < len(params):
                place_parameters(params, self.compilation, self.model, but=planned)
            self._seen = [weakref.ref(param) for param in params.values()]
            self.num_arrivals += 1
            self._awaited = self._awaited_of(params)
        self._bring_home(params)
        if self.compilation.training:
            step.check_collected(given[index] for index in self._parts)
        return self._awaited

    def _is_planned(self, param: torch.nn.Parameter) -> bool:
        """Whether a plan that holds has placed it; ``autohete_fx.place`` puts parameters on the host for none."""
        placement = placement_of(param)
        is_placed = placement is not None and placement.updates is not None
        return is_placed and (param in self.model.placed or not self.compilation.training)

    def _bring_home(self, params: Mapping[str, torch.nn.Parameter]) -> None:
        """Those that belong in host memory and were given other memory since the last call, as by ``param.data = tensor``."""
        addresses = [address_of(param) for param in params.values()]
        if addresses == self._addresses:
            return
        lost = 0
        for param in params.values():
            placement = placement_of(param)
            if placement is None or placement.params is not Params.HOST or placement.updates is None:
                continue
            with DisableTorchFunction():
                is_there = placement.tier.owns(param)
            if not is_there:
                placement.updates.wait_all(on_cpu=True)
                place_param(param, placement)
                lost += 1
        if lost and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d parameters that the plan has in host memory were given other memory, as by `param.data = tensor`. They are in"
                " host memory again; between two calls they were on the device, which memory_budget does not count. Write into them"
                " instead, as by `param.data.copy_(tensor)`",
                lost,
            )
        self._addresses = [address_of(param) for param in params.values()]

    def _warn_of_others(self, params: Mapping[str, torch.nn.Parameter]) -> None:
        """Once, where training has a budget and the code comes to serve other parameters while those that it served live."""
        before, given = [seen() for seen in self._seen], set(map(id, params.values()))
        is_limited = self.compilation.training and self.compilation.device_budget_bytes is not None
        call = calls.outermost()
        is_same_call, self._call = call is not None and self._call() is call, weakref.ref(call) if call else _nothing
        if not before or not is_limited or self.model.has_warned or any(p is None or id(p) in given for p in before):
            return
        del before
        garbage.collect()  # a module that was compiled in place is in a cycle with itself
        if any(seen() is None for seen in self._seen):
            return
        self.model.has_warned = True
        if is_same_call:
            log.warning(
                "a call runs code that was compiled for one module for others of its class, too. Dynamo compiled them one by one,"
                " because it could not compile the function that calls them (%s). memory_budget counts each of them. They get the"
                " plan that takes least, which leaves %s of each on the device between forward and backward and after it. That is"
                " slower: take the graph break out of the loop over them, which TORCH_LOGS=graph_breaks names",
                calls.eager_function() or "it was given up in an earlier call",
                format_bytes(self.compilation.footprint.total_bytes),
            )
        else:
            log.warning(
                "the code that was compiled for one module serves another one of its class now, and the first one is still alive. A"
                " variable or the traceback of an exception keeps it, or both are blocks of one model. Both are on the device, and"
                " memory_budget counts one of them. Delete the first one and its optimizer, and call torch.compiler.reset(), before"
                " another one is made; or compile the module that holds both, where both are needed"
            )

    def _awaited_of(self, params: Mapping[str, torch.nn.Parameter]) -> frozenset[int]:
        if self.compilation.plan.schedule.overlap is Overlap.NONE:
            return frozenset()
        return frozenset(id(params[name]) for name in self.compilation.moved)


def _nothing() -> None:
    """What a reference to nothing gives."""
