"""Updates on the device of parameters at home: their kernels have the link, and copies of other updates stand still meanwhile."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete_fx.ir import BlockDecision, Lane, Optimizer, Overlap, Params, Problem, Schedule
from autohete_fx.planner.model.figures import device_update_s, over_link_s
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.simulation import Event, Simulation
from autohete_fx.planner.search.replays import Replays
from tests.planner_problems import MACHINE, QUIET, cost, judged, problem, updated_anywhere

AT_HOME, ON_HOST = BlockDecision(params=Params.HOST), BlockDecision(optimizer=Optimizer.HOST)
STREAMED = BlockDecision(optimizer=Optimizer.STREAMED)
LINK_S = 400 / 100 + 400 / 50


def given_problem(overlap: Overlap, priority: bool = True) -> Problem:
    """Two small blocks, and one of 400 bytes."""
    machine = dataclasses.replace(MACHINE, d2h_bytes_per_s=50.0, device_update_params_per_s=10.0)
    return problem(
        [cost(), cost(num_params=25), cost(param_bytes=400)],
        machine=machine,
        schedule=Schedule(overlap=overlap, priority=priority),
        allow_streamed_optimizer=True,
    )


def first(replayed: Simulation, lane: Lane, label: str) -> Event:
    return min((e for e in replayed.events if (e.lane, e.label) == (lane, label)), key=lambda e: e.start_s)


def test_what_is_updated_at_home_takes_the_link_both_ways():
    free = given_problem(Overlap.STEP)
    assert over_link_s(free, 2, AT_HOME) == pytest.approx(LINK_S)
    assert device_update_s(free, 2, AT_HOME, Optimizer.DEVICE) == pytest.approx(0.5)
    on_device, on_host = (dataclasses.replace(each, params=Params.HOST) for each in (STREAMED, ON_HOST))
    for decision in (BlockDecision(), on_device, on_host, STREAMED):
        assert over_link_s(free, 2, decision) == 0.0
    frozen = problem([cost(num_params=0, grad_bytes=0, optimizer_bytes=0)])
    assert over_link_s(frozen, 0, AT_HOME) == 0.0


@pytest.mark.parametrize("overlap", [Overlap.STEP, Overlap.BACKWARD])
def test_states_go_neither_way_meanwhile(overlap: Overlap):
    free = given_problem(overlap)
    made = [STREAMED, BlockDecision(), AT_HOME]
    replayed = simulate(free, made)
    update = first(replayed, Lane.COMPUTE, "update")
    assert first(replayed, Lane.D2H, "states").start_s >= update.start_s + LINK_S
    assert first(replayed, Lane.H2D, "states").start_s >= update.start_s + LINK_S


@pytest.mark.parametrize("priority", [True, False])
def test_uploads_of_updates_wait_and_the_host_updates_on(priority: bool):
    """The second block's update on the host takes 2.5 s, from backward on."""
    free = given_problem(Overlap.BACKWARD, priority)
    replayed = simulate(free, [BlockDecision(), ON_HOST, AT_HOME])
    on_host, on_device = (first(replayed, lane, "update") for lane in (Lane.UPDATE, Lane.COMPUTE))
    upload = first(replayed, Lane.H2D, "upload")
    assert on_host.end_s < on_device.start_s + LINK_S == pytest.approx(upload.start_s)


@pytest.mark.slow
@settings(max_examples=80, **QUIET)
@given(updated_anywhere(), st.integers(0, 2**32 - 1))
def test_the_search_replays_them_and_the_bound_knows_no_more(free: Problem, seed: int):
    """Whatever else blocks do, as long as one is updated at home."""
    replays, random = Replays(free), np.random.default_rng(seed)
    rows = np.array([[random.integers(len(of_block)) for of_block in replays.settings] for _ in range(12)])
    at = int(random.integers(len(free.costs)))
    rows[:, at] = [i for i, s in enumerate(replays.settings[at]) if over_link_s(free, at, s)][:1] or rows[:, at]
    judged(replays, rows, bounded=2)
