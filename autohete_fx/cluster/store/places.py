"""Paths and URLs of a store, before anything is read or written there: those that no job can save in are refused."""

import os

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from autohete_fx.errors import ClusterError

_PATTERNS = "*?[]"
"""Characters that file systems of URLs read as patterns of names, so that they look for other files than were written."""


def check_known(path: str) -> None:
    """Raise ClusterError for what no job can save in.

    That is an empty path, a URL without one, or one with characters of a pattern. It is also a URL of an unknown file system, or
    of one whose package is not installed.
    """
    system = _system(path)
    _, rest = fsspec.core.split_protocol(path)
    if not rest.strip("/"):
        raise ClusterError(
            f"the store {path!r} was given. Expected was a folder, or a URL with a path, such as s3://bucket/run. Name a folder of"
            " this job alone; leave out cloud= for a store without a cloud"
        )
    if not issubclass(system, LocalFileSystem) and (wrong := [one for one in _PATTERNS if one in rest]):
        raise ClusterError(
            f"the store {path!r} was given, which has {' and '.join(wrong)}. Expected was a URL without any of {_PATTERNS}, which"
            " stand for other names there. Name another folder"
        )


def are_same(first: str, second: str) -> bool:
    """Whether two known places are one: of one file system, and with one path there."""
    return _resolved(first) == _resolved(second)


def _resolved(path: str) -> tuple[type[AbstractFileSystem], str]:
    system = _system(path)
    root = str(system._strip_protocol(path))
    return system, os.path.realpath(root) if issubclass(system, LocalFileSystem) else root.strip("/")


def _system(path: str) -> type[AbstractFileSystem]:
    protocol, _ = fsspec.core.split_protocol(path)
    try:
        return fsspec.get_filesystem_class(protocol or "file")
    except (ImportError, ValueError) as error:
        raise ClusterError(
            f"the store {path!r} was given: {error}. Expected was a folder, or a URL that fsspec can open here. Install the"
            " package of that file system, or correct the URL"
        ) from error
