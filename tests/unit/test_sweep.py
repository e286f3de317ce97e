"""The sweep over budgets: where it begins and ends, that more memory is never slower, and that little time is no error."""

import dataclasses
import itertools

import pytest

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.planner import sweep
from autohete_fx.planner.baselines import fits
from autohete_fx.planner.sweep import plans_by_budget, smallest_plan, undecided_peak_bytes
from tests.planner_problems import cost, problem

PROBLEM = problem([cost() for _ in range(6)])
LARGEST = undecided_peak_bytes(PROBLEM)


@pytest.mark.slow
def test_more_memory_is_never_slower_and_in_the_end_gains_nothing():
    found = list(plans_by_budget(PROBLEM, largest_bytes=LARGEST, num_points=5, time_limit_s=5.0))
    budgets = [here.device_budget_bytes for here, _ in found]
    assert len(found) == 5 and budgets[0] == smallest_plan(PROBLEM, 5.0).peak_bytes and budgets[-1] == LARGEST
    assert all(fits(here, plan) for here, plan in found)
    assert all(one.step_s >= two.step_s for (_, one), (_, two) in itertools.pairwise(found))
    assert found[-1][1].peak_bytes == LARGEST and not any(d.recomputes for d in found[-1][1].decisions)


def test_where_nothing_can_be_gained_there_is_one_point():
    assert len(list(plans_by_budget(PROBLEM, largest_bytes=1, num_points=5, time_limit_s=5.0))) == 1


def test_a_search_that_finds_nothing_in_its_time_is_no_error(monkeypatch: pytest.MonkeyPatch):
    least = smallest_plan(PROBLEM, 5.0).peak_bytes
    monkeypatch.setattr(sweep, "least_peak", lambda *_, **__: None)
    assert least <= smallest_plan(PROBLEM, 5.0).peak_bytes < LARGEST

    def too_late(given, **_):
        raise InfeasiblePlanError("too late", smallest_budget_bytes=None)

    monkeypatch.setattr(sweep, "solve", too_late)
    found = list(plans_by_budget(PROBLEM, largest_bytes=LARGEST, num_points=3, time_limit_s=5.0))
    assert len(found) == 3 and all(fits(here, plan) for here, plan in found)


def test_a_device_on_which_nothing_fits_is_an_error():
    small = dataclasses.replace(PROBLEM, machine=dataclasses.replace(PROBLEM.machine, device_bytes=10))
    with pytest.raises(InfeasiblePlanError):
        smallest_plan(small, 1.0)
