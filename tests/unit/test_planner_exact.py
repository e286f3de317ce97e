"""Plans against exhaustive search, on random problems: within 1% of the best over all decisions and prefetch distances.

Up to two blocks the search is plain: every combination, replayed by the simulator. For more there are too many, but it
need only be shown that none is faster than the plan by more than 1%: combinations are built block by block, and those are
dropped that break the budget already, or whose time without any prefetch distance to keep is that long already.
"""

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Overlap, Plan, Problem
from autohete_fx.planner.baselines import fits
from autohete_fx.planner.bound.formulation import RELATIVE_GAP, Program
from autohete_fx.planner.bound.relaxation import branch, relax
from autohete_fx.planner.model.choices import (
    MAX_PREFETCH_DISTANCE,
    activation_choices,
    choices,
    copies,
    joined,
    place_choices,
)
from autohete_fx.planner.model.device_use import device_bytes
from autohete_fx.planner.model.figures import disk_bytes, host_bytes, overlap_of, sends_at_once
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.work import (
    BACKWARD_PASS,
    BY_DEVICE,
    FORWARD_PASS,
    SENT,
    PassKind,
    Turn,
    Work,
    copies_of_updated,
    durations,
    updating_pass,
)
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.solve import OPTIMAL_GAP, solve
from tests.planner_problems import QUIET, problems, program_of


def at_all_distances(given_problem: Problem, block: int) -> list[BlockDecision]:
    farthest = max(1, min(MAX_PREFETCH_DISTANCE, len(given_problem.costs) - 1))
    return [
        replace(choice, prefetch_distance=distance)
        for choice in choices(given_problem, block)
        for distance in (range(1, farthest + 1) if copies(choice) else (1,))
    ]


@pytest.mark.slow
@settings(max_examples=25, **QUIET)
@given(
    problems(most_blocks=5, budgets=False) | problems(most_blocks=5, budgets=False, early=True), st.floats(0.5, 0.95)
)
def test_branching_proves_more_than_the_relaxation_and_no_more_than_is_true(free: Problem, share: float):
    plain = simulate(free, [BlockDecision()] * len(free.costs), events=False).peak_bytes
    program = Program(replace(free, device_budget_bytes=int(share * plain)))
    program.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
    best = program.solve(limit_s=20, deadline=float("inf"), in_seconds=True)
    if best.decisions is None:
        return
    relaxed = relax(program, deadline=float("inf"))
    of_first, of_all = (
        branch(program, branches=1000, deadline=time.monotonic() + 20, blocks=blocks).bound_s for blocks in ([0], None)
    )
    assert relaxed is not None and relaxed.bound_s * (1 - 1e-5) <= of_first <= of_all * (1 + 2e-5)
    assert not best.exhausted or of_all <= best.bound / (1 - RELATIVE_GAP)


@settings(max_examples=40, **QUIET)
@given(problems(most_blocks=4, budgets=False))
def test_activations_and_places_add_up(free: Problem):
    """What the integer program relies on, which has no variable for a pair of them."""

    def takes(block: int, decision: BlockDecision) -> NDArray[np.float64]:
        bytes_elsewhere = host_bytes(free, block, decision), disk_bytes(free, block, decision)
        return np.array(
            [*durations(free, block, decision).seconds, *device_bytes(free, [block], [decision])[0], *bytes_elsewhere]
        )

    for block in range(len(free.costs)):
        kept, *treated = activation_choices(free, block)
        first, *placed = place_choices(free, block)
        for activations, place in itertools.product(treated, placed):
            apart = takes(block, joined(activations, first)) - takes(block, first) + takes(block, place)
            assert takes(block, joined(activations, place)) == pytest.approx(apart, rel=1e-12, abs=1e-9)
        assert kept == BlockDecision() and joined(kept, first) == first


@settings(max_examples=40, **QUIET)
@given(problems(most_blocks=5, budgets=False, early=True) | problems(most_blocks=5, budgets=False))
def test_with_all_choices_made_the_program_bounds_the_simulator(free: Problem):
    """Whatever is chosen, at whatever distances: this is what its proof says."""
    random = np.random.default_rng(0)
    for _ in range(2):
        made = [
            options[random.integers(len(options))]
            for options in (at_all_distances(free, b) for b in range(len(free.costs)))
        ]
        answer = program_of(free, made).solve(limit_s=10, deadline=float("inf"), in_seconds=True)
        step_s = simulate(free, made, events=False).step_s
        assert answer.decisions is not None and 0 < answer.bound <= step_s * (1 + 1e-9)


@pytest.mark.slow
@settings(max_examples=20, **QUIET)
@given(problems(most_blocks=2) | problems(most_blocks=2, early=True))
def test_up_to_two_blocks(limited: Problem):
    everything = itertools.product(*(at_all_distances(limited, block) for block in range(len(limited.costs))))
    replays = [simulate(limited, decisions, events=False) for decisions in everything]
    fitting = [replayed.step_s for replayed in replays if fits(limited, replayed)]
    if not fitting:
        with pytest.raises(InfeasiblePlanError):
            solve(limited)
        return
    plan = solve(limited)
    assert min(fitting) - 1e-9 <= plan.step_s <= 1.01 * min(fitting)
    assert plan.lower_bound_s <= min(fitting) * (1 + 1e-6)
    assert nothing_is_faster(limited, min(fitting) * (1 - 1e-9))
    assert not nothing_is_faster(limited, min(fitting) * (1 + 1e-9))


@pytest.mark.slow
@settings(max_examples=25, **QUIET)
@given(problems(least_blocks=3, most_blocks=5))
def test_three_to_five_blocks(limited: Problem):
    check(limited)


@settings(max_examples=10, **QUIET)
@given(problems(least_blocks=4, most_blocks=4, early=True))
def test_four_blocks_whose_updates_start_in_backward(limited: Problem):
    check(limited)


@pytest.mark.slow
@settings(max_examples=20, **QUIET)
@given(problems(least_blocks=6, most_blocks=7))
def test_six_and_seven_blocks(limited: Problem):
    check(limited)


def check(limited: Problem) -> None:
    try:
        plan: Plan = solve(limited)
    except InfeasiblePlanError:
        assert nothing_is_faster(limited, float("inf"))
        return
    assert nothing_is_faster(limited, plan.step_s / 1.01)
    assert nothing_is_faster(limited, plan.lower_bound_s * (1 - 1e-6))
    assert (plan.status == "optimal") == (plan.gap <= OPTIMAL_GAP)


def nothing_is_faster(limited: Problem, threshold_s: float) -> bool:
    """Whether no assignment that keeps the budgets takes less than ``threshold_s``."""
    blocks = range(len(limited.costs))
    options = [choices(limited, block) for block in blocks]
    use = [device_bytes(limited, [block] * len(options[block]), options[block]) for block in blocks]
    host = [np.array([host_bytes(limited, block, option) for option in options[block]]) for block in blocks]
    rows, device_used, host_used = (
        np.zeros((1, 0), dtype=np.int64),
        np.full((1, use[0].shape[1]), limited.fixed_bytes),
        np.zeros(1),
    )
    for block in blocks:
        taken = np.repeat(np.arange(len(rows)), len(options[block]))
        option = np.tile(np.arange(len(options[block])), len(rows))
        rows = np.column_stack([rows[taken], option])
        device_used, host_used = device_used[taken] + use[block][option], host_used[taken] + host[block][option]
        least_device = device_used + sum(table.min(axis=0) for table in use[block + 1 :])
        least_host = host_used + sum(table.min() for table in host[block + 1 :])
        kept = within(limited, least_device.max(axis=1), least_host)
        if np.isfinite(threshold_s):
            kept[kept] = least_seconds(limited, rows[kept]) < threshold_s
        rows, device_used, host_used = rows[kept], device_used[kept], host_used[kept]
    if not np.isfinite(threshold_s):
        return not len(rows)
    replays = Replays(limited)
    return not any(
        (
            replays.seconds(every_distance(limited, replays, [options[b][k] for b, k in enumerate(row)])) < threshold_s
        ).any()
        for row in rows
    )


def within(limited: Problem, peak: NDArray, host: NDArray) -> NDArray[np.bool_]:
    device_limit = np.inf if limited.device_budget_bytes is None else limited.device_budget_bytes
    host_limit = np.inf if limited.host_budget_bytes is None else limited.host_budget_bytes
    return (peak <= device_limit) & (host <= host_limit)


def every_distance(limited: Problem, replays: Replays, decisions: list[BlockDecision]) -> NDArray[np.int64]:
    """Rows of these decisions at every combination of prefetch distances that keeps the budget."""
    distances = [range(1, replays.farthest + 1) if copies(decision) else (1,) for decision in decisions]
    start = [replays.index[block][decision] for block, decision in enumerate(decisions)]
    farther = np.meshgrid(*(np.arange(len(of_block)) for of_block in distances), indexing="ij")
    rows = np.array(start) + np.stack([grid.ravel() for grid in farther], axis=1)
    device_used = limited.fixed_bytes + np.sum([replays.use[b, column] for b, column in enumerate(rows.T)], axis=0)
    return rows[within(limited, device_used.max(axis=1), replays.use_elsewhere(rows)[0])]


def least_seconds(limited: Problem, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """What assignments that begin with these decisions take at least: every copy up is issued when its pass begins and
    waits for no update, no copy down is waited for before its pass ends, and blocks that are undecided take the least of
    each kind of work. What updates send at once only waits for its update or the step, and for the lane to have done as much."""
    decided, blocks = rows.shape[1], range(len(limited.costs))
    options = [choices(limited, block) for block in blocks]
    took = [[durations(limited, block, option) for option in options[block]] for block in blocks]

    def table(*works: Work) -> NDArray[np.float64]:
        of_block = [np.array([each.of(works) for each in took[b]]) for b in blocks]
        return np.array([s[rows[:, b]] if b < decided else np.full(len(rows), s.min()) for b, s in enumerate(of_block)])

    overlaps, on_cpu = overlap_of(limited), limited.machine.device_type == "cpu"
    early, at_once = overlaps is Overlap.BACKWARD, sends_at_once(limited)

    def up_of(kind: PassKind) -> tuple[Work, ...]:
        return kind.at(Turn.AHEAD, Turn.BEFORE, moves=True)

    def one_pass(kind: PassKind, begin: Any = 0.0, waits: Any = 0.0) -> tuple[Any, Any]:
        works, ups, downs = (table(*parts) for parts in (kind.computes, up_of(kind), kind.at(Turn.AFTER, moves=True)))
        waits = np.broadcast_to(waits, works.shape)
        order = list(blocks)[::-1] if kind.reverse else list(blocks)
        clock, up, down, landed = begin, begin, 0.0, np.zeros_like(works)
        for block in order:
            up = up + ups[block]
            clock = np.maximum(np.maximum(clock, up), waits[block]) + works[block]
            down = np.where(downs[block] > 0, np.maximum(down, clock) + downs[block], down)
            landed[block] = np.where(downs[block] > 0, down, clock)
        return np.maximum(clock, down), landed

    forward, _ = one_pass(FORWARD_PASS)
    if not limited.training:
        return forward
    backward, landed = one_pass(BACKWARD_PASS)
    device_end, host = backward + table(*BY_DEVICE).sum(axis=0), table(Work.HOST_UPDATE)
    begin = landed if early else np.broadcast_to(device_end if on_cpu else backward, landed.shape)
    updated = np.maximum.accumulate(begin + np.cumsum(host, axis=0), axis=0)
    waits = np.where(table(*copies_of_updated(limited)) > 0, updated, 0.0) if limited.schedule.priority else 0.0
    if at_once:
        uploads = table(Work.UPLOAD)
        own = np.where(uploads > 0, begin + host + uploads, 0.0)
        lane_begin = table(*up_of(BACKWARD_PASS)).sum(axis=0) if early else backward
        of_lane = lane_begin + np.cumsum(table(Work.FETCH, *SENT), axis=0)
        of_states = backward + np.cumsum(table(Work.STATES), axis=0)
        waits = np.maximum.reduce([np.broadcast_to(waits, own.shape), own, of_lane, of_states])
    last = np.where(host.sum(axis=0) > 0, begin.min(axis=0) + host.sum(axis=0), 0.0)
    joint, _ = one_pass(updating_pass(limited), device_end, waits)
    later = limited.micro_batches - 1
    total = np.maximum(joint, last) + later * (forward + backward)
    return total + forward if overlaps is Overlap.NONE else total
