"""Plans for ranks that hold shards, on random problems: search and bound against the simulator, plans against all there are."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Lane, Optimizer, Overlap, Params, Problem, Schedule
from autohete_fx.planner.baselines import fits
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.bound.relaxation import branch, relax
from autohete_fx.planner.model.choices import (
    MAX_PREFETCH_DISTANCE,
    activation_choices,
    choices,
    joined,
    place_choices,
)
from autohete_fx.planner.model.device_use import device_bytes
from autohete_fx.planner.model.figures import disk_bytes, host_bytes
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.work import durations
from autohete_fx.planner.search.anneal import HEAT, at_distances, terms_of
from autohete_fx.planner.search.improve import Search
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.search.rounding import wasted_seconds
from autohete_fx.planner.search.walks import Prices, Walks
from autohete_fx.planner.solve import solve
from tests.planner_problems import MACHINE, QUIET, cost, problem, problems, program_of, sharded

MOVING = Lane.H2D, Lane.D2H, Lane.NET


def free_problems(most_blocks: int, least_blocks: int = 1) -> st.SearchStrategy[Problem]:
    """Without budgets, half of them with updates that start in backward."""
    of = [
        problems(least_blocks=least_blocks, most_blocks=most_blocks, budgets=False, early=early)
        for early in (False, True)
    ]
    return sharded(of[0], budgets=False) | sharded(of[1], budgets=False)


def limited_problems(most_blocks: int, least_blocks: int = 1) -> st.SearchStrategy[Problem]:
    """With budgets."""
    of = [
        problems(least_blocks=least_blocks, most_blocks=most_blocks, budgets=False, early=early)
        for early in (False, True)
    ]
    return sharded(of[0]) | sharded(of[1])


def any_rows(replays: Replays, count: int) -> NDArray[np.int64]:
    random = np.random.default_rng(0)
    return np.array([[random.integers(len(of_block)) for of_block in replays.settings] for _ in range(count)])


@settings(max_examples=60, **QUIET)
@given(free_problems(most_blocks=6))
def test_replays_of_arrays_are_those_of_the_simulator(free: Problem):
    """At all distances side by side, and by themselves at those that they have."""
    replays = Replays(free)
    rows = any_rows(replays, 8)
    for row, seconds, copied_s in zip(rows, replays.seconds(rows), replays.copied_seconds(rows), strict=True):
        decisions = replays.decisions(row)
        assert np.array_equal(replays.row(decisions), row)
        replayed = simulate(free, decisions, events=False)
        assert seconds == pytest.approx(replayed.step_s, rel=1e-9)
        assert replays.seconds(row[None])[0] == pytest.approx(replayed.step_s, rel=1e-9)
        assert copied_s == pytest.approx(sum(t.busy_s for t in replayed.busy_s if t.lane in MOVING))
        assert replays.device_use(row).max() == replayed.peak_bytes
        assert tuple(replays.use_elsewhere(row)) == (replayed.host_bytes, replayed.disk_bytes)


@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("priority", [True, False])
@pytest.mark.parametrize("training, micro_batches", [(True, 1), (True, 3), (False, 1)])
@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_schedule_is_replayed_as_by_the_simulator(
    overlap: Overlap, priority: bool, training: bool, micro_batches: int, mixed: bool
):
    """With all that a plan may move, of blocks that all gather, or two of three."""
    blocks = [replace(cost(param_bytes=10 + 3 * i, forward_s=1.0 + i % 3), trained=(2, 3)) for i in range(10)]
    free = problem(
        [
            each
            if mixed and i % 3 == 0
            else replace(
                each,
                gathered_bytes=2 * each.param_bytes,
                gathered_again_bytes=2 * each.param_bytes,
                reduced_bytes=2 * each.grad_bytes,
            )
            for i, each in enumerate(blocks)
        ],
        # Where an update ends just when gradients land, rounding says which is first.
        machine=replace(MACHINE, net_bytes_per_s=30.0, net_latency_s=0.1, host_update_params_per_s=9.7),
        num_ranks=2,
        schedule=Schedule(overlap=overlap, priority=priority),
        training=training,
        micro_batches=micro_batches,
        allow_streamed_optimizer=True,
        allow_moving_some_states=True,
    )
    replays = Replays(free)
    rows = any_rows(replays, 60)
    replayed = [simulate(free, replays.decisions(row), events=False).step_s for row in rows]
    assert replays.seconds(rows) == pytest.approx(replayed, rel=1e-12)


@pytest.mark.slow
@settings(max_examples=40, **QUIET)
@given(free_problems(most_blocks=4))
def test_activations_and_places_add_up(free: Problem):
    """What the integer program relies on, which has no variable for a pair of them."""

    def takes(block: int, decision: BlockDecision) -> NDArray[np.float64]:
        bytes_elsewhere = host_bytes(free, block, decision), disk_bytes(free, block, decision)
        return np.array(
            [*durations(free, block, decision).seconds, *device_bytes(free, [block], [decision])[0], *bytes_elsewhere]
        )

    for block in range(len(free.costs)):
        first, *placed = place_choices(free, block)
        for activations, place in itertools.product(activation_choices(free, block), placed):
            apart = takes(block, joined(activations, first)) - takes(block, first) + takes(block, place)
            assert takes(block, joined(activations, place)) == pytest.approx(apart, rel=1e-12, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=40, **QUIET)
@given(free_problems(most_blocks=5))
def test_with_all_choices_made_the_program_bounds_the_simulator(free: Problem):
    """Whatever is chosen, at whatever distances: this is what its proof says."""
    bounds_its_simulations(free, rows=2)


def test_an_update_that_others_gathers_wait_for_is_counted_once():
    """The first block gathers nothing, and its streamed states are updated before the gather of the second is issued."""
    whole = replace(cost(param_bytes=40, forward_s=1.0), trained=(20, 20))
    shared = replace(whole, gathered_bytes=80, gathered_again_bytes=80)
    free = problem(
        [whole, shared, shared],
        machine=replace(MACHINE, net_bytes_per_s=3000.0, device_update_params_per_s=300.0),
        num_ranks=2,
        schedule=Schedule(overlap=Overlap.BACKWARD, priority=False),
        allow_streamed_optimizer=True,
    )
    bounds_its_simulations(free, rows=60)


def bounds_its_simulations(free: Problem, *, rows: int) -> None:
    replays = Replays(free)
    for row in any_rows(replays, rows):
        far = replays.decisions(row)
        made = [replace(decision, prefetch_distance=1) for decision in far]
        answer = program_of(free, made).solve(limit_s=10, deadline=float("inf"), in_seconds=True)
        assert answer.decisions == tuple(made) and answer.bound > 0
        for decisions in (far, made):
            assert answer.bound <= simulate(free, decisions, events=False).step_s * (1 + 1e-9)


@settings(max_examples=30, **QUIET)
@given(limited_problems(most_blocks=5))
def test_what_a_plan_wastes_is_above_the_bound(limited: Problem):
    program = Program(limited)
    program.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
    relaxed = relax(program, deadline=float("inf"))
    if relaxed is None:
        return
    search = Search(Replays(limited), deadline=float("inf"))
    rows = any_rows(search.replays, 512)
    rows = rows[search.fitting(rows)]
    table = wasted_seconds(limited, relaxed.wasted_s, search.replays.settings)
    wasted_s = table[np.arange(rows.shape[1]), rows].sum(axis=1)
    assert (search.replays.seconds(rows) * (1 + 1e-6) >= relaxed.bound_s + wasted_s * (1 - 1e-4)).all()
    proven_s = branch(program, branches=10, deadline=float("inf")).bound_s
    assert not proven_s or relaxed.bound_s <= proven_s * (1 + 1e-4), "0 where so few branches prove nothing"


@pytest.mark.slow
@settings(max_examples=20, **QUIET)
@given(limited_problems(most_blocks=6))
def test_walks_know_what_their_assignments_take(limited: Problem):
    replays, random = Replays(limited), np.random.default_rng(0)
    terms = terms_of(replays)
    count, prices = 32, Prices(degrees=1.0, memory=1.0, lateness=np.zeros(32))
    walks = Walks(terms, at_distances(replays, terms, any_rows(replays, 4)), 0, 10.0, count)
    for _ in range(3):
        for _ in range(20):
            walks.change(HEAT, prices, random)
        walks.mate(prices, random)
        walks.follow_the_best()
    steps = walks.assignments.step()
    for row, step_s, use in zip(walks.rows.T - replays.first, steps, walks.takes.use, strict=True):
        assert step_s == pytest.approx(simulate(limited, replays.decisions(row), events=False).step_s, rel=1e-5)
        assert limited.fixed_bytes + use.max() >= replays.device_use(row).max()


@settings(max_examples=15, **QUIET)
@given(limited_problems(most_blocks=3))
def test_plans_of_up_to_three_blocks_are_the_best_there_are(limited: Problem):
    """Over all decisions, kept or gathered again, and all prefetch distances; none is below the bound."""
    replays = Replays(limited)
    rows = np.array(list(itertools.product(*(range(len(of_block)) for of_block in replays.settings))))
    rows = np.concatenate(
        [
            part[Search(replays, deadline=float("inf")).fitting(part)]
            for part in np.array_split(rows, 1 + len(rows) // 4096)
        ]
    )
    if not len(rows):
        with pytest.raises(InfeasiblePlanError):
            solve(limited)
        return
    seconds = replays.seconds(rows)
    best = int(np.argmin(seconds))
    replayed = simulate(limited, replays.decisions(rows[best]), events=False)
    assert replayed.step_s == pytest.approx(seconds[best]) and fits(limited, replayed)
    plan = solve(limited, time_limit_s=5.0)
    assert seconds[best] * (1 - 1e-9) <= plan.step_s <= 1.01 * seconds[best]
    assert plan.lower_bound_s <= seconds[best] * (1 + 1e-6)
    assert plan.step_s * (1 - plan.gap) <= seconds[best] * (1 + 1e-6)


def test_keeping_is_a_choice_only_where_it_saves_a_gather_or_a_fetch():
    def kept(**changes: int) -> list[tuple[Params, Optimizer]]:
        of = problem([cost(**changes)], machine=replace(MACHINE, net_bytes_per_s=1.0), num_ranks=2)
        return [(p.params, p.optimizer) for p in place_choices(of, 0) if p.keeps_fetched]

    assert {params for params, _ in kept()} == {Params.HOST}
    assert {params for params, _ in kept(gathered_bytes=40, gathered_again_bytes=40)} == {Params.HOST, Params.DEVICE}
    assert {params for params, _ in kept(gathered_bytes=40)} == {Params.HOST}
    never = problem([cost(gathered_bytes=40, gathered_again_bytes=40)], num_ranks=2, allow_keeping_fetched=False)
    assert not any(choice.keeps_fetched for choice in choices(replace(never, num_ranks=2), 0))
