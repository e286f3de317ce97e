"""How much is searched and proven: as much as a plan needs."""

import dataclasses
from typing import Any

import pytest

from autohete_fx.ir import BlockDecision, Overlap, Problem, Schedule
from autohete_fx.planner import solve as planner
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.bound.relaxation import branch, ends_of, lumps_of, relax
from autohete_fx.planner.model.choices import MAX_PREFETCH_DISTANCE
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.search.walks import Walks
from tests.planner_problems import MACHINE, cost, problem


def dozen(share: float = 0.5) -> Problem:
    """A dozen blocks of different sizes in a share of what keeping everything takes."""
    sizes = [40 + i * 37 % 90 for i in range(12)]
    blocks = [
        cost(param_bytes=size, grad_bytes=size, optimizer_bytes=3 * size, saved_bytes=200 - size) for size in sizes
    ]
    free = problem(blocks)
    plain = simulate(free, [BlockDecision()] * len(blocks), events=False).peak_bytes
    return dataclasses.replace(free, device_budget_bytes=int(share * plain))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Work and seeds of all runs of annealing, of which each does a tenth; one branch is taken."""
    found, anneal = [], planner.anneal

    def noted(*given: Any, work: int, seed: int, **more: Any) -> Any:
        found.append((work, seed))
        return anneal(*given, work=work // 10, seed=seed, **more)

    monkeypatch.setattr(planner, "anneal", noted)
    monkeypatch.setattr(planner, "BRANCHES_PER_SECOND", 0)
    return found


def test_a_plan_that_is_near_enough_the_bound_is_searched_no_further(monkeypatch: pytest.MonkeyPatch):
    """And the bound proven no further: with a time limit of an hour no walk walks, and no choice of all blocks is branched on."""
    monkeypatch.setattr(Walks, "change", None)
    monkeypatch.setattr(planner, "branch", None)
    plan = planner.solve(dozen(share=0.95), time_limit_s=3600, explains=False)
    assert 0 < plan.gap <= planner.ENOUGH


def test_annealing_goes_on_while_it_finds_something(runs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "STAGNANT", 0.0)  # each run is faster by that
    plan = planner.solve(dozen(), time_limit_s=10, explains=False)
    all_runs, runs[:] = runs[:], []
    assert [seed for _, seed in all_runs] == [seed for seed, _ in planner.FEW_RUNS] and plan.gap > planner.ENOUGH
    monkeypatch.setattr(planner, "STAGNANT", 1.0)  # none is
    shorter = planner.solve(dozen(), time_limit_s=10, explains=False)
    assert runs == all_runs[:1] and shorter.step_s >= plan.step_s * (1 - 1e-3)


def test_whole_numbers_at_the_ends_prove_more_and_no_more_than_is_true():
    """Alike blocks share out what is a mixture, but for the first ones, for which others wait, and the last ones, which wait."""
    layer = cost(
        forward_s=1.1,
        backward_s=2.1,
        saved_bytes=1200,
        boundary_bytes=67,
        offloadable=(268, 268, *[67] * 8),
        backward_workspace_bytes=402,
        param_bytes=402,
        grad_bytes=402,
        optimizer_bytes=2412,
        num_params=201,
    )
    machine = dataclasses.replace(
        MACHINE,
        h2d_bytes_per_s=480.0,
        d2h_bytes_per_s=480.0,
        host_update_params_per_s=120.0,
        device_update_params_per_s=5e3,
    )
    free = problem([layer] * 9, machine=machine, schedule=Schedule(overlap=Overlap.STEP))
    plain = simulate(free, [BlockDecision()] * 9, events=False).peak_bytes
    tight = dataclasses.replace(free, device_budget_bytes=int(0.4 * plain))
    program = Program(tight)
    program.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
    assert not lumps_of(tight) and ends_of(tight) == [0, 1, 2, 6, 7, 8]
    relaxed = relax(program, deadline=float("inf"))
    of_ends, of_all = (
        branch(program, branches=60, deadline=float("inf"), blocks=blocks).bound_s for blocks in (ends_of(tight), None)
    )
    plan = planner.solve(tight, time_limit_s=1.0, explains=False)
    assert relaxed is not None and relaxed.bound_s * 1.005 < of_ends <= min(of_all * (1 + 2e-5), plan.step_s)


def test_lumps_are_among_the_ends():
    assert ends_of(problem([*[cost()] * 5, cost(num_params=50, trained=(50,)), *[cost()] * 6])) == [
        0,
        1,
        2,
        5,
        9,
        10,
        11,
    ]
