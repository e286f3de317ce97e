"""Module paths that Dynamo records on nodes, as plain values.

In: ``node.meta["nn_module_stack"]`` of forward nodes and ``fwd_nn_module_stack`` of backward ones, an ordered dict, outermost
module first. Keys are ``"<id>"`` or ``"<id>@<call>"`` (the second and later calls of one module); values are
``("L['self'].model.layers.0", class or class name)``. Out: `ModuleCall` tuples with the path split into steps.

The string has had several forms: ``L['self']._modules['layers']._modules['0']``, ``L['m'].layers.0``, ``G['model'].layers[0]``,
and ``layers.0`` after export. Below a module whose class has a ``__getattr__`` of its own, as PEFT's have, it has
``.__dict__['_modules']['model']``. All come out as the same steps. The root (which variable held the model) stays the first
step, because two models in one function may have equal paths below it. Names that users read leave it out. A decorated forward
is called with ``*args``, whose first is the module: ``L['args'][0]`` is a root, too.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from torch import fx

from autohete_fx.graph.draws import makes_seeds

_ROOT = re.compile(r"^(?:L\['args'\]\[0\]|[LG]\[(?:'[^']*'|\"[^\"]*\")\])(?:\.__closure__\[\d+\]\.cell_contents)*")
_STEP = re.compile(r"\['([^']*)'\]|\[\"([^\"]*)\"\]|\[(\d+)\]|([^.\[\]]+)")
_WRAPPERS = frozenset({"_modules", "__dict__", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})

Path = tuple[str, ...]
Scope = tuple[Path, str]
"""One call of one module: its path and the call's number ("" for the first)."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One entry of a module stack.

    Attributes:
        path: steps from the root variable down, such as ``("L['self']", "layers", "0")``.
        call: "" for the module's first call, then "1", "2", ...
        type_name: qualified name of the module's class.
    """

    path: Path
    call: str
    type_name: str


Stack = tuple[ModuleCall, ...]


def module_stack(node: fx.Node) -> Stack:
    """The calls that a node was traced under, outermost first; empty where none is recorded, and for what is of no module."""
    recorded = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not recorded or makes_seeds(node):
        return ()
    return _stack(tuple((str(key), str(path), _type_name(cls)) for key, (path, cls) in recorded.items()))


@lru_cache(maxsize=65536)
def _stack(entries: tuple[tuple[str, str, str], ...]) -> Stack:
    calls = []
    for key, path, type_name in entries:
        calls.append(ModuleCall(path=split_path(path), call=key.partition("@")[2], type_name=type_name))
    return tuple(calls)


def _type_name(cls: object) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else str(cls)


@lru_cache(maxsize=65536)
def split_path(path: str) -> Path:
    """Steps of a recorded path, its root first: ``L['self']``, or ``""`` for a path that names no variable."""
    match = _ROOT.match(path)
    root = match.group(0) if match else ""
    steps = (next(group for group in found if group) for found in _STEP.findall(path[len(root) :]))
    return (root, *(step for step in steps if step not in _WRAPPERS))


def dotted(path: Path) -> str:
    """The name a user knows a module by: ``model.layers.3``. Empty for the root itself."""
    return ".".join(path[1:])


def scopes(stack: Stack) -> Iterator[Scope]:
    """Every module call that encloses a node, outermost first, modules that were only indexed included.

    ``layers`` of ``for layer in self.layers`` is never called and has no entry, yet ``layers.0`` implies it.
    """
    seen = set()
    own = {entry.path: entry.call for entry in stack}
    for entry in stack:
        for length in range(1, len(entry.path) + 1):
            path = entry.path[:length]
            if path not in seen:
                seen.add(path)
                yield path, own.get(path, "")
