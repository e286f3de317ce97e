"""The table of work, and seconds by it, against the simulator, which is written apart."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings

from autohete_fx.ir import Lane, Problem
from autohete_fx.planner.model.choices import choices
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.work import (
    BACKWARD_PASS,
    FIRST_FORWARD_PASS,
    FORWARD_PASS,
    UPDATES_PASS,
    Pass,
    Work,
    added_up,
    durations,
    slots_of,
)
from tests.planner_problems import QUIET, cost, problem, problems, sharded


def test_the_table_lists_together_what_is_added_up():
    keys = [(works[0].in_pass, works[0].lane, works[0].turn.name in ("REDUCE", "AFTER")) for works in added_up(Work)]
    assert len(keys) == len(set(keys)) and [work.index for work in Work] == list(range(len(Work)))


@settings(max_examples=60, **QUIET)
@given(problems(most_blocks=4, budgets=False) | sharded(problems(most_blocks=4, budgets=False), budgets=False))
def test_lanes_of_the_simulator_are_busy_for_what_the_table_says(free: Problem):
    """Every second that a lane works in a replay is in the table under that lane, with the label of its event, and no other is."""
    random = np.random.default_rng(0)
    options = [choices(free, block) for block in range(len(free.costs))]
    made = [of_block[random.integers(len(of_block))] for of_block in options]
    replayed = simulate(free, made)
    passes = free.micro_batches if free.training else 1
    expected: dict[Lane, float] = defaultdict(float)
    for block, decision in enumerate(made):
        took = durations(free, block, decision)
        for work in Work:
            each = passes if work.in_pass in (Pass.FORWARD, Pass.BACKWARD) else 1
            expected[work.lane] += each * took[work]
    for lane_time in replayed.busy_s:
        if lane_time.lane is not Lane.DISK:  # which works within the update
            assert lane_time.busy_s == pytest.approx(expected[lane_time.lane], rel=1e-9, abs=1e-9), lane_time.lane
    labels = {(work.lane, label) for work in Work for label in work.label.split(", ")}
    assert {(event.lane, event.label) for event in replayed.events if event.lane is not Lane.DISK} <= labels


@pytest.mark.parametrize("kind", [FORWARD_PASS, FIRST_FORWARD_PASS, BACKWARD_PASS, UPDATES_PASS])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_slots_have_all_work_of_a_pass_once(kind, num_ranks: int):
    whole = {"gathered_bytes": 40, "gathered_again_bytes": 40, "reduced_bytes": 40}
    slots = slots_of(problem([cost(**whole)], num_ranks=num_ranks), 0, kind)
    listed = [work for name in slots.__slots__ for work in getattr(slots, name)]
    collectives = {Work.GATHER, Work.GATHER_ONCE, Work.GATHER_AGAIN, Work.REDUCE} if num_ranks == 1 else set()
    assert len(listed) == len(set(listed)) and set(listed) == set(kind.works) - collectives
