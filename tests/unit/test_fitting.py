"""Plans are corrected by traces of what was rewritten, until a trace keeps the budget."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

import pytest

from autohete_fx.compiler.fitting import Budget, Rewritten, fitted
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Plan, Problem
from autohete_fx.planner.infeasible import too_small
from tests.planner_problems import cost, problem


class Batch:
    """Stands for tensors that a frame of whoever compiles has."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def refuse(limit_bytes: int) -> NoReturn:
    raise too_small(limit_bytes, 900, "It is held up")


def refuse_twice(limit_bytes: int) -> NoReturn:
    """As where parameters that an earlier graph placed leave no plan, and none is left without that either."""
    try:
        refuse(limit_bytes)
    except InfeasiblePlanError:
        refuse(limit_bytes)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("raised", [refuse, refuse_twice])
def test_a_correction_that_goes_too_far_keeps_no_frame_alive(raised: Callable[[int], NoReturn]):
    given = problem([cost()], allow_recompute=False)
    asked: list[int | None] = []

    def planned(limited: Problem) -> Plan:
        asked.append(limited.device_budget_bytes)
        if asked[-1] is not None and asked[-1] < 900:
            raised(asked[-1])
        return Plan(labels=("one",), decisions=(BlockDecision(),), peak_bytes=900)

    def rewritten(plan: Plan) -> Rewritten:
        traced = 1100 if len(asked) == 1 else 1000
        return Rewritten(
            plan=Plan(labels=plan.labels, decisions=plan.decisions, peak_bytes=traced),
            problem=given,
            moved={},
            graphs=(),
            contexts=(),
        )

    def compiled() -> tuple[Rewritten, weakref.ref[Batch]]:
        batch = Batch()
        return fitted(given, Budget(device_bytes=1000), 1000, [planned], rewritten), weakref.ref(batch)

    made, batch = compiled()
    assert len(asked) == 3 and made.plan.peak_bytes == 1000  # asked for less than there is, then for the least
    assert batch() is None
