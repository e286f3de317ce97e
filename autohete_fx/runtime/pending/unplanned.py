"""Training that goes past every plan.

``model.compile()`` compiles what a call of the model runs, its forward. A loop that calls another method of it, such as a
trainer's ``training_step``, runs that eagerly. Nothing that we have a hand in then runs but the optimizer. Nor do we see a
backward pass that computes blocks once more in eager code, as that of reversible layers does. Their compiled graphs only infer.
The optimizer therefore asks here when it has stepped: does a function still wait for its first call, and may its parameters be
these? Has a parameter a gradient that comes from no graph of ours, though one reads it? Has one a gradient that no graph reads, as
that of layers at which Dynamo broke the graph? Is the optimizer a copy, whose parameters no graph reads?
"""

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.graph.ops import SMALLEST_COPY_BYTES
from autohete_fx.ir.sizes import format_bytes

log = logging.getLogger(__name__)

_STEPS = 2
"""Steps that are taken before the user is told: one could be a warm-up."""

_waiting: "weakref.WeakKeyDictionary[object, weakref.ref[object] | None]" = weakref.WeakKeyDictionary()
"""By what lives as long as a compiled function: the module or function that was compiled, where that is known."""

_compiled: "WeakIdKeyDictionary" = WeakIdKeyDictionary()  # parameters that some graph of ours reads
_trained: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""By parameter that a training graph of ours ran with: whether that was within a budget."""
_inferred: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""Names of others, that a graph without gradients ran with in a budget."""


def await_call(key: object, compiled: object) -> None:
    """A function was compiled with our backend, and lives as long as ``key``; ``compiled``: what it was made of, None where that is
    not known."""
    owner = getattr(compiled, "__self__", None)
    compiled = owner if isinstance(owner, nn.Module) else getattr(compiled, "__func__", compiled)
    try:
        _waiting[key] = None if compiled is None else weakref.ref(compiled)
    except TypeError:  # what cannot be referenced weakly
        _waiting[key] = None


def note_call(key: object) -> None:
    """It is called."""
    _waiting.pop(key, None)


def note_compilation(inputs: Iterable[Tensor]) -> None:
    """Our backend compiles a graph with these inputs."""
    _compiled.update({t: True for t in inputs if isinstance(t, nn.Parameter) or (t.requires_grad and t.is_leaf)})


def note_run(
    parameters: Mapping[str, Tensor], others: Iterable[Tensor], *, is_training: bool, is_limited: bool
) -> None:
    """A graph of ours gets these large parameters, by name, and others. ``is_limited``: within a budget."""
    if is_training:
        _trained.update(dict.fromkeys(others, is_limited))
    for name, parameter in parameters.items():
        if is_training:
            _trained[parameter] = is_limited
            _inferred.pop(parameter, None)
        elif is_limited and parameter not in _trained:
            _inferred[parameter] = name


class Watch:
    """The observations of one optimizer, given by its name.

    Args:
        is_copy: it was copied or unpickled, perhaps with a model that was compiled in place, whose copies are not.
    """

    def __init__(self, optimizer: str, *, is_copy: bool = False) -> None:
        self._optimizer, self._is_copy = optimizer, is_copy
        self._num_steps = 0
        self._has_told = False

    def step(self, params: Collection[Tensor], states: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """The optimizer took a step.

        Args:
            params: all of its parameters.
            states: those of the optimizer, by parameter.
        """
        if self._has_told:
            return
        told = (
            _told_of_uncalled(params, self._optimizer)
            or _told_of_eager(params, states)
            or _told_of_unread(params, self._optimizer)
        )
        if self._is_copy and not told:
            told = _told_of_copy(params, self._optimizer)
        self._num_steps = self._num_steps + 1 if told else 0
        if self._num_steps == _STEPS:
            self._has_told = True
            log.warning("%s", told)


def _told_of_uncalled(params: Collection[Tensor], optimizer: str) -> str:
    """The warning of a function that nobody has called and that may be of these parameters; empty where there is none."""
    name = _uncalled_of(params) if _waiting else None
    if name is None:
        return ""
    return (
        f"{name} was compiled with the backend autohete, but {_STEPS} steps of autohete_fx.{optimizer} went by without a call of"
        " it: they run eagerly, which is exact, but no memory_budget holds. Compiling a module compiles what a call of the module"
        " runs, its forward, and no other method. Call what torch.compile returned, or compile what the loop calls:"
        ' model.training_step = torch.compile(model.training_step, backend="autohete", options=...), or the inner module whose'
        " forward it runs"
    )


def _told_of_copy(params: Collection[Tensor], optimizer: str) -> str:
    """The warning of large parameters that no graph of ours reads, where there are such graphs; empty where there is none."""
    large = [param for param in params if param.nbytes >= SMALLEST_COPY_BYTES]
    if not (_trained and large) or any(param in _compiled or param in _trained for param in large):
        return ""
    return (
        f"a copy of autohete_fx.{optimizer} has taken {_STEPS} steps, and no compiled graph reads its parameters: they run eagerly,"
        " which is exact, but no memory_budget holds. PyTorch does not compile copies and pickles of a model that was compiled in"
        ' place. Compile the copy: model.compile(backend="autohete", options=...)'
    )


def _uncalled_of(params: Collection[Tensor]) -> str | None:
    return None if any(param in _compiled for param in params) else awaited(params)


def awaited(params: Iterable[Tensor]) -> str | None:
    """The name of a function that our backend is to compile and that nobody has called; None where there is none. Functions whose
    module has none of these parameters do not count."""
    given = set(map(id, params))
    for key, reference in list(_waiting.items()):
        compiled = None if reference is None else reference()
        if isinstance(compiled, nn.Module):
            if any(id(param) in given for param in compiled.parameters()):
                return f"the module {type(compiled).__name__}"
        elif key in _waiting:
            return f"the function {getattr(compiled, '__qualname__', '')}".strip()
    return None


def _told_of_eager(params: Collection[Tensor], states: Mapping[Tensor, Mapping[str, Any]]) -> str:
    """The warning of parameters that graphs within a budget read, but whose gradients come from none; empty where there is none."""
    if not _inferred:
        return ""
    trained = [p for p in params if p in _inferred and p.grad is not None]
    if not trained:
        return ""
    made = [t for p in trained for t in (p.grad, *states[p].values()) if isinstance(t, Tensor)]
    return (
        f"gradients of {len(trained)} parameters, such as {_inferred[trained[0]]}, come from eager code, though compiled graphs"
        " read them: their blocks are computed once more in a backward pass that torch.compile does not see, as that of reversible"
        " layers, or in a call that was not compiled. That is exact, but memory_budget counts neither their"
        f" {format_bytes(sum(t.nbytes for t in made))} of gradients and optimizer states nor what that backward pass takes"
    )


def _told_of_unread(params: Collection[Tensor], optimizer: str) -> str:
    """The warning of large parameters that are trained and that no graph reads, beside others in a budget; empty where there is
    none."""
    large = [p for p in params if p.nbytes >= SMALLEST_COPY_BYTES and p.grad is not None]
    unread = [p for p in large if p not in _compiled and p not in _trained]
    if not unread or not any(_trained.get(p, False) for p in params):
        return ""
    return (
        f"no compiled graph reads {len(unread)} of the parameters that autohete_fx.{optimizer} trains, such as one of size"
        f" {list(unread[0].shape)}, {format_bytes(sum(p.nbytes for p in unread))} together. Their layers run eagerly, or in code of"
        " another backend, which is exact, but memory_budget does not count what these keep for their backward."
        " TORCH_LOGS=graph_breaks names code at which Dynamo breaks a graph and leaves out the function around it: change that, or"
        " compile what was left out"
    )
