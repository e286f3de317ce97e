"""Models: what all graphs that share parameters share, namely a runtime session and one memory budget.

A graph break makes several graphs of one model, a new shape or ``no_grad`` another. The parameters that they read tell that they
are of one model, or the autohete_fx optimizer that holds these, or the module that was called. Each training graph leaves a note of
the device memory that it takes beside the others.
"""

import contextlib
import dataclasses
import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.capture.inputs import GraphInput, device_of
from autohete_fx.compiler.keys import graph_digest
from autohete_fx.compiler.shares import Origin, Shares
from autohete_fx.internals import dynamo, garbage
from autohete_fx.internals.compiled_code import forget_compiled
from autohete_fx.machine.budgets import host_budget_bytes
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.options import Options
from autohete_fx.runtime.between import Between, Taken
from autohete_fx.runtime.held import held
from autohete_fx.runtime.pending import calls
from autohete_fx.runtime.session import Session, is_live

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Seen:
    """Findings of one process about steps.

    Attributes:
        micro_batches: the most forward passes that a step took.
        in_flight: the most calls whose backward was yet to come when one of them began.
        is_outdated: whether a plan does not count with it.
    """

    micro_batches: int = 1
    in_flight: int = 1
    is_outdated: bool = False


@dataclass(eq=False)
class Model:
    """One compiled model.

    Attributes:
        session: its runtime.
        shares: what each of its training graphs takes on the device.
        placed: the parameters that training graphs have put where they are.
        micro_batches, in_flight: as plans that are made now count with them.
        passes: those of the step that is under way.
        seen: of its steps, by this process.
        is_shared: whether other ranks run its graphs, too.
        is_outdated: whether these and this one have agreed that it is to be planned again.
        outside: by graph, what code outside takes between its forward and its backward, where a plan had no room for it.
        kept_bytes: by graph, what outputs take that live on after its backward, where a plan had no room for them.
        between: measures what is outside.
        codes: of the functions that its graphs were compiled of.
        has_warned: whether the user was told of several modules that share code.
        num_limited: by graph, and whether gradients are on, how often it was compiled for sizes that may change within those that
            its plan counts.
    """

    session: Session
    shares: Shares = field(default_factory=Shares)
    placed: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    micro_batches: int = 1
    in_flight: int = 1
    passes: int = 0
    seen: Seen = field(default_factory=Seen)
    is_shared: bool = False
    is_outdated: bool = False
    outside: dict[Origin, Taken] = field(default_factory=dict)
    kept_bytes: dict[Origin, int] = field(default_factory=dict)
    between: Between = field(default_factory=Between)
    codes: dict[Origin, CodeType] = field(default_factory=dict)
    has_warned: bool = False
    num_limited: Counter[tuple[Origin, bool]] = field(default_factory=Counter)
    _versions: dict[Origin, int] = field(default_factory=dict)

    def seen_in(self, options: Options) -> Options:
        """The options with as many passes a step, and in flight, as the model was seen to take."""
        in_flight = max(options.in_flight, self.in_flight)
        micro_batches = max(options.micro_batches, self.micro_batches, in_flight)
        return dataclasses.replace(options, micro_batches=micro_batches, in_flight=in_flight)

    def taken_outside(self, graph: Origin) -> Taken:
        """Bytes that code outside of a graph was seen to take, and that its plan counts from then on."""
        return self.outside.get(graph, Taken())

    def told(self) -> tuple[int, int, int]:
        """The numbers that other ranks get of what this one has seen."""
        return int(self.seen.is_outdated), self.seen.micro_batches, self.seen.in_flight

    def hear(self, largest: Sequence[int]) -> None:
        """The largest of what each rank has told. Plans count with it from where any of them finds the present ones outdated."""
        is_outdated, micro_batches, in_flight = largest
        if is_outdated:
            self.micro_batches, self.in_flight = max(self.micro_batches, micro_batches), max(self.in_flight, in_flight)
            self.is_outdated = True

    @property
    def is_placed(self) -> bool:
        """Whether a training graph has decided where parameters live."""
        return len(self.placed) > 0

    def forget(self) -> None:
        """Have all of its graphs compiled, and planned, again: plans need not put parameters where they are now."""
        self.shares = self.shares.afresh()
        self.placed = WeakIdKeyDictionary()
        self.num_limited.clear()
        self.seen.is_outdated = self.is_outdated = False
        self.compile_again(list(self.codes))

    def compile_again(self, graphs: Iterable[Origin]) -> None:
        """Have Dynamo forget the code of these graphs."""
        for graph in graphs:
            code = self.codes.pop(graph, None)
            if code is not None:
                forget_compiled(code)
            self._versions[graph] = self.version_of(graph) + 1

    def version_of(self, graph: Origin) -> int:
        """How often its code was forgotten."""
        return self._versions.get(graph, 0)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Around the compilation of a graph. Where that fails, whyever, in the first call, the next call begins from nothing."""
        try:
            yield
        except BaseException as error:
            if not self.shares.is_call_over and not dynamo.goes_on(error):
                self.forget()
            raise


_models: "WeakIdKeyDictionary" = WeakIdKeyDictionary()  # parameter -> weak reference to its Model


def held_inputs(inputs: Sequence[GraphInput]) -> tuple[GraphInput, ...]:
    """The inputs with this rank's part in the place of each DTensor parameter that is ours to move."""
    return tuple(
        dataclasses.replace(item, tensor=held(item.tensor))
        if item.is_parameter and not item.is_sharded and item.tensor is not None
        else item
        for item in inputs
    )


def origin_of(inputs: Sequence[GraphInput]) -> Origin:
    """The origin of the graph that Dynamo is compiling now."""
    function, part = dynamo.function_being_compiled()
    read = [item for item in inputs if item.is_parameter]
    return Origin(
        function, part, frozenset(item.name for item in read), tensors=frozenset(id(item.tensor) for item in read)
    )


def graph_key(inputs: Sequence[GraphInput]) -> tuple[Origin, tuple[object, ...]]:
    """Equal for a graph that Dynamo is compiling now and for the same graph, with inputs of the same sizes, at another time."""
    sizes = tuple((item.name, None if item.tensor is None else str(tuple(item.tensor.shape))) for item in inputs)
    return origin_of(inputs), sizes


def find_model(gm: fx.GraphModule, inputs: Sequence[GraphInput], options: Options) -> Model:
    """The model that the graph's parameters belong to, or a new one."""
    parameters = [item.tensor for item in inputs if item.is_parameter and item.tensor is not None]
    # A graph break leaves graphs without a parameter in common; one module has them all, or one optimizer.
    known = (reference() for p in map(held, siblings_of(parameters)) if (reference := _models.get(p)) is not None)
    model = next((m for m in known if m is not None), None)
    if model is None and not parameters:
        found = calls.model_of_call()  # what follows a graph break, such as a loss
        model = found if isinstance(found, Model) and found.session.device == device_of(inputs) else None
    model = model or new_model(gm, inputs, options)
    for parameter in parameters:
        note_model(parameter, model)
    code = dynamo.code_being_compiled()
    if code is not None:
        model.codes[origin_of(inputs)] = code
    return model


def siblings_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, and all others that their optimizers of ours hold, or the called modules whose they are."""
    own = list(parameters)
    owners = {id(o): o for p in own if (o := optimizer_of(p)) is not None}
    found = [*own, *(p for owner in owners.values() for group in owner.param_groups for p in group["params"])]
    ids = set(map(id, own))
    for module in calls.modules_called():
        listed = list(module.parameters())
        found += listed if not ids.isdisjoint(map(id, listed)) else []
    return found


def new_model(gm: fx.GraphModule, inputs: Sequence[GraphInput], options: Options) -> Model:
    """A model of its own, which no parameter is known to belong to.

    Where there were others, garbage is collected first. A module that was compiled in place is in a cycle with itself: its memory
    stays after it was deleted, and no budget counts it.
    """
    if len(_models):
        garbage.collect()
    device = device_of(inputs)
    session = Session(
        _fresh_digest(graph_digest(gm, inputs, options, with_sizes=False)),  # ranks with other sizes share code
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


def note_model(parameter: torch.Tensor, model: Model) -> None:
    """A parameter belongs to a model."""
    _models[parameter] = weakref.ref(model)
