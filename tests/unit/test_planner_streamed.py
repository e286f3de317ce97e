"""Streamed states on their way home: the forward that waits for updates waits for it, and what leaves the device comes after."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete_fx.ir import Activations, BlockDecision, Lane, Optimizer, Overlap, Params, Problem, Schedule
from autohete_fx.planner.bound.relaxation import relax
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.simulation import Event, Simulation
from autohete_fx.planner.search.replays import Replays
from tests.planner_problems import MACHINE, QUIET, cost, judged, problem, program_of, updated_anywhere

STREAMED = BlockDecision(optimizer=Optimizer.STREAMED)
OVERLAPS = [Overlap.STEP, Overlap.BACKWARD]


def events(replayed: Simulation, lane: Lane, label: str) -> list[Event]:
    return sorted(
        (e for e in replayed.events if (e.lane, e.label) == (lane, label)), key=lambda e: (e.block, e.start_s)
    )


def streaming(d2h_bytes_per_s: float, overlap: Overlap, *, num_ranks: int = 1) -> Problem:
    """Four blocks of 40 bytes of states."""
    machine = dataclasses.replace(
        MACHINE,
        h2d_bytes_per_s=1e3,
        d2h_bytes_per_s=d2h_bytes_per_s,
        device_update_params_per_s=1e9,
        net_bytes_per_s=1e9,
    )
    whole = {"gathered_bytes": 40, "gathered_again_bytes": 40, "reduced_bytes": 40} if num_ranks > 1 else {}
    return problem(
        [cost(**whole)] * 4,
        machine=machine,
        schedule=Schedule(overlap=overlap),
        allow_streamed_optimizer=True,
        num_ranks=num_ranks,
    )


@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_forward_waits_until_its_states_are_home(overlap: Overlap, num_ranks: int):
    """At 10 bytes a second the states of a block take 4 s, and its forward 1 s. Slots are as slow as what empties them."""
    replayed = simulate(streaming(10.0, overlap, num_ranks=num_ranks), [STREAMED] * 4)
    home, forwards = events(replayed, Lane.D2H, "states"), events(replayed, Lane.COMPUTE, "forward")
    began = home[0].start_s
    assert [e.end_s - began for e in home] == pytest.approx([4.0, 8.0, 12.0, 16.0])
    ahead = num_ranks > 1  # a gather is issued a block ahead, and reads what is updated
    for block, forward in enumerate(forwards):
        assert forward.start_s >= home[min(3, block + ahead)].end_s - 1e-9
    assert replayed.step_s == pytest.approx(8.0 + 16.0 + 1.0 + ahead, rel=1e-3)


@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("distance", [1, 2])
def test_the_last_slot_of_states_goes_home_when_all_are_up(overlap: Overlap, num_ranks: int, distance: int):
    """They go up and home at 10 bytes a second. A block has 5 bytes of staging, and a slot is a third of all."""
    given_problem = streaming(10.0, overlap, num_ranks=num_ranks)
    machine = dataclasses.replace(given_problem.machine, h2d_bytes_per_s=10.0)
    given_problem = dataclasses.replace(given_problem, machine=machine)
    streamed = dataclasses.replace(STREAMED, prefetch_distance=distance)
    replayed = simulate(given_problem, [streamed] * 4)
    up, home = events(replayed, Lane.H2D, "states"), events(replayed, Lane.D2H, "states")
    slot_s = 4 * 5 / 3 / 10.0
    assert [e.end_s - up[0].start_s for e in home] == pytest.approx([4 + slot_s, 8 + slot_s, 12 + slot_s, 16 + slot_s])
    assert [e.end_s - e.start_s for e in home] == pytest.approx([4.0] * 4)
    for copied, block in zip(home, events(replayed, Lane.COMPUTE, "forward"), strict=True):
        assert block.start_s >= copied.end_s - 1e-9
    replays = Replays(given_problem)
    assert replays.seconds(replays.row([streamed] * 4)[None]) == pytest.approx(replayed.step_s, rel=1e-9)


@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
def test_activations_leave_when_all_states_are_home(overlap: Overlap):
    """Those of the first block are waited for a block later, which then waits for the states of all."""
    leaving = BlockDecision(activations=Activations.OFFLOAD)
    given_problem = streaming(50.0, overlap)
    replayed = simulate(given_problem, [leaving, *[dataclasses.replace(STREAMED, prefetch_distance=3)] * 3])
    alone = simulate(given_problem, [leaving, *[BlockDecision()] * 3])
    home, offload = events(replayed, Lane.D2H, "states"), events(replayed, Lane.D2H, "offload")
    assert offload[0].start_s == pytest.approx(max(e.end_s for e in home))
    assert offload[0].start_s > events(replayed, Lane.COMPUTE, "forward")[0].end_s
    assert replayed.step_s >= alone.step_s + 0.3


def test_states_go_home_while_an_upload_is_waited_for():
    """The first block's update on the host ends late. The states of others need no part of it, and go home one after another."""
    given_problem = streaming(40.0, Overlap.BACKWARD)
    machine = dataclasses.replace(given_problem.machine, h2d_bytes_per_s=40.0, host_update_params_per_s=1.0)
    given_problem = dataclasses.replace(given_problem, machine=machine)
    made = [BlockDecision(optimizer=Optimizer.HOST), *[STREAMED] * 3]
    replayed = simulate(given_problem, made)
    home, uploads = events(replayed, Lane.D2H, "states"), events(replayed, Lane.H2D, "upload")
    slot_s, began = 3 * 5 / 3 / 40.0, events(replayed, Lane.H2D, "states")[0].start_s
    assert [e.end_s - began for e in home] == pytest.approx([1 + slot_s, 2 + slot_s, 3 + slot_s])
    assert uploads[0].end_s > home[-1].end_s + 1.0
    replays = Replays(given_problem)
    assert replays.seconds(replays.row(made)[None]) == pytest.approx(replayed.step_s, rel=1e-9)


@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
@pytest.mark.parametrize("distance", [1, 4])
def test_forwards_that_take_longer_than_states_hide_all_but_the_first(overlap: Overlap, distance: int):
    """States take 0.9 s either way, a forward 1 s: only the first block's come, and their last slot goes home, before it."""
    given_problem = streaming(40 / 0.9, overlap)
    machine = dataclasses.replace(given_problem.machine, h2d_bytes_per_s=40 / 0.9)
    costs, labels = given_problem.costs * 4, tuple(f"layers.{i}" for i in range(16))
    given_problem = dataclasses.replace(given_problem, machine=machine, costs=costs, labels=labels)
    made = [dataclasses.replace(STREAMED, prefetch_distance=distance)] * 16
    assert simulate(given_problem, made).step_s == pytest.approx(16 * 3 + 0.9 + 0.9 * min(1, 16 * 5 / 3 / 40), rel=1e-3)


def test_updates_by_themselves_take_their_turns_as_before():
    replayed = simulate(streaming(10.0, Overlap.NONE), [STREAMED] * 4)
    updates, home = events(replayed, Lane.COMPUTE, "update"), events(replayed, Lane.D2H, "states")
    assert all(down.start_s >= update.end_s for update, down in zip(updates, home, strict=True))


@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("distance", [1, 4])
def test_a_block_that_copies_nothing_down_waits_for_its_own_states_alone(
    overlap: Overlap, num_ranks: int, distance: int
):
    """The first blocks of many run on while states of the last are on their way, whoever counts."""
    given_problem = streaming(100.0, overlap, num_ranks=num_ranks)
    given_problem = dataclasses.replace(
        given_problem, costs=given_problem.costs * 4, labels=tuple(f"layers.{i}" for i in range(16))
    )
    streamed = dataclasses.replace(STREAMED, prefetch_distance=distance)
    leaving = BlockDecision(activations=Activations.OFFLOAD, prefetch_distance=distance)
    replays = Replays(given_problem)
    for made in ([BlockDecision()] * 8 + [streamed] * 8, [leaving, *[BlockDecision()] * 7, *[streamed] * 8]):
        step_s = simulate(given_problem, made, events=False).step_s
        assert replays.seconds(replays.row(made)[None]) == pytest.approx(step_s, rel=1e-9)
        answer = program_of(given_problem, made).solve(limit_s=10, deadline=float("inf"), in_seconds=True)
        assert 0.9 * step_s < answer.bound <= step_s * (1 + 1e-9)
    assert step_s > 3 * 16 + 0.5 * (distance == 1), "the first one's activations do not leave late"


@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
def test_the_program_that_decides_has_copies_down_wait_until_states_are_home(overlap: Overlap):
    """The one that bounds does not say of a block without copies down that it waits for none."""
    given_problem = streaming(20.0, overlap)
    given_problem = dataclasses.replace(
        given_problem, costs=given_problem.costs * 4, labels=tuple(f"layers.{i}" for i in range(16))
    )
    leaving = BlockDecision(activations=Activations.OFFLOAD)
    made = [*[leaving] * 8, *[STREAMED] * 8]
    far = [dataclasses.replace(decision, prefetch_distance=2) for decision in made]
    step_s = simulate(given_problem, far, events=False).step_s
    bounds = []
    for program in (program_of(given_problem, made), program_of(given_problem, made, held=2)):
        relaxed = relax(program, deadline=float("inf"))
        assert relaxed is not None
        bounds.append(relaxed.bound_s)
    assert bounds[0] < 0.95 * step_s and bounds[1] == pytest.approx(step_s, rel=0.01)


@pytest.mark.slow
@settings(max_examples=60, **QUIET)
@given(updated_anywhere(), st.integers(0, 2**32 - 1))
def test_the_search_replays_them_and_the_bound_knows_no_more(free: Problem, seed: int):
    """Whatever blocks do besides, whichever way the link is slower, beside updates on the host whose parameters stay there."""
    replays, random = Replays(free), np.random.default_rng(seed)
    rows = []
    for of_block in replays.settings:
        wanted = [i for i, s in enumerate(of_block) if s.streams or (s.updates_on_host and s.params is Params.HOST)]
        rows.append(random.choice(wanted or len(of_block), size=6))
    for replayed in judged(replays, np.array(rows).T, bounded=2):
        for lane in (Lane.COMPUTE, Lane.D2H, Lane.NET):
            in_turn = sorted((e.start_s, e.end_s) for e in replayed.events if e.lane is lane)
            assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(in_turn)), lane
            assert all(end <= replayed.step_s + 1e-9 for _, end in in_turn), lane


@pytest.mark.parametrize("last", [BlockDecision(), BlockDecision(optimizer=Optimizer.HOST)])
def test_states_do_not_wait_for_an_update_at_home(last: BlockDecision):
    """The first block's update takes 10 s, and nothing of it goes up. The second's states take 4 s each way meanwhile."""
    given_problem = problem(
        [cost(num_params=100), cost(optimizer_bytes=400), cost(num_params=10)],
        schedule=Schedule(overlap=Overlap.NONE),
        allow_streamed_optimizer=True,
    )
    at_home, replays = BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST), Replays(given_problem)
    (replayed,) = judged(replays, replays.row([at_home, STREAMED, last])[None], bounded=1)
    assert events(replayed, Lane.D2H, "states")[0].end_s < events(replayed, Lane.UPDATE, "update")[0].end_s
