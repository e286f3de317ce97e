"""Words of a compilation on itself: records of `logging`, texts that ``TORCH_LOGS`` asks for, and artifacts of ``TORCH_TRACE``.

In: a compilation. Out: nothing but what somebody listens to.
"""

import logging
from collections.abc import Callable

from autohete_fx.compiler.compilation import Compilation
from autohete_fx.internals import logs
from autohete_fx.report.tables import memory_table

log = logging.getLogger(__name__)


def tell(compilation: Compilation) -> None:
    """Once it is compiled, or found in a cache."""
    log.info("%s", compilation)
    texts: dict[str, Callable[[], str]] = {
        "plan": lambda: f"{compilation.plan_table()}\n{compilation.why()}",
        "graph": lambda: "\n".join(f"{text.graph} graph\n{text.after}" for text in compilation.graphs),
        "schedule": lambda: f"{compilation.transfers_table()}\n{compilation.timeline()}",
        "memory": lambda: memory_table(compilation.plan, compilation.levels),
    }
    assert texts.keys() == logs.ARTIFACTS.keys()
    for artifact, text in texts.items():
        logs.show(artifact, text)
    logs.trace("plan", compilation.plan.to_json, is_json=True)
    for text in compilation.graphs:
        logs.trace(f"{text.graph}_graph_before", lambda text=text: text.before)
        logs.trace(f"{text.graph}_graph", lambda text=text: text.after)
    for artifact in ("schedule", "memory"):
        logs.trace(artifact, texts[artifact])
