"""PyTorch's logs and traces, and what they say of a compilation: ``TORCH_LOGS`` and ``TORCH_TRACE``.

PyTorch calls `register` while it is imported, by the entry point ``torch.backends`` of this package. It refuses names in
``TORCH_LOGS`` that nobody has registered by then. ``autohete`` there stands for all records of this package, and
``autohete_plan``, ``autohete_graph``, ``autohete_schedule`` and ``autohete_memory`` for one text of each compilation.

The loggers of this package are ordinary ones, whose records go to the handlers that a program has set up. Only while
``TORCH_LOGS``, or ``torch._logging.set_logs``, names ``autohete`` does `follow` hand them to PyTorch's handlers instead. It
then makes them children of the logger whose level PyTorch sets.

PyTorch 2.11 and 2.12 call `register` only after they have read ``TORCH_LOGS``, and refuse these names there.
``torch._logging.set_logs`` takes them.
Nothing but the standard library is imported before PyTorch is there.
"""

import functools
import logging
from collections.abc import Callable

ARTIFACTS = {
    "plan": "Every decision of a plan, and what it predicts (autohete)",
    "graph": "The forward and backward graphs as rewritten, with copies, waits, lanes and priorities (autohete)",
    "schedule": "The inserted copies in schedule order, and the predicted lanes of a step (autohete)",
    "memory": "The predicted device memory at the peak of a step, and who holds it (autohete)",
}
"""By the end of its name, what each artifact shows."""

_OURS, _NAME = "autohete_fx", "autohete"


@functools.cache
def register() -> None:
    """Make the names known to PyTorch's logging."""
    from torch._logging._internal import register_artifact, register_log

    register_log(_NAME, _NAME)
    for artifact, description in ARTIFACTS.items():
        register_artifact(f"{_NAME}_{artifact}", description)


@functools.cache
def _artifact_log(artifact: str) -> logging.Logger:
    from torch._logging._internal import getArtifactLogger

    register()
    return getArtifactLogger(_NAME, f"{_NAME}_{artifact}")


def follow() -> None:
    """From now on, records of this package go where PyTorch's logs go, where those name it; else where a program sends them."""
    register()
    ours, theirs = logging.getLogger(_OURS), logging.getLogger(_NAME)
    ours.parent = theirs if theirs.level else logging.root
    ours.setLevel(ours.level)  # loggers remember what their parents let through


def show(artifact: str, text: Callable[[], str]) -> None:
    """Log one text of a compilation, where anybody wants it."""
    log = _artifact_log(artifact)
    if logging.DEBUG in (log.level, logging.getLogger(_NAME).level):
        log.debug("%s", text())


def trace(name: str, text: Callable[[], str], *, is_json: bool = False) -> None:
    """Add a text to the structured trace of ``TORCH_TRACE``, which tlparse shows."""
    from torch._logging._internal import trace_structured

    encoding = "json" if is_json else "string"
    trace_structured("artifact", metadata_fn=lambda: {"name": f"{_NAME}_{name}", "encoding": encoding}, payload_fn=text)
