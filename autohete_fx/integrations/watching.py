"""A script that runs, and the two things done to it: its model is compiled, and its optimizer becomes ours.

In: the options of the backend. While the context `Watched` is entered, each optimizer that is made says which parameters are
trained. Modules that hold them get a function in front of their calls. The first one that is called with gradients enabled is
compiled in place, and all of those functions are taken away. Out: the notes that a report is made of. Leaving the context takes
away all that was put in place but what the script's own objects have become.
"""

import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

from autohete_fx.integrations import roots
from autohete_fx.integrations.replacing import OURS, Kept, replace
from autohete_fx.internals import modules as calls
from autohete_fx.optim.base import PlannedOptimizer


@dataclass(eq=False, kw_only=True)
class Trained:
    """An optimizer and the model that it trains.

    Attributes:
        optimizer: weakly.
        name: of its class when it was made.
        num_params: how many it has.
        holders: names and weak references of the modules that hold all of its parameters.
        compiled: the name of the one that was compiled; empty where none was.
        replaced: by which class of ours, and how exact that is; empty where it stays.
        kept: why it stays.
        uncompiled: why no module was compiled, as far as that is known.
    """

    optimizer: "weakref.ref[torch.optim.Optimizer]"
    name: str
    num_params: int
    holders: "list[tuple[str, weakref.ref[nn.Module]]]" = field(default_factory=list)
    compiled: str = ""
    replaced: str = ""
    kept: str = ""
    uncompiled: str = ""


class Watched:
    """Watches optimizers and the first calls of models while it is entered.

    Args:
        options: of the backend.
        only_same_kernels: replace no optimizer that may round otherwise.
        left: names of classes of modules that are not compiled.

    Attributes:
        trained: a note for each optimizer, in the order in which they were made.
        unmatched: of ``left``, those that no module has had which holds all parameters of an optimizer.
    """

    def __init__(self, options: Mapping[str, object], *, only_same_kernels: bool, left: Collection[str] = ()) -> None:
        self.trained: list[Trained] = []
        self._options = dict(options)
        self._only_same_kernels = only_same_kernels
        self._left, self.unmatched = left, set(left)
        self._compiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._waiting: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()
        self._constructors: list[tuple[type, Callable[..., None]]] = []
        self._is_replacing = False

    def __enter__(self) -> "Watched":
        self._hook(torch.optim.Optimizer, self._note)
        for kind in OURS:
            self._hook(kind, self._replace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._constructors:
            owner, constructor = self._constructors.pop()
            owner.__init__ = constructor  # type: ignore[misc]
        for note in self.trained:
            self._explain(note)
        for module in list(self._waiting):
            self._stop_waiting(module)

    def _hook(self, owner: type, then: Callable[[Any, type], None]) -> None:
        constructor: Callable[..., None] = owner.__init__

        @functools.wraps(constructor)
        def construct(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            constructor(optimizer, *args, **kwargs)
            if not self._is_replacing:
                then(optimizer, owner)

        owner.__init__ = construct  # type: ignore[misc]
        self._constructors.append((owner, constructor))

    def _note(self, optimizer: torch.optim.Optimizer, owner: type) -> None:
        """An optimizer has its parameters: find the modules that hold them."""
        params = roots.trained_by(optimizer)
        note = Trained(
            optimizer=weakref.ref(optimizer),
            name=_name_of(optimizer),
            num_params=len(params),
            kept=_unlike_ours(optimizer),
        )
        self.trained.append(note)
        holders = roots.holders_of(params)
        self.unmatched -= {type(module).__name__ for module in holders}
        note.holders = [(roots.name_of(module), weakref.ref(module)) for module in holders]
        if any(module in self._compiled for module in holders):
            note.compiled = next(roots.name_of(module) for module in holders if module in self._compiled)
            return
        note.uncompiled = self._obstacle(holders)
        if note.uncompiled:
            return
        for module in holders:
            if module not in self._waiting and not roots.is_transparent(module):
                self._waiting[module] = wait = self._waits(weakref.ref(module))
                calls.put_before_call(module, wait)

    def _obstacle(self, holders: list[nn.Module]) -> str:
        if not holders:
            return "no module holds all of its parameters: make one that does, and call that"
        for module in holders:
            if type(module).__name__ in self._left:
                return f"--leave {type(module).__name__} was given"
        known = [*self._compiled, *self._waiting]
        reasons = (roots.refused(module) or roots.compiled_in(module, known) for module in holders)
        return next(filter(None, reasons), "")

    def _replace(self, optimizer: torch.optim.Optimizer, owner: type) -> None:
        """An optimizer of PyTorch's is made: let it become ours."""
        note = next((n for n in reversed(self.trained) if n.optimizer() is optimizer), None)
        if note is None or type(optimizer) is not owner:
            return
        if note.uncompiled:
            note.kept = "its model is not compiled"
            return
        if roots.has_sparse_gradients(optimizer):
            note.kept = "gradients of an embedding with sparse=True are sparse, which ours does not take"
            return
        self._is_replacing = True
        try:
            how = replace(optimizer, only_same_kernels=self._only_same_kernels)
            note.replaced = f"autohete_fx.{type(optimizer).__name__}, which computes by {how}"
        except Kept as reason:
            note.kept = str(reason)
        finally:
            self._is_replacing = False

    def _waits(self, reference: "weakref.ref[nn.Module]") -> Callable[..., Any]:
        """The function in front of a module's calls until it is known which module is called."""

        def wait(*args: Any, **kwargs: Any) -> Any:
            module = reference()
            assert module is not None, "it is being called"
            if torch.compiler.is_compiling() or _is_tracing() or not torch.is_grad_enabled():
                return calls.call_as_is(module, *args, **kwargs)
            self._decide(module)
            return module(*args, **kwargs)

        return wait

    def _decide(self, module: nn.Module) -> None:
        """A loop calls this module: compile it, or note why not. Those that hold or are held by it wait no longer."""
        notes = [note for note in self.trained if any(held() is module for _, held in note.holders)]
        obstacle = self._obstacle([module])
        for note in notes:
            for _, reference in note.holders:
                if (other := reference()) is not None:
                    self._stop_waiting(other)
            note.uncompiled = obstacle
            note.compiled = "" if obstacle else roots.name_of(module)
        if not obstacle:
            self._compiled.add(module)
            compile_in_place(module, self._options)

    def _stop_waiting(self, module: nn.Module) -> None:
        wait = self._waiting.pop(module, None)
        if wait is not None and calls.before_call(module) is wait:
            calls.take_from_call(module)

    def _explain(self, note: Trained) -> None:
        """Say why nothing was compiled, when the script has ended."""
        if note.compiled or note.uncompiled:
            return
        alive = [module for _, reference in note.holders if (module := reference()) is not None]
        if any(calls.before_call(module) is not self._waiting.get(module) for module in alive):
            note.uncompiled = "the script compiles it itself"
        else:
            note.uncompiled = (
                "no module that holds all of its parameters was called with gradients enabled, other than in code that the script"
                " compiles itself: call one"
            )


def compile_in_place(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile what a call of the module runs, also of one whose own class is PyTorch's, of which ``module.compile`` compiles
    nothing up to PyTorch 2.13."""

    def as_is(*args: Any, **kwargs: Any) -> Any:
        return calls.call_as_is(module, *args, **kwargs)

    if type(module).__module__.partition(".")[0] == "torch":
        compiled: Any = torch.compile(as_is, backend="autohete", options=dict(options))
    else:
        module.compile(backend="autohete", options=dict(options))
        compiled = calls.before_call(module)

    def call(*args: Any, **kwargs: Any) -> Any:
        # TorchScript's tracer, and ONNX's on top of it, cannot see through compiled code.
        return (as_is if _is_tracing() else compiled)(*args, **kwargs)

    calls.put_before_call(module, call)


def _is_tracing() -> bool:
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def _unlike_ours(optimizer: torch.optim.Optimizer) -> str:
    """Why an optimizer stays, by its class, as the end of a sentence; empty for those that may become ours."""
    if type(optimizer) in OURS:
        return ""
    if isinstance(optimizer, PlannedOptimizer):
        return "it is ours already"
    base = next((kind for kind in OURS if isinstance(optimizer, kind)), None)
    if base is not None:
        return f"it is a subclass of torch.optim.{base.__name__}, which may compute otherwise"
    return "no optimizer of ours computes as it does"


def _name_of(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    if isinstance(optimizer, PlannedOptimizer):
        return f"autohete_fx.{kind.__name__}"
    return f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim") else kind.__qualname__
