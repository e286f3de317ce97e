"""Plans are corrected by traces of what was rewritten, until a trace keeps the budget."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from autohete_fx.compiler.fitting import Budget, Rewritten, fitted
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


@pytest.mark.usefixtures("no_collection")
def test_a_correction_that_goes_too_far_keeps_no_frame_alive():
    given = problem([cost()], allow_recompute=False)
    asked: list[int | None] = []

    def planned(limited: Problem) -> Plan:
        asked.append(limited.device_budget_bytes)
        if asked[-1] is not None and asked[-1] < 900:
            raise too_small(asked[-1], 900, "It is held up")
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
