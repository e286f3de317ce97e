"""Sharded models under our backend: each kind of plan is exact, keeps its budget, and is the same on all ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir.lane import Lane  # noqa: F401
from tests.dist import ranks
from tests.dist.sharded import alone, differences, make, mesh, refusal, together, tokens  # noqa: F401
from tests.layers import EAGER

DECISIONS = {
    "keep": [BlockDecision()],
    "recompute": [BlockDecision(activations=Activations.RECOMPUTE)],
    "selective": [BlockDecision(activations=Activations.SELECTIVE)],
    "mixed": [
        BlockDecision(activations=Activations.RECOMPUTE, params=Params.HOST),
        BlockDecision(activations=Activations.OFFLOAD, optimizer=Optimizer.HOST),
        BlockDecision(),
    ],
    "host": [BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)],
}
HOW: dict[str, Any] = {"layers": 2, "steps": 2}


def ours(params: Any) -> torch.optim.Optimizer:
    return autohete_fx.AdamW(params, lr=1e-2, max_grad_norm=None)


def labels() -> tuple[str, ...]:
    return autohete_fx.compilations()[-1].plan.labels


def backend(**options: Any) -> dict[str, Any]:
    return {"backend": "autohete", "options": {**EAGER, "solver_time_limit_s": 1, **options}}


def plan_of(decisions: list[BlockDecision], labels: tuple[str, ...]) -> Plan:
    return Plan(labels=labels, decisions=tuple(decisions[at % len(decisions)] for at in range(len(labels))))


def plans() -> dict[str, Any]:
    """How far each plan is from one process, and what its graphs have."""
    expected = alone(ours, **HOW)
    found = {"solved": worst(together(ours, compiled=backend(), **HOW), expected)}
    blocks = labels()
    for name, decisions in DECISIONS.items():
        given = together(ours, compiled=backend(plan=plan_of(decisions, blocks)), **HOW)
        found[name] = worst(given, expected)
        compilation = autohete_fx.compilations()[-1]
        found[f"{name} nodes"] = [
            compilation.readable(graph).count(f"autohete.{op}.default(")
            for graph in ("forward", "backward")
            for op in ("gather", "reduce")
        ]
    return found


def worst(given: dict[str, Any], expected: dict[str, Any]) -> Any:
    away = differences(given, expected)
    return [max(away.values(), default=0.0), sorted(away)[:3]]
