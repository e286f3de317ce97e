"""Figures of a compilation, as numbers by name, for the loggers of trainers.

In: a compilation of a training graph. Out: its plan, its predictions and what was measured so far, flat. Figures that nobody has
measured yet are left out.
"""

from collections import Counter

from autohete_fx.compiler.compilation import Compilation
from autohete_fx.ir import Lane

PREFIX = "autohete/"


def figures_of(compilation: Compilation) -> dict[str, float]:
    """Numbers by name: seconds end in ``_s``, bytes in ``_bytes``, and counts are of blocks."""
    found: dict[str, float | None] = {
        "budget_bytes": compilation.device_budget_bytes,
        "predicted_peak_bytes": compilation.predicted_peak_bytes,
        "peak_bytes": compilation.measured_peak_bytes,
        "predicted_step_s": compilation.predicted_step_s,
        "step_s": compilation.measured_step_s,
        **_decisions(compilation),
        **_lanes(compilation),
    }
    return {PREFIX + name: value for name, value in found.items() if value is not None}


def _decisions(compilation: Compilation) -> dict[str, float | None]:
    counts: Counter[str] = Counter()
    for decision in compilation.plan.decisions:
        counts[f"blocks_activations_{decision.activations.value}"] += 1
        counts[f"blocks_params_{decision.params.value}"] += 1
        counts[f"blocks_optimizer_{decision.optimizer.value}"] += 1
    return {"blocks": len(compilation.plan.decisions), **counts}


def _lanes(compilation: Compilation) -> dict[str, float | None]:
    """Busy seconds a step of each lane but ``compute``, whose records are of what held it up."""
    trace, found = compilation.trace(), {}
    for lane in Lane:
        planned_s = sum(event.end_s - event.start_s for event in trace.planned if event.lane is lane)
        measured_s = trace.busy_s(lane)
        if lane is not Lane.COMPUTE and (planned_s or measured_s):
            found |= {f"lane_{lane.value}_predicted_s": planned_s, f"lane_{lane.value}_s": measured_s}
    return found
