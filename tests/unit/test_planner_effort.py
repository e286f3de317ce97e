"""How much is searched and proven: as much as a plan needs."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest

from autohete_fx.ir import BlockDecision, Overlap, Params, Problem, Schedule
from autohete_fx.planner import found as finding
from autohete_fx.planner import solve as planner
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.bound.relaxation import _mixes, branch, dive, ends_of, lumps_of, relax
from autohete_fx.planner.model.choices import MAX_PREFETCH_DISTANCE
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.search import anneal, effort, improve, judge
from autohete_fx.planner.search.arrays import Rows
from autohete_fx.planner.search.walks import Terms, Walks
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
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Seeds of all runs of annealing and the prefetch distances of their walks; each does a tenth, and one branch is taken."""
    found, anneal = [], finding.anneal

    def noted(search: Any, terms: Terms, *given: Any, work: int, seed: int, **more: Any) -> Any:
        found.append((seed, terms.distances))
        return anneal(search, terms, *given, work=work // 10, seed=seed, **more)

    monkeypatch.setattr(finding, "anneal", noted)
    monkeypatch.setattr(effort, "BRANCHES_PER_SECOND", 0)
    return found


def test_a_plan_that_is_near_enough_the_bound_is_searched_no_further(monkeypatch: pytest.MonkeyPatch):
    """And the bound proven no further: with a time limit of an hour no walk walks, and no choice of all blocks is branched on."""
    monkeypatch.setattr(Walks, "change", None)
    monkeypatch.setattr(finding, "branch", None)
    plan = planner.solve(dozen(share=0.95), time_limit_s=3600, explains=False)
    assert 0 < plan.gap <= effort.ENOUGH


@pytest.mark.slow
def test_annealing_goes_on_while_it_finds_something(runs: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch):
    """Last come walks that give all distances."""
    monkeypatch.setattr(effort, "STAGNANT", 0.0)  # each run is faster by that
    plan = planner.solve(dozen(), time_limit_s=10, explains=False)
    all_runs, runs[:] = runs[:], []
    few, last = ([seed for seed, _ in kind] for kind in (effort.FEW_RUNS, effort.LAST_RUNS))
    assert all_runs == [*((seed, [1, 3]) for seed in few), *((seed, [1, 2, 3, 4]) for seed in last)]
    assert plan.gap > effort.ENOUGH
    monkeypatch.setattr(effort, "STAGNANT", 1.0)  # none is
    shorter = planner.solve(dozen(), time_limit_s=10, explains=False)
    assert runs == all_runs[:1] and shorter.step_s >= plan.step_s * (1 - 1e-3)


def test_a_run_without_a_gain_is_followed_by_walks_that_give_all_distances(
    runs: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
):
    anneal = finding.anneal

    def idle(search: Any, terms: Terms, starts: Rows, *, work: int, seed: int, **more: Any) -> Rows:
        return anneal(search, terms, starts, work=0 if seed == effort.FEW_RUNS[1][0] else work, seed=seed, **more)

    monkeypatch.setattr(finding, "anneal", idle)
    planner.solve(dozen(share=0.3), time_limit_s=10, explains=False)
    assert [seed for seed, _ in runs] == [effort.FEW_RUNS[0][0], effort.FEW_RUNS[1][0], effort.LAST_RUNS[0][0]]


@pytest.mark.slow
def test_decisions_of_a_problem_that_is_near_are_where_the_search_begins(monkeypatch: pytest.MonkeyPatch):
    """Of a budget that is a hundredth larger. Nothing walks the second time."""
    plan = planner.solve(dozen(), time_limit_s=10, explains=False)
    monkeypatch.setattr(finding, "anneal", lambda search, terms, starts, **how: starts)
    monkeypatch.setattr(effort, "BRANCHES_PER_SECOND", 0)
    smaller = dozen(share=0.495)
    begun, anew = (planner.solve(smaller, time_limit_s=1, explains=False, near=near) for near in ([plan.decisions], []))
    assert begun.peak_bytes <= (smaller.device_budget_bytes or 0)
    assert begun.step_s < anew.step_s and begun.step_s < 1.02 * plan.step_s
    # Of what this problem does not allow nothing is taken.
    stays = dataclasses.replace(smaller, fixed_decisions=(BlockDecision(), *[None] * 11))
    assert (
        planner.solve(stays, time_limit_s=1, explains=False, near=[plan.decisions]).decisions[0].params == Params.DEVICE
    )


@pytest.mark.slow
def test_where_work_slows_down_other_work_the_search_learns_by_how_much_and_goes_on(
    runs: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
):
    """Each time from what the simulator says of the best so far, which it judges in the end, and of what the search had thought
    best."""
    learned, surprises, lengthening = [], [], finding.lengthening

    def noted(given: Problem, plans: Any) -> Any:
        best_s, *favourite_s = (simulate(given, decisions, events=False).step_s for decisions in plans)
        learned.append(best_s)
        surprises.extend(other_s > best_s for other_s in favourite_s)
        return lengthening(given, plans)

    monkeypatch.setattr(finding, "lengthening", noted)
    contention = tuple((a, b, 0.6) for a in ("h2d", "d2h", "update") for b in ("h2d", "d2h", "update") if a != b)
    slow = dataclasses.replace(dozen(), machine=dataclasses.replace(MACHINE, contention=contention))
    plan = planner.solve(slow, time_limit_s=10, explains=False)
    assert len(learned) >= 4 and learned == sorted(learned, reverse=True)
    assert plan.step_s == learned[-1] < learned[0] and any(surprises)
    seeds = [seed for seed, _ in runs]
    beside = seeds[len(seeds) - 1 - seeds[::-1].index(0) :]  # fewer of them where other programs keep the machine busy
    assert len(beside) >= 3 and beside == list(range(len(effort.BESIDE_SHARES) - 1))[: len(beside)]
    blind = planner.solve(dozen(), time_limit_s=10, explains=False)
    assert plan.step_s < simulate(slow, blind.decisions, events=False).step_s


@pytest.mark.slow
def test_where_a_replay_takes_long_nothing_is_learned(monkeypatch: pytest.MonkeyPatch):
    """The simulator then judges a few plans in the end."""
    monkeypatch.setattr(finding, "lengthening", None)
    judged = []
    monkeypatch.setattr(judge, "simulate", lambda *given, **how: judged.append(given) or simulate(*given, **how))
    slow = dataclasses.replace(MACHINE, contention=(("h2d", "d2h", 0.6), ("d2h", "h2d", 0.6)))
    many = dataclasses.replace(dozen(), machine=slow, micro_batches=40)
    plan = planner.solve(many, time_limit_s=2, explains=False)
    assert len(judged) <= 5 and plan.step_s == simulate(many, plan.decisions, events=False).step_s


@pytest.mark.slow
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


def many_on_four_ranks() -> Problem:
    """Twenty blocks whose states do not fit, on ranks that share them."""
    mib = 2**20
    block = cost(
        saved_bytes=60 * mib,
        boundary_bytes=10 * mib,
        offloadable=(30 * mib, 10 * mib),
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        param_bytes=20 * mib,
        grad_bytes=20 * mib,
        optimizer_bytes=120 * mib,
        num_params=10 * mib,
        trained=(mib, 3 * mib, 6 * mib),
        num_grad_tensors=3,
        num_param_tensors=3,
        gathered_bytes=80 * mib,
        gathered_again_bytes=80 * mib,
        reduced_bytes=80 * mib,
    )
    machine = dataclasses.replace(
        MACHINE,
        h2d_bytes_per_s=30 * mib,
        d2h_bytes_per_s=30 * mib,
        net_bytes_per_s=200 * mib,
        latency_s=0.01,
        device_update_params_per_s=300 * mib,
        host_update_params_per_s=mib,
    )
    free = problem(
        [block] * 20,
        machine=machine,
        num_ranks=4,
        schedule=Schedule(overlap=Overlap.BACKWARD),
        allow_streamed_optimizer=True,
        allow_moving_some_states=True,
    )
    plain = simulate(free, [BlockDecision()] * 20, events=False).peak_bytes
    return dataclasses.replace(free, device_budget_bytes=int(0.5 * plain))


def with_a_disk() -> Problem:
    """Updates on the host take as long as computation or the disk: some states on each are faster than shares of all."""
    free = many_on_four_ranks()
    machine = dataclasses.replace(free.machine, host_update_params_per_s=4 * 2**20, disk_bytes_per_s=60 * 2**20)
    return dataclasses.replace(
        free,
        machine=machine,
        schedule=Schedule(overlap=Overlap.STEP),
        allow_streamed_optimizer=False,
        allow_disk_optimizer=True,
        host_budget_bytes=2**30,
    )


def with_many_small_tensors() -> Problem:
    """Of those that are on the host, some of few tensors have less latency than a share of all."""
    free = many_on_four_ranks()
    block = dataclasses.replace(
        free.costs[0], trained=(*[2**14] * 64, 3 * 2**20, 6 * 2**20), num_grad_tensors=66, num_param_tensors=66
    )
    return dataclasses.replace(free, costs=(block,) * len(free.costs))


@pytest.mark.parametrize("made", [many_on_four_ranks, with_a_disk, with_many_small_tensors])
def test_a_relaxation_is_as_tight_without_choices_that_others_can_be_mixed_to(made: Callable[[], Problem]):
    program = Program(made())
    program.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
    with_all, without = (relax(program, deadline=float("inf"), mixtures=mixtures) for mixtures in (True, False))
    assert with_all is not None and without is not None
    assert without.bound_s == pytest.approx(with_all.bound_s, rel=1e-5)
    left_out = [
        share[len(treated) :][[place.num_moved_states is not None and _mixes(place) for place in placed]].sum()
        for share, treated, placed in zip(without.shares, program.treated, program.placed, strict=True)
    ]
    assert any(_mixes(place) for placed in program.placed for place in placed if place.num_moved_states is not None)
    assert max(left_out) < 1e-9


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_a_dive_decides_within_the_budget_near_its_relaxation(share: float):
    """Where the choices of that relaxation are rounded at once, they do not fit."""
    twelve = dozen(share)
    many = dataclasses.replace(
        twelve,
        costs=twelve.costs * 3,
        labels=tuple(f"layers.{i}" for i in range(36)),
        device_budget_bytes=3 * (twelve.device_budget_bytes or 0),
        machine=dataclasses.replace(MACHINE, device_type="cuda"),
    )
    program = Program(many, held=3)
    program.minimize_step(ahead=3)
    found, relaxed = dive(program, deadline=float("inf")), relax(program, deadline=float("inf"))
    assert relaxed is not None
    first, last = (
        simulate(
            many,
            [dataclasses.replace(d, prefetch_distance=3) for d in program.decisions([list(each) for each in shares])],
            events=False,
        )
        for shares in (found[0], found[-1])
    )
    assert all(max(share, 1 - share) > 1 - 1e-5 for of_block in found[-1] for share in of_block)
    assert last.peak_bytes <= (many.device_budget_bytes or 0) < first.peak_bytes
    assert relaxed.bound_s <= last.step_s * (1 + 1e-6) and last.step_s < 1.01 * relaxed.bound_s
    program = Program(dataclasses.replace(many, device_budget_bytes=1), held=3)
    program.minimize_step(ahead=3)
    assert dive(program, deadline=float("inf")) == []


@pytest.mark.slow
def test_a_relaxation_is_rounded_even_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch):
    """On a slow machine it may take all the time there is; patterns are worse."""
    monkeypatch.setattr(effort, "MOST_CHOICES", 1)
    monkeypatch.setattr(effort, "BRANCHES_PER_SECOND", 0)
    monkeypatch.setattr(effort, "LUMP_BRANCHES", 0)
    clock = [0.0]
    for module in (finding, improve, anneal):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    relaxed: list[float] = []

    def late(program: Program, **how: Any) -> Any:
        found = relax(program, **{**how, "deadline": float("inf")}) if relaxed else None
        relaxed.append(clock[0])
        clock[0] += 1e6
        return found

    monkeypatch.setattr(finding, "relax", late)
    of_patterns, rounded = (planner.solve(many_on_four_ranks(), time_limit_s=1.0, explains=False) for _ in range(2))
    assert len(relaxed) == 2 and rounded.gap < of_patterns.gap
    assert rounded.step_s < 0.95 * of_patterns.step_s


@pytest.mark.slow
def test_both_relaxations_of_many_blocks_end_at_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """Rounding, walks and branches have the rest. The clock stands still, so that nothing but a deadline says when they end."""
    twelve = dozen()
    free = dataclasses.replace(
        twelve,
        costs=twelve.costs * 6,
        labels=tuple(f"layers.{i}" for i in range(72)),
        device_budget_bytes=6 * (twelve.device_budget_bytes or 0),
    )
    monkeypatch.setattr(finding, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    asked: dict[int, float] = {}

    class Enough(Exception):
        pass

    def noted(program: Program, *, deadline: float, **how: Any) -> Any:
        asked[program.held] = deadline
        return relax(program, deadline=float("inf"), **how)

    def noted_too(program: Program, *, deadline: float) -> Any:
        asked[program.held] = deadline
        raise Enough

    monkeypatch.setattr(finding, "relax", noted)
    monkeypatch.setattr(finding, "dive", noted_too)
    with pytest.raises(Enough):
        planner.solve(free, time_limit_s=2.0, explains=False)
    assert asked == {1: 2.0 * effort.RELAXATION_SHARE, effort.NEAR_DISTANCE: 2.0 * effort.RELAXATION_SHARE}
