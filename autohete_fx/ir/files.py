"""Values saved as JSON files with a schema version: reading one back, and refusing what is none.

Enter text or a path and how to build the value. Leaves the value, or an error that says what is wrong with which file and what
to do. The text of every file is one object with the entry ``schema_version``.
"""

import contextlib
import enum
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

from autohete_fx.errors import AutoHeteError

Value = TypeVar("Value")

_NEW_FILES = os.W_OK | os.X_OK
"""What a directory must allow, so that a file can be made in it."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path, with the home directory that ``~`` stands for. One that nobody knows stays as it is written, as in a shell."""
    with contextlib.suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def why_unwritable(path: str | os.PathLike[str]) -> str:
    """Why no file can be written there, so that it is said before anything is done for it; "" where it may be."""
    try:
        into = Path(os.path.realpath(path))
        if into.is_dir():
            return "it is a directory"
        if not into.parent.is_dir():
            return "its directory does not exist"
        if _is_written_in_place(into):
            return "" if os.access(into, os.W_OK) else "it may not be written"
    except OSError as error:  # what is below a directory that may not be searched, or has too long a name
        return (error.strerror or str(error)).lower()
    return "" if os.access(into.parent, _NEW_FILES) else "nothing may be written in its directory"


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file all at once: where a disk is full or the process ends, an earlier file stays as it was. Raises OSError."""
    into = Path(os.path.realpath(path))  # what a link points to is replaced, not the link
    if _is_written_in_place(into):
        into.write_text(text, encoding="utf-8")  # a device or a pipe has nothing to lose
        return
    part = into.with_name(f".{into.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if into.exists():
            shutil.copymode(into, part)
        part.replace(into)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _is_written_in_place(into: Path) -> bool:
    """Whether nothing can take the place of what is there. Raises OSError where that cannot be looked at."""
    return into.exists() and (not into.is_file() or not os.access(into.parent, _NEW_FILES))


def is_file(text: str | os.PathLike[str]) -> bool:
    """Whether a text, which may be anything, is the path of a file."""
    with contextlib.suppress(OSError, ValueError):  # too long for a path, with a null character, or not to be searched
        return Path(text).is_file()
    return False


def is_directory(text: str | os.PathLike[str]) -> bool:
    """Whether a text, which may be anything, is the path of a directory."""
    with contextlib.suppress(OSError, ValueError):
        return Path(text).is_dir()
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAs:
    """The name of files of one kind, and the advice about a wrong one.

    Attributes:
        kind: such as ``plan``.
        writer: what writes them, such as ``Plan.save``.
        again: what to do where one cannot be used, such as ``make the plan again``.
        schema_version: what is written.
        error: raised for everything that is wrong.
        wrong: how a file is called that has wrong entries; one that users write is not damaged.
        upgrades: by an earlier version that is read, too, the object of a later one.
        others: by an entry that files of another kind have, what such a file is, and what reads it.
    """

    kind: str
    writer: str
    again: str
    schema_version: int
    error: type[AutoHeteError]
    wrong: str = "is damaged"
    upgrades: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    def parse(self, text: str, build: Callable[[dict[str, Any]], Value]) -> Value:
        """``build`` of the object that the text spells; it raises KeyError, TypeError or ValueError for a wrong one."""
        expected = f"expected the JSON that {self.writer} writes"
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.error(f"this is not a {self.kind} file: {error}; {expected}") from error
        if not isinstance(raw, dict) or "schema_version" not in raw:
            raise self.error(f"this is not a {self.kind} file: it has no schema_version; {expected}")
        other = next((words for entry, words in self.others.items() if entry in raw), None)
        if other is not None:
            raise self.error(f"this is not a {self.kind} file, but {other}; {expected}")
        if raw["schema_version"] not in (self.schema_version, *self.upgrades):
            raise self.error(
                f"the {self.kind} has schema version {raw['schema_version']!r}, this autohete_fx reads"
                f" {self.schema_version}; {self.again}"
            )
        try:
            while raw["schema_version"] != self.schema_version:
                raw = self.upgrades[raw["schema_version"]](raw)
            return build(raw)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise self.error(f"the {self.kind} file {self.wrong}: {what}; {self.again}") from error

    def load(self, path: str | Path, from_json: Callable[[str], Value]) -> Value:
        """``from_json`` of a file's text; every error names the file."""
        try:
            return from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise self.error(
                f"cannot read the {self.kind} file {str(path)!r}: {error.strerror}; expected a file that {self.writer} wrote"
            ) from error
        except UnicodeDecodeError as error:
            raise self.error(
                f"{str(path)!r} is not a {self.kind} file: it is not text; expected what {self.writer} writes"
            ) from error
        except self.error as error:
            raise self.error(f"{str(path)!r}: {error}") from error


def refuse_unknown(raw: dict[str, Any], of: type, *also: str) -> None:
    """Raise ValueError for entries that are neither fields of the dataclass ``of`` nor named in ``also``."""
    unknown = sorted(set(raw) - {field.name for field in fields(of)} - set(also))
    if unknown:
        raise ValueError(f"it has the unknown entries {unknown}")


def checked(raw: Any, name: str, *kinds: type) -> Any:
    """An object's entry. Raises KeyError where it is missing, TypeError where it is of no such kind."""
    if not isinstance(raw, dict):
        raise TypeError(f"{raw!r} stands where an object with {name!r} was expected")
    value = raw[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name} is {value!r}; expected {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def check_numbers(name: str, raw: Any, signed: Collection[str] = ()) -> None:
    """Raise ValueError for a number that no float holds, or below 0 in an entry that is not named in ``signed``.

    Args:
        name: of the entry that has the value ``raw``, whose own entries are looked at by their names.
    """
    if isinstance(raw, dict | list):
        for key, value in raw.items() if isinstance(raw, dict) else ((name, each) for each in raw):
            check_numbers(key, value, signed)
    elif isinstance(raw, int | float):
        size, least = (abs(raw), "") if name in signed else (raw, "of at least 0 ")
        if not 0 <= size <= sys.float_info.max:
            raise ValueError(f"{name} is {raw!r:.20}; expected a number {least}that a float holds")


def spelled(of: type[Value], raw: Any) -> Value:
    """The dataclass ``of`` that an object spells: one entry a field, and every entry as the field is annotated.

    Annotations are numbers, strings, booleans, enums of strings, dataclasses, tuples of these, and what may be None besides.
    Raises KeyError for what is missing, TypeError or ValueError for what is wrong.
    """
    assert is_dataclass(of)
    values = {
        field.name: _value(field.name, checked(raw, field.name, *_kinds(field.type)), field.type)
        for field in fields(of)
    }
    refuse_unknown(raw, of)
    try:
        return of(**values)
    except AutoHeteError as error:
        raise ValueError(str(error)) from error


def _kinds(annotation: Any) -> tuple[type, ...]:
    """What JSON spells a value of this annotation with."""
    if isinstance(annotation, UnionType):
        return tuple(kind for part in get_args(annotation) for kind in _kinds(part))
    if get_origin(annotation) is tuple:
        return (list,)
    if is_dataclass(annotation):
        return (dict,)
    if issubclass(annotation, enum.Enum):
        return (str,)
    return (int, float) if annotation is float else (annotation,)


def _value(name: str, raw: Any, annotation: Any) -> Any:
    if isinstance(annotation, UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
        return None if raw is None else _value(name, raw, annotation)
    if get_origin(annotation) is tuple:
        kinds = get_args(annotation)
        kinds = kinds[:1] * len(raw) if kinds[-1] is Ellipsis else kinds
        if len(kinds) != len(raw):
            raise ValueError(f"{name} has {len(raw)} entries; expected {len(kinds)}")
        return tuple(_element(name, index, *pair) for index, pair in enumerate(zip(raw, kinds, strict=True)))
    if is_dataclass(annotation):
        assert isinstance(annotation, type)
        return spelled(annotation, raw)
    return annotation(raw) if issubclass(annotation, enum.Enum) else raw


def _element(name: str, index: int, raw: Any, annotation: Any) -> Any:
    try:
        if not is_dataclass(annotation):
            checked({name: raw}, name, *_kinds(annotation))
        return _value(name, raw, annotation)
    except (TypeError, ValueError) as error:
        raise ValueError(f"in {name}[{index}], {error}") from error
