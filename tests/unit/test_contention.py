"""Lanes that slow each other down: what a replay makes of them, and what it keeps to."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Activations, BlockDecision, Lane, Machine, Optimizer, Overlap, Params, Problem, Schedule
from autohete_fx.ir.machine import CONTENDING
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.model import simulate as judge
from autohete_fx.planner.model.choices import choices
from autohete_fx.planner.model.contention import Factors, Piece, Times, factors_of, settled
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.work import Work
from autohete_fx.planner.reasons import reasons_of
from autohete_fx.planner.search.lengthening import lengthening
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.solve import solve
from tests.planner_problems import MACHINE, QUIET, cost, problem, problems, program_of, sharded
from tests.unit.test_planner_collectives import AGAIN, RING, shared, times

PAIRS = [(lane.value, beside.value) for lane, beside in itertools.permutations(CONTENDING, 2)]
ON_HOST = BlockDecision(optimizer=Optimizer.HOST)


def slowed(machine: Machine, **pairs: float) -> Machine:
    """With pairs such as ``h2d_compute``, the first of which keeps so much beside the second."""
    return replace(machine, contention=tuple((*name.split("_"), kept) for name, kept in pairs.items()))


def quiet(of: Problem) -> Problem:
    """The same without contention."""
    return replace(of, machine=replace(of.machine, contention=()))


@st.composite
def contended(draw: st.DrawFn, budgets: bool = False) -> Problem:
    kept = st.floats(0.3, 1.0)
    pairs = draw(st.lists(st.sampled_from(PAIRS), unique=True, min_size=1, max_size=8))
    of = problems(most_blocks=4, budgets=False) | problems(most_blocks=4, budgets=False, early=True)
    free = draw(sharded(of, budgets=budgets))
    return replace(free, machine=replace(free.machine, contention=tuple((*pair, draw(kept)) for pair in pairs)))


def any_decisions(of: Problem) -> list[BlockDecision]:
    random = np.random.default_rng(0)
    options = [choices(of, block) for block in range(len(of.costs))]
    return [of_block[random.integers(len(of_block))] for of_block in options]


def test_a_piece_takes_its_seconds_divided_by_its_rate():
    host = [BlockDecision(params=Params.HOST)] * 2
    free = problem([cost(forward_s=1.0, param_bytes=60)] * 2, training=False)
    alone = simulate(free, host)
    assert times(alone, "fetch") == {0: (0.0, 0.6), 1: (0.6, 1.2)} and times(alone, "forward")[0] == (0.6, 1.6)
    # The second fetch runs beside the first forward, at half of its rate.
    beside = simulate(replace(free, machine=slowed(MACHINE, h2d_compute=0.5)), host)
    assert times(beside, "fetch")[1] == pytest.approx((0.6, 1.6 + 0.1), abs=1e-3)
    # The forward keeps three quarters of its rate while the fetch lasts.
    both = simulate(replace(free, machine=slowed(MACHINE, compute_h2d=0.75)), host)
    assert times(both, "forward")[0] == pytest.approx((0.6, 1.2 + (1 - 0.75 * 0.6)), abs=1e-3)
    assert alone.step_s < beside.step_s and alone.step_s < both.step_s


def test_factors_settle_where_each_replay_leads_away_from_the_next():
    """The later the copy begins, the longer the computation had taken, by twice as much: replays would have it last 1 s and 2 s by
    turns. It lasts 4/3 s, of which the last 2/3 s are beside the copy."""
    computed, copied = Piece(Lane.COMPUTE, "forward", 0, 0), Piece(Lane.H2D, "fetch", 1, 0)

    def replay(factors: Factors) -> list[Times]:
        takes = factors.get(computed, 1.0)
        begin = 2 * takes - 2
        return [(computed, 0.0, takes), (copied, begin, begin + 10.0)]

    factors = settled(slowed(MACHINE, compute_h2d=0.5), replay)
    assert factors[computed] == pytest.approx(4 / 3, abs=0.01) and factors[copied] == 1.0


@pytest.mark.parametrize("copied, expected", [((0.0, 5.0), 1.25), ((6.0, 99.0), 1.5)], ids=["before", "after"])
def test_an_interrupted_piece_is_done_when_its_parts_have_done_its_work(copied: tuple[float, float], expected: float):
    """10 s of an update, of which one of 1 s interrupts the first 5 s: a copy halves its rate before that, or after."""
    update, urgent, copy = (
        Piece(lane, lane, block, 0) for lane, block in [(Lane.UPDATE, 1), (Lane.UPDATE, 0), (Lane.D2H, 0)]
    )

    def replay(factors: Factors) -> list[Times]:
        return [
            (update, 6.0, 1.0 + 10 * factors.get(update, 1.0)),
            (urgent, 5.0, 6.0),
            (update, 0.0, 5.0),
            (copy, *copied),
        ]

    factors = settled(slowed(MACHINE, update_d2h=0.5), replay)
    assert factors == pytest.approx({update: expected, urgent: 1.0, copy: 1.0}, rel=1e-3)


def test_rates_beside_several_lanes_are_multiplied():
    """Net works beside computation all the time, and for a while beside a copy home as well."""
    machine = slowed(replace(RING, d2h_bytes_per_s=25.0), net_compute=0.5, net_d2h=0.4)
    offloads = BlockDecision(activations=Activations.OFFLOAD, num_offloaded=2)
    replayed = simulate(shared(3, machine=machine), [offloads] * 3)
    events = {lane: [(e.start_s, e.end_s) for e in replayed.events if e.lane is lane] for lane in Lane}
    gather = next(e for e in replayed.events if e.label == "gather" and e.block == 2)
    instants = np.linspace(gather.start_s, gather.end_s, 20_001)[:-1]

    def works(lane: Lane) -> Any:
        return np.any([(begin <= instants) & (instants < end) for begin, end in events[lane]], axis=0)

    rate = np.where(works(Lane.COMPUTE), 0.5, 1.0) * np.where(works(Lane.D2H), 0.4, 1.0)
    assert rate.min() == pytest.approx(0.2)
    assert rate.mean() * (gather.end_s - gather.start_s) == pytest.approx(0.5, rel=1e-2)


@pytest.mark.slow
@settings(max_examples=40, **QUIET)
@given(contended())
def test_factors_settle_and_nothing_becomes_faster(free: Problem):
    decisions = any_decisions(free)

    def replay(factors: Factors) -> Any:
        run = judge._Replay(free, decisions, False, factors)
        run.run()
        return run.lanes.times

    factors = settled(free.machine, replay)
    again = factors_of(free.machine, replay(factors), factors)
    assert all(again.get(piece, 1.0) == pytest.approx(factor, rel=1e-2) for piece, factor in factors.items())
    slower, alone = simulate(free, decisions), simulate(quiet(free), decisions)
    assert slower.step_s >= alone.step_s * (1 - 1e-9) and slower.peak_bytes == alone.peak_bytes
    for one, other in zip(slower.busy_s, alone.busy_s, strict=True):
        assert one.busy_s >= other.busy_s * (1 - 1e-9), one.lane


@settings(max_examples=8, **QUIET)
@given(contended(budgets=True))
def test_plans_count_contention_and_no_bound_is_above_a_plan(limited: Problem):
    try:
        plan, blind = (solve(each, time_limit_s=1.0, explains=False) for each in (limited, quiet(limited)))
    except InfeasiblePlanError:
        return
    replayed = simulate(limited, plan.decisions)
    assert plan.step_s == replayed.step_s and plan.lower_bound_s <= plan.step_s
    assert plan.lower_bound_s <= simulate(limited, blind.decisions).step_s * (1 + 1e-9)


@pytest.mark.slow
def test_a_gather_is_saved_where_it_slows_computation_down():
    hidden = shared(4, machine=replace(RING, net_bytes_per_s=60.0), device_budget_bytes=10_000)
    slow = replace(hidden, machine=slowed(hidden.machine, compute_net=0.5))
    plan = solve(slow)
    assert all(decision.keeps_fetched for decision in plan.decisions)
    assert plan.step_s < simulate(slow, [AGAIN] * 4).step_s - 0.5
    assert plan.reasons is not None and plan.reasons == reasons_of(slow, plan.decisions)
    others = [each.next_best for each in plan.reasons.blocks]
    assert all(other is None or other.step_s >= plan.step_s * (1 - 1e-6) for other in others)


def test_updates_on_the_host_and_copies_slow_each_other_down():
    """Block 0 is copied up while the host updates block 1, half a second after the last gradients are home."""
    free = problem([cost()] * 2, schedule=Schedule(overlap=Overlap.STEP))

    def after_backward(**pairs: float) -> tuple[dict[int, tuple[float, float]], ...]:
        replayed = simulate(replace(free, machine=slowed(MACHINE, **pairs)), [ON_HOST] * 2)
        ended = max(event.end_s for event in replayed.events if event.label == "gradients")
        found = (
            {block: (begin - ended, end - ended) for block, (begin, end) in times(replayed, label).items()}
            for label in ("update", "upload")
        )
        return tuple(found)

    near = functools.partial(pytest.approx, abs=1e-3)
    updates, uploads = after_backward()
    assert updates == {0: near((0.0, 0.5)), 1: near((0.5, 1.0))}
    assert uploads == {0: near((0.5, 0.7)), 1: near((1.0, 1.2))}
    # For as long as the upload takes, the update has half of its rate; and the upload, for as long as it is beside the update.
    updates, uploads = after_backward(update_h2d=0.5)
    assert updates == {0: near((0.0, 0.5)), 1: near((0.5, 1.1))}
    assert uploads == {0: near((0.5, 0.7)), 1: near((1.1, 1.3))}
    updates, uploads = after_backward(h2d_update=0.5)
    assert updates == {0: near((0.0, 0.5)), 1: near((0.5, 1.0))}
    assert uploads == {0: near((0.5, 0.9)), 1: near((1.0, 1.2))}
    updates, uploads = after_backward(update_h2d=0.5, h2d_update=0.5)
    assert updates == {0: near((0.0, 0.5)), 1: near((0.5, 1.2))}
    assert uploads == {0: near((0.5, 0.9)), 1: near((1.2, 1.4))}


def test_an_update_that_a_more_urgent_one_interrupts_is_slowed_down_in_both_parts():
    """Block 1's gradients come first, block 0's while it is updated, and both beside copies home that take as long."""
    costs = [cost(param_bytes=100, grad_bytes=100, num_params=5), cost(param_bytes=20, grad_bytes=20, num_params=60)]
    early = problem(costs, schedule=Schedule(overlap=Overlap.BACKWARD))
    alone, beside = (
        simulate(replace(early, machine=machine), [ON_HOST] * 2)
        for machine in (MACHINE, slowed(MACHINE, update_d2h=0.5))
    )
    first, urgent, rest = (e for e in alone.events if e.lane is Lane.UPDATE)
    assert [e.block for e in (first, urgent, rest)] == [1, 0, 1] and urgent.end_s - urgent.start_s == pytest.approx(0.5)
    (sent,) = (e for e in alone.events if e.label == "gradients" and e.block == 0)
    lost_s = (min(sent.end_s, first.end_s) - sent.start_s) / 2
    assert lost_s > 0.4
    last = max(e.end_s for e in beside.events if e.lane is Lane.UPDATE)
    assert last == pytest.approx(rest.end_s + lost_s, abs=1e-3)


def test_states_on_disk_are_no_way_around_contention():
    """An update whose states are on disk is never faster than one whose states are in RAM, and slower the slower the disk is. What
    it computes takes longer beside copies, and that may still be less than the disk takes."""
    on_disk = BlockDecision(optimizer=Optimizer.DISK)
    slow = slowed(MACHINE, update_h2d=0.5, update_d2h=0.5, h2d_update=0.5)
    for overlap in Overlap:
        free = problem([cost()] * 4, machine=slow, schedule=Schedule(overlap=overlap))
        in_ram = simulate(free, [ON_HOST] * 4).step_s
        rates = (40.0, 79.0, 80.0, 81.0, 160.0, 1e6)
        steps = [
            simulate(replace(free, machine=replace(slow, disk_bytes_per_s=rate)), [on_disk] * 4).step_s
            for rate in rates
        ]
        assert steps == pytest.approx(sorted(steps, reverse=True), rel=1e-3)
        assert steps[-1] == pytest.approx(in_ram, rel=1e-3) and steps[0] > 1.1 * in_ram
        assert abs(steps[1] - steps[3]) < 0.05 * steps[2], "a little more or less of a disk makes little difference"


def test_the_search_has_work_take_as_long_as_it_does_beside_other_work():
    """Replays with the factors of decisions take as long as the simulator says of them, and without these they do not."""
    slow = slowed(MACHINE, update_h2d=0.5, update_d2h=0.6, h2d_update=0.7, h2d_d2h=0.8, d2h_h2d=0.8)
    found = []
    for overlap in Overlap:
        free = problem([cost()] * 5, machine=slow, schedule=Schedule(overlap=overlap), allow_streamed_optimizer=True)
        decisions = [ON_HOST, BlockDecision(optimizer=Optimizer.STREAMED), BlockDecision(), ON_HOST, ON_HOST]
        replays = Replays(free)
        row, step_s = replays.row(decisions)[None], simulate(free, decisions).step_s
        factors = lengthening(free, [decisions])
        assert min(factors.values()) >= 1.0 and factors[Work.HOST_UPDATE] > 1.05
        assert replays.beside(factors).seconds(row)[0] == pytest.approx(step_s, rel=0.02)
        assert replays.seconds(row)[0] == pytest.approx(simulate(quiet(free), decisions).step_s)
        assert replays.beside({}).seconds(row)[0] == replays.seconds(row)[0]
        assert lengthening(quiet(free), [decisions]) == {}
        found.append(step_s / float(replays.seconds(row)[0]))
    assert max(found) > 1.03


@pytest.mark.parametrize("overlap", Overlap)
def test_what_is_learned_is_of_one_step(overlap: Overlap):
    """Not of the forward of the step before, from whose end on an overlapping step is counted."""
    free = problem([cost()] * 3, machine=slowed(MACHINE, update_compute=0.5), schedule=Schedule(overlap=overlap))
    pieces = judge.seconds_beside(free, [ON_HOST] * 3)
    computed = [alone for piece, alone, _ in pieces if piece.lane is Lane.COMPUTE]
    assert sum(computed) == pytest.approx(3 * (1.0 + 2.0))


def test_an_update_that_waits_for_its_disk_takes_no_longer_in_the_search_beside_copies():
    waiting = problem([cost()] * 2, machine=replace(MACHINE, disk_bytes_per_s=15.0))
    on_disk = BlockDecision(optimizer=Optimizer.DISK)
    replays = Replays(waiting, [[ON_HOST, on_disk]] * 2)
    slower = replays.beside({Work.HOST_UPDATE: 2.0})
    for decision, takes_longer in ((on_disk, False), (ON_HOST, True)):
        row = replays.row([decision] * 2)[None]
        assert (slower.seconds(row)[0] > replays.seconds(row)[0]) == takes_longer


@pytest.mark.slow
def test_fewer_updates_are_left_to_a_host_that_copies_slow_down():
    machine = replace(MACHINE, h2d_bytes_per_s=60.0, d2h_bytes_per_s=60.0)
    free = problem([cost(forward_s=0.2, backward_s=0.4)] * 3, machine=machine, allow_streamed_optimizer=True)
    peak = simulate(free, [BlockDecision()] * 3).peak_bytes
    limited = replace(free, device_budget_bytes=int(0.6 * peak))
    slow = replace(limited, machine=slowed(machine, update_h2d=0.25, update_d2h=0.25))
    plan, blind = (solve(each, time_limit_s=2.0, explains=False) for each in (slow, limited))
    on_host, more_on_host = (sum(d.updates_on_host for d in each.decisions) for each in (plan, blind))
    assert on_host < more_on_host
    assert plan.step_s < simulate(slow, blind.decisions).step_s - 0.3


@pytest.mark.slow
@settings(max_examples=40, **QUIET)
@given(contended(), st.integers(1, 3))
def test_the_program_bounds_every_replay_beside_other_work(free: Problem, distance: int):
    made = [replace(decision, prefetch_distance=distance) for decision in any_decisions(free)]
    answers = [
        program_of(each, made).solve(limit_s=10, deadline=float("inf"), in_seconds=True) for each in (quiet(free), free)
    ]
    assert answers[0].bound <= answers[1].bound * (1 + 1e-6)
    assert 0 < answers[1].bound <= simulate(free, made, events=False).step_s * (1 + 1e-6)


def test_the_program_is_the_same_in_whatever_order_sets_of_works_are():
    """Which differs from process to process: sums are rounded in groups of works that follow each other."""
    program = Program(problem([cost(forward_s=1 / 3, backward_s=2 / 7)] * 3, machine=slowed(MACHINE, h2d_compute=0.5)))
    for lane in CONTENDING:
        given, reversed_ = (str(program._work_of(lane, order)) for order in (list(Work), list(Work)[::-1]))
        assert given == reversed_


@pytest.mark.parametrize("overlap", Overlap)
def test_rates_of_next_to_nothing_are_bounded_too(overlap: Overlap):
    machine = slowed(MACHINE, **{f"{lane}_{beside}": 1e-4 for lane, beside in PAIRS})
    free = problem(
        [cost()] * 4,
        machine=machine,
        schedule=Schedule(overlap=overlap),
        allow_streamed_optimizer=True,
        micro_batches=2,
    )
    made = [ON_HOST, BlockDecision(optimizer=Optimizer.STREAMED), BlockDecision(), ON_HOST]
    answer = program_of(free, made).solve(limit_s=2, deadline=float("inf"), in_seconds=True)
    assert answer.bound <= simulate(free, made, events=False).step_s * (1 + 1e-6)


def test_where_work_may_take_longer_than_the_program_can_count_there_are_no_rows_of_contention():
    """Such as blocks that compute for nanoseconds and copy for seconds."""
    machine = slowed(MACHINE, **{f"{lane}_{beside}": 0.5 for lane, beside in PAIRS})
    for compute_s in (1e-7, 1e-9):
        free = problem([cost(forward_s=compute_s, backward_s=compute_s, recompute_s=compute_s)] * 24, machine=machine)
        made = [replace(ON_HOST, params=Params.HOST)] * 24
        answer = program_of(free, made).solve(limit_s=2, deadline=float("inf"), in_seconds=True)
        assert answer.bound <= simulate(free, made, events=False).step_s * (1 + 1e-6)


@pytest.mark.parametrize("overlap", Overlap)
def test_the_program_knows_what_lanes_take_from_each_other(overlap: Overlap):
    """A bound without contention is below the step by twice as much at least."""
    machine = slowed(MACHINE, update_compute=0.5, compute_update=0.7, update_h2d=0.5, update_d2h=0.5, h2d_update=0.5)
    blocks = [cost(param_bytes=100, grad_bytes=100, num_params=30)] * 8
    free = problem(blocks, machine=machine, schedule=Schedule(overlap=overlap), micro_batches=2)
    made = [replace(ON_HOST, prefetch_distance=2)] * 8
    blind, bound = (
        program_of(each, made).solve(limit_s=10, deadline=float("inf"), in_seconds=True).bound
        for each in (quiet(free), free)
    )
    step_s = simulate(free, made, events=False).step_s
    assert bound <= step_s * (1 + 1e-6) and step_s - bound <= 0.51 * (step_s - blind)
