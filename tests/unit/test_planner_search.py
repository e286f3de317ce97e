"""The search against the simulator: replays of arrays, walks, and what annealing finds."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from autohete_fx.ir import BlockDecision, Overlap, Params, Problem, Schedule
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.bound.relaxation import relax
from autohete_fx.planner.model.choices import (
    MAX_PREFETCH_DISTANCE,
)
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.search.anneal import HEAT, WALKS, anneal, at_distances, terms_of
from autohete_fx.planner.search.arrays import Assignments
from autohete_fx.planner.search.improve import Search
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.search.rounding import wasted_seconds
from autohete_fx.planner.search.walks import Prices, Walks
from tests.planner_problems import QUIET, cost, problem, problems


@settings(max_examples=50, **QUIET)
@given(problems(most_blocks=6, budgets=False) | problems(most_blocks=6, budgets=False, early=True))
def test_replays_of_arrays_are_those_of_the_simulator(free: Problem):
    replays = Replays(free)
    random = np.random.default_rng(0)
    rows = np.array([[random.integers(len(of_block)) for of_block in replays.settings] for _ in range(8)])
    for row, seconds, copied_s in zip(rows, replays.seconds(rows), replays.copied_seconds(rows), strict=True):
        decisions = replays.decisions(row)
        assert np.array_equal(replays.row(decisions), row)
        replayed = simulate(free, decisions, events=False)
        assert seconds == pytest.approx(replayed.step_s, rel=1e-9)
        assert copied_s == pytest.approx(sum(t.busy_s for t in replayed.busy_s if t.lane.value in ("h2d", "d2h")))
        assert replays.device_use(row).max() == replayed.peak_bytes
        assert tuple(replays.use_elsewhere(row)) == (replayed.host_bytes, replayed.disk_bytes)


@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("priority", [True, False])
@pytest.mark.parametrize("training, micro_batches", [(True, 1), (True, 3), (False, 1)])
def test_every_schedule_is_replayed_as_by_the_simulator(
    overlap: Overlap, priority: bool, training: bool, micro_batches: int
):
    """With all that a plan may move: states in two places, of parameters at home, whose copies do not all wait for updates."""
    copied = 1 if training else 10  # enough to delay what inference does
    blocks = [cost(trained=(2, 3), param_bytes=copied * (10 + 3 * i)) for i in range(10)]
    free = problem(
        [replace(each, forward_s=1.0 + i % 3) for i, each in enumerate(blocks)],
        schedule=Schedule(overlap=overlap, priority=priority),
        training=training,
        micro_batches=micro_batches,
        allow_streamed_optimizer=True,
        allow_moving_some_states=True,
    )
    replays, random = Replays(free), np.random.default_rng(0)
    rows = np.array([[random.integers(len(of_block)) for of_block in replays.settings] for _ in range(100)])
    replayed = [simulate(free, replays.decisions(row), events=False).step_s for row in rows]
    assert replays.seconds(rows) == pytest.approx(replayed, rel=1e-12)


def test_figures_of_layers_that_are_alike_but_for_their_workspaces_are_counted_once(monkeypatch: pytest.MonkeyPatch):
    counted: list[int] = []
    figures = Replays._figures
    monkeypatch.setattr(
        Replays, "_figures", lambda self, block, *how: counted.append(block) or figures(self, block, *how)
    )
    free = problem(
        [*(cost(backward_workspace_bytes=i, forward_workspace_bytes=i) for i in range(4)), cost(forward_s=2.0)]
    )
    replays, random = Replays(free), np.random.default_rng(0)
    assert counted == [0, 4]
    rows = np.array([[random.integers(len(of_block)) for of_block in replays.settings] for _ in range(100)])
    replayed = [simulate(free, replays.decisions(row), events=False) for row in rows]
    assert replays.seconds(rows) == pytest.approx([each.step_s for each in replayed], rel=1e-12)
    assert [replays.device_use(row).max() for row in rows] == [each.peak_bytes for each in replayed]


@pytest.mark.parametrize("overlap, priority", [(Overlap.STEP, True), (Overlap.STEP, False), (Overlap.BACKWARD, True)])
def test_lateness_is_when_blocks_of_the_forward_are_done(overlap: Overlap, priority: bool):
    """On average, and of assignments that copy nothing down there: those of others also wait for copies."""
    free = problem(
        [cost(forward_s=1.0 + i % 3, param_bytes=50 + 3 * i) for i in range(10)],
        schedule=Schedule(overlap=overlap, priority=priority),
    )
    replays, random = Replays(free), np.random.default_rng(0)
    lanes, count = replays.tables.lanes, 16
    quiet = [np.flatnonzero(lanes[0, 2, b, : len(of_block)] == 0) for b, of_block in enumerate(replays.settings)]
    rows = np.array([[random.choice(of_block) for of_block in quiet] for _ in range(count)])
    assignments = Assignments(replays.tables, count, [1, 2, 3, 4])
    assignments.fill(replays.numbers(rows))
    steps = assignments.step()
    for row, mean, step_s in zip(rows, assignments.lateness, steps, strict=True):
        replayed = simulate(free, replays.decisions(row), events=True)
        done = [event.end_s for event in replayed.events if event.label == "forward"]
        assert step_s == pytest.approx(replayed.step_s)
        # Both count from the end of the last backward on.
        backward_s = max(event.end_s for event in replayed.events if event.label in ("backward", "gradients"))
        assert mean + backward_s == pytest.approx(sum(done) / len(done), rel=1e-9)


@settings(max_examples=20, **QUIET)
@given(problems(most_blocks=6))
def test_walks_know_what_their_assignments_take(limited: Problem):
    """They add up what changes, a few blocks at a time, for as long as they walk."""
    replays, random = Replays(limited), np.random.default_rng(0)
    starts = np.array([[random.integers(len(of_block)) for of_block in replays.settings] for _ in range(4)])
    terms = terms_of(replays)
    count, prices = 32, Prices(degrees=1.0, memory=1.0, lateness=np.zeros(32))
    walks = Walks(terms, at_distances(replays, terms, starts), 0, 10.0, count)
    begun = walks.rows.copy()
    for _ in range(3):
        for _ in range(20):
            walks.change(HEAT, prices, random)
        walks.mate(prices, random)
        walks.follow_the_best()
    assert not limited.training or not np.array_equal(walks.rows, begun)
    again = Walks(terms, walks.rows, 0, 0.0, count)
    assert walks.assignments.step() == pytest.approx(again.assignments.step(), rel=1e-5)
    for known, new in zip(walks.takes, again.takes, strict=True):
        assert known == pytest.approx(new, rel=1e-6, abs=1e-9)
    for row, step_s, use in zip(walks.rows.T - replays.first, again.assignments.step(), walks.takes.use, strict=True):
        assert step_s == pytest.approx(simulate(limited, replays.decisions(row), events=False).step_s, rel=1e-5)
        assert limited.fixed_bytes + use.max() >= replays.device_use(row).max()


@pytest.mark.slow
@settings(max_examples=30, **QUIET)
@given(problems(least_blocks=2, most_blocks=5))
def test_annealing_keeps_the_budgets_and_scores_no_worse(limited: Problem):
    search = Search(Replays(limited), deadline=float("inf"))
    random = np.random.default_rng(0)
    rows = np.array([[random.integers(len(of_block)) for of_block in search.replays.settings] for _ in range(64)])
    starts = rows[search.fitting(rows)]
    if not len(starts):
        return
    terms = terms_of(search.replays)
    found = anneal(search, terms, starts, work=50_000)
    assert search.fitting(found).all() and search.score(found)[0] <= search.score(starts).min()
    assert np.array_equal(anneal(search, terms, starts, work=50_000), found)
    search.deadline = 0.0
    stopped = anneal(search, terms, starts, work=50_000)
    assert search.score(stopped)[0] <= search.score(starts).min()


@pytest.mark.parametrize("seconds_a_look, cools", [(0.0, "with its work"), (0.02, "with the clock")])
def test_walks_are_cold_when_they_end(seconds_a_look: float, cools: str, monkeypatch: pytest.MonkeyPatch):
    """Whether their work is done or their time is over, and with their work alone where that is in time."""
    search = Search(Replays(problem([cost()] * 6)), deadline=1.0)
    asked, heats, change = itertools.count(), [], Walks.change

    def noted(walks: Walks, heat: Any, prices: Prices, random: np.random.Generator) -> None:
        heats.append(prices.degrees / walks.best_score)
        change(walks, heat, prices, random)

    monkeypatch.setattr("time.monotonic", lambda: seconds_a_look * next(asked))
    monkeypatch.setattr(Walks, "change", noted)
    rounds = 600
    anneal(search, terms_of(search.replays), np.zeros((1, 6), dtype=np.int64), work=rounds * WALKS * 6)
    assert heats[0] > 100 * HEAT.coldest and heats[-1] < 2 * HEAT.coldest
    done = len(heats) + len(heats) // (HEAT.mating - 1)
    assert abs(done - rounds) < HEAT.mating if cools == "with its work" else done < rounds * 0.9


@settings(max_examples=30, **QUIET)
@given(problems(most_blocks=5))
def test_what_a_plan_wastes_is_above_the_bound(limited: Problem):
    """Reduced costs of all that an assignment chooses, added up: what annealing charges is no guess."""
    program = Program(limited)
    program.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
    relaxed = relax(program, deadline=float("inf"))
    if relaxed is None:
        return
    search, random = Search(Replays(limited), deadline=float("inf")), np.random.default_rng(0)
    rows = np.array([[random.integers(len(of_block)) for of_block in search.replays.settings] for _ in range(512)])
    rows = rows[search.fitting(rows)]
    table = wasted_seconds(limited, relaxed.wasted_s, search.replays.settings)
    wasted_s = table[np.arange(rows.shape[1]), rows].sum(axis=1)
    assert (search.replays.seconds(rows) * (1 + 1e-6) >= relaxed.bound_s + wasted_s * (1 - 1e-4)).all()
    assert not len(rows) or table.max() == 0 or wasted_s.max() > 0


@pytest.mark.parametrize("held", [1, 2, 3])
def test_a_program_has_the_memory_of_one_distance(held: int):
    """All blocks fetch: a budget that just holds what is copied two blocks ahead is too small for three."""
    free = problem([cost(offloadable=())] * 6, allow_recompute=False, allow_host_optimizer=False)
    fetches = BlockDecision(params=Params.HOST, prefetch_distance=2)
    peak = simulate(free, [fetches] * 6, events=False).peak_bytes
    pinned = replace(free, fixed_decisions=(replace(fetches, prefetch_distance=1),) * 6, device_budget_bytes=peak)
    program = Program(pinned, held=held)
    program.minimize_step(ahead=held)
    assert (relax(program, deadline=float("inf")) is not None) == (held <= 2)
