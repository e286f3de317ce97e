"""Answers of ``autohete plan``, kept so that the same question is answered at once, with the words of the first time.

Enter parsed options; a key leaves that holds everything which decides the answer. It holds the options, the contents of the
files that they name, this package's code, PyTorch's environment, and the versions of what traces and solves. A kept answer
counts only under its key and with its digest. PyTorch is not imported.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from autohete_fx.cache import load_text, sources_digest, store_text
from autohete_fx.ir.files import is_file

_KIND = "answer"
_TELLS = ("run", "save", "no_cache")
"""Options that decide nothing of the answer."""
_LIBRARIES = ("torch", "transformers", "ortools", "numpy", "networkx", "scipy")
_ENVIRONMENT = ("TORCH", "PYTORCH", "TRANSFORMERS", "OMP", "AUTOHETE_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The text to print, and where it is about one plan, that plan as JSON."""

    text: str
    plan: str = ""


def key_of(parsed: argparse.Namespace) -> str | None:
    """The key of a question; None where the answer is not kept: a factory may do anything, and a plot is a file."""
    if parsed.no_cache or parsed.plot or (":" in parsed.model or parsed.model.endswith(".py")):
        return None
    files = [path for path in (parsed.machine, parsed.given) if path]
    files += [path for path in (parsed.model, parsed.cluster) if path and (path.endswith(".json") or is_file(path))]
    if parsed.costs:
        files += sorted(map(str, Path(parsed.costs).glob("*.json")))
    parts = {
        "options": {name: value for name, value in sorted(vars(parsed).items()) if name not in _TELLS},
        "files": {path: _digest_of(path) for path in files},
        "code": sources_digest(),
        "versions": [sys.version, *map(_version_of, _LIBRARIES)],
        "environment": sorted(
            (name, value) for name, value in os.environ.items() if name.startswith(_ENVIRONMENT) and "CACHE" not in name
        ),
    }
    return json.dumps(parts, sort_keys=True)


def kept(key: str) -> Answer | None:
    """The answer that was kept under a key; None where there is none, or it is damaged."""
    text = load_text(_KIND, key)
    if text is None:
        return None
    digest, _, payload = text.partition(" ")
    if digest != hashlib.sha256(payload.encode()).hexdigest():
        return None
    return Answer(**json.loads(payload))


def keep(key: str, answer: Answer) -> None:
    """Keep an answer under a key."""
    payload = json.dumps({"text": answer.text, "plan": answer.plan})
    store_text(_KIND, key, f"{hashlib.sha256(payload.encode()).hexdigest()} {payload}")


def _digest_of(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:  # whoever reads it says so
        return str(error.errno)


def _version_of(library: str) -> str:
    """Which one would be imported, by its metadata, its place and its last change."""
    try:
        version = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return f"{library} {version}"
    status = os.stat(spec.origin)
    return f"{library} {version} {spec.origin} {status.st_size} {status.st_mtime_ns}"
