"""Functions that were compiled with our backend and that nobody calls.

``model.compile()`` compiles what a call of the model runs, its forward. A loop that calls another method of it, such as a
trainer's ``training_step``, runs that eagerly, and nothing that we have a hand in runs at all but the optimizer. The optimizer
therefore asks here after each step: is there a function that still waits for its first call, and may its parameters be these?
"""

import logging
import weakref
from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

log = logging.getLogger(__name__)

_STEPS = 2
"""So many steps are taken before the user is told: one could be a warm-up."""

_waiting: "weakref.WeakKeyDictionary[object, weakref.ref[object] | None]" = weakref.WeakKeyDictionary()
"""By what lives as long as a compiled function: the module or function that was compiled, where that is known."""

_compiled: "WeakIdKeyDictionary" = WeakIdKeyDictionary()  # parameters that some graph of ours reads


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


def note_graph(inputs: Iterable[Tensor]) -> None:
    """Our backend compiles a graph with these inputs."""
    _compiled.update({t: True for t in inputs if isinstance(t, nn.Parameter)})


class Watch:
    """What one optimizer has seen of it."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._has_told = False

    def step(self, params: Collection[Tensor]) -> None:
        """The optimizer took a step, and no plan has placed these parameters of its."""
        if self._has_told or not _waiting:
            return
        name = _uncalled_of(params)
        self._num_steps = 0 if name is None else self._num_steps + 1
        if self._num_steps == _STEPS:
            self._has_told = True
            log.warning(
                f"{name} was compiled with the backend autohete, but {_STEPS} steps of autohete_fx.AdamW went by without a call of"
                " it: they run eagerly, which is exact, but no memory_budget holds. Compiling a module compiles what a call of the"
                " module runs, its forward, and no other method. Call what torch.compile returned, or compile what the loop calls:"
                ' model.training_step = torch.compile(model.training_step, backend="autohete", options=...), or the inner module'
                " whose forward it runs"
            )


def _uncalled_of(params: Collection[Tensor]) -> str | None:
    """The name of a function that nobody has called and that may be of these parameters."""
    if any(param in _compiled for param in params):
        return None
    given = set(map(id, params))
    for key, reference in list(_waiting.items()):
        compiled = None if reference is None else reference()
        if isinstance(compiled, nn.Module):
            if any(id(param) in given for param in compiled.parameters()):
                return f"the module {type(compiled).__name__}"
        elif key in _waiting:
            return f"the function {getattr(compiled, '__qualname__', '')}".strip()
    return None
