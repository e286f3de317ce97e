"""A digest of a user's pass: what makes compiled code that it shaped differ from other compiled code.

In: a callable. Out: a string that is equal in two processes only where the callable does the same work. It goes into
the keys of the AOTAutograd and Inductor caches: were two different passes to share a key, the second program would
run the first one's code.

A pass with a ``uuid()`` method says itself who it is. A function is known by its qualified name, its source, its
defaults, the values that it closes over, and the functions and constants of its own module that it mentions.
Whatever has no content to digest (a model, an open file) has no identity beyond this object: it gets a token of its
own, so that code is never shared by mistake, and a warning says what that costs.
"""

import dataclasses
import enum
import functools
import hashlib
import inspect
import types
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping

__all__ = ["pass_identity"]

_PLAIN = (int, float, complex, str, bytes, bool, type(None), enum.Enum)

_KNOWN_BY_NAME = frozenset(
    f"torch.{name}"
    for name in ("dtype", "device", "layout", "memory_format", "_ops.OpOverload", "_ops.OpOverloadPacket")
)
"""Written out because this module does not import torch."""


_Seen = dict[int, tuple[int, object]]
"""Values met so far by their ids: which one each was, and the value, for an id is another's once its value is gone."""


def pass_identity(user_pass: Callable[..., object]) -> str:
    """Digest of a callable, 16 hex digits, stable across processes where the callable has a stable content.

    Warns (UserWarning) where it has none: the result is still exact, but its compiled code is never found in a cache.
    """
    parts: list[str] = []
    unstable: list[str] = []
    _describe(user_pass, parts, unstable, seen={})
    if unstable:
        warnings.warn(
            f"the pass {_name(user_pass)} depends on {', '.join(unstable)}, whose content cannot be digested: its"
            " compiled code is not shared with other compilations or processes. Give the pass a uuid() method that"
            " returns a string of all it depends on to have its code cached.",
            stacklevel=3,
        )
        parts.append(uuid.uuid4().hex)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _describe(value: object, parts: list[str], unstable: list[str], seen: _Seen) -> None:
    """Append the content of one value to ``parts``, or its description to ``unstable``."""
    if isinstance(value, _PLAIN):
        parts.append(repr(value))
        return
    if id(value) in seen:
        parts.append(f"seen {seen[id(value)][0]}")
        return
    seen[id(value)] = (len(seen), value)
    own_word = getattr(value, "uuid", None)
    if callable(own_word) and not isinstance(value, type):
        _describe_own_word(value, own_word(), parts, unstable)
    elif isinstance(value, types.FunctionType):
        _describe_function(value, parts, unstable, seen)
    elif isinstance(value, functools.partial):
        _describe_all([value.func, value.args, value.keywords], parts, unstable, seen)
    elif isinstance(value, types.MethodType):
        _describe_all([value.__func__, value.__self__], parts, unstable, seen)
    elif isinstance(value, type):
        parts.extend(_name(base) + _source(base) for base in value.__mro__)
    elif isinstance(value, Mapping):
        _describe_all(sorted(value.items(), key=repr), parts, unstable, seen)
    elif isinstance(value, set | frozenset):
        _describe_all(sorted(value, key=repr), parts, unstable, seen)
    elif isinstance(value, tuple | list):
        parts.append(type(value).__name__)
        _describe_all(value, parts, unstable, seen)
    elif dataclasses.is_dataclass(value):
        contents = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        _describe_all([type(value), contents], parts, unstable, seen)
    elif _is_known_by_name(value):
        parts.append(f"{type(value).__qualname__}:{value!r}")
    elif _is_plain_callable(value):
        _describe_all([type(value), vars(value)], parts, unstable, seen)
    else:
        unstable.append(f"an object of type {type(value).__qualname__}")


def _describe_all(values: Iterable[object], parts: list[str], unstable: list[str], seen: _Seen) -> None:
    for value in values:
        _describe(value, parts, unstable, seen)


def _describe_function(function: types.FunctionType, parts: list[str], unstable: list[str], seen: _Seen) -> None:
    parts.extend([_name(function), _source(function)])
    _describe_all([function.__defaults__, function.__kwdefaults__], parts, unstable, seen)
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # the variable has no value yet: nothing that the function could read now
            continue
        _describe(content, parts, unstable, seen)
    for word in sorted(_mentioned_names(function.__code__)):
        if word not in function.__globals__:
            continue
        mentioned = function.__globals__[word]
        if isinstance(mentioned, _PLAIN) or getattr(mentioned, "__module__", None) == function.__module__:
            parts.append(word)
            _describe(mentioned, parts, unstable, seen)


def _describe_own_word(value: object, word: object, parts: list[str], unstable: list[str]) -> None:
    if word is None:  # PyTorch's way to say "not known"
        unstable.append(f"{type(value).__qualname__}.uuid(), which is None")
    else:
        parts.append(f"{type(value).__qualname__}:{word!r}")


def _is_plain_callable(value: object) -> bool:
    """An instance of a Python class with ``__call__``, so that its class and its attributes are all of it."""
    return any(isinstance(vars(base).get("__call__"), types.FunctionType) for base in type(value).__mro__) and hasattr(
        value, "__dict__"
    )


def _is_known_by_name(value: object) -> bool:
    """Modules, builtins, and PyTorch's named constants and operators: equal in every process."""
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return True
    return f"{type(value).__module__}.{type(value).__qualname__}" in _KNOWN_BY_NAME


def _mentioned_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _mentioned_names(constant)
    return names


def _name(value: object) -> str:
    module = getattr(value, "__module__", None) or ""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or type(value).__qualname__
    return f"{module}.{name}"


def _source(value: types.FunctionType | type) -> str:
    """Source text; where there is none (interactive sessions), the bytecode and its constants.

    Lambdas have both: two of them on one line share their source.
    """
    try:
        source = inspect.getsource(value)
        return (
            source + _bytecode(value.__code__)
            if value.__name__ == "<lambda>" and isinstance(value, types.FunctionType)
            else source
        )
    except (OSError, TypeError):
        if isinstance(value, types.FunctionType):
            return _bytecode(value.__code__)
        return "".join(
            _bytecode(member.__code__) for member in vars(value).values() if isinstance(member, types.FunctionType)
        )


def _bytecode(code: types.CodeType) -> str:
    constants = [_bytecode(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()}{constants}{code.co_names}"
