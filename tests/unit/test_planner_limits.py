"""Budgets: plans keep them, larger ones are never slower, and errors name what would do, on random problems too."""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Optimizer, Params, Plan, Problem
from autohete_fx.planner.baselines import fits
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.solve import solve
from tests.planner_problems import QUIET, cost, limited, problem, problems


@pytest.mark.slow
@settings(max_examples=15, **QUIET)
@given(problems(most_blocks=6))
def test_a_plan_keeps_its_budgets_and_its_file_gives_it_back(given_problem: Problem):
    try:
        plan = solve(given_problem, time_limit_s=3.0)
    except InfeasiblePlanError:
        assume(False)
        return
    read = Plan.from_json(plan.to_json())
    assert read == plan and read.digest == plan.digest
    replayed = simulate(given_problem, read.decisions)
    assert fits(given_problem, replayed)
    assert (replayed.step_s, replayed.peak_bytes, replayed.host_bytes) == (
        plan.step_s,
        plan.peak_bytes,
        plan.host_bytes,
    )
    assert solve(given_problem, time_limit_s=3.0).decisions == plan.decisions


@pytest.mark.slow
@settings(max_examples=15, **QUIET)
@given(problems(most_blocks=6, budgets=False), st.lists(st.floats(0.2, 1.1), min_size=2, max_size=3, unique=True))
def test_a_larger_budget_is_slower_by_no_more_than_the_gap(free: Problem, shares: list[float]):
    least_s = float("inf")
    for share in sorted(shares):
        try:
            plan = solve(limited(free, share), time_limit_s=1.0)
        except InfeasiblePlanError:
            assert least_s == float("inf"), "a larger budget has every plan of a smaller one"
            continue
        assert plan.step_s * (1 - plan.gap) <= least_s * (1 + 1e-9)
        least_s = min(least_s, plan.step_s)


@settings(max_examples=25, **QUIET)
@given(problems(most_blocks=6))
@pytest.mark.slow
def test_errors_name_the_smallest_budget_that_does(given_problem: Problem):
    try:
        solve(given_problem, time_limit_s=0.5)
    except InfeasiblePlanError as error:
        refused = error
    else:
        assume(False)
        return
    budgets = {
        "device_budget_bytes": refused.smallest_budget_bytes,
        "host_budget_bytes": refused.smallest_host_budget_bytes,
    }
    assert any(smallest is not None for smallest in budgets.values())
    for name, smallest in budgets.items():
        if smallest is None:
            continue
        raised = dataclasses.replace(given_problem, **{name: smallest})
        assert fits(raised, simulate(raised, solve(raised, time_limit_s=0.5).decisions))
        with pytest.raises(InfeasiblePlanError):
            solve(dataclasses.replace(given_problem, **{name: smallest - 1}), time_limit_s=0.5)


def test_the_device_budget_is_named_where_only_it_holds_up():
    with pytest.raises(
        InfeasiblePlanError, match=r"held up in the .* of 'layers\.\d'.*memory_budget to at least"
    ) as caught:
        solve(problem([cost()] * 3, device_budget_bytes=10, host_budget_bytes=10**6))
    assert caught.value.smallest_host_budget_bytes is None and "host_budget" not in str(caught.value)


def test_both_budgets_are_named_where_either_would_do():
    given_problem = problem([cost()] * 3, device_budget_bytes=300, host_budget_bytes=1)
    with pytest.raises(
        InfeasiblePlanError, match=r"memory_budget to at least \d+ or host_budget to at least \d+"
    ) as caught:
        solve(given_problem)
    device, host = caught.value.smallest_budget_bytes, caught.value.smallest_host_budget_bytes
    assert device is not None and device > 300 and host is not None and host > 1


def test_the_host_budget_is_named_where_no_device_budget_would_do():
    pinned = (BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST),) * 2
    with pytest.raises(InfeasiblePlanError, match=r"Set host_budget to at least 160$") as caught:
        solve(problem([cost()] * 2, host_budget_bytes=159, fixed_decisions=pinned))
    assert caught.value.smallest_budget_bytes is None and caught.value.smallest_host_budget_bytes == 160
    with pytest.raises(InfeasiblePlanError, match="memory_budget is too small besides") as caught:
        solve(problem([cost()] * 2, host_budget_bytes=159, device_budget_bytes=1, fixed_decisions=pinned))
    assert caught.value.smallest_budget_bytes is None and caught.value.smallest_host_budget_bytes is None
