"""Updates with matrix products: their seconds on either processor, their states, and the memory that they work in."""

import gc
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockDecision, Lane, Optimizer, Overlap, Params, Plan, Problem, Schedule
from autohete_fx.ir.machine import ASSUMED_HOST_FLOPS_PER_S
from autohete_fx.machine.devices import machine_of_rank
from autohete_fx.planner.baselines import fits, three_integers
from autohete_fx.planner.bound.work_bound import work_bound_s
from autohete_fx.planner.model.choices import choices
from autohete_fx.planner.model.device_use import device_bytes, streaming_peak_bytes
from autohete_fx.planner.model.figures import device_update_s, disk_bytes, host_bytes, host_update_s, streamed_bytes
from autohete_fx.planner.model.footprint import resident_bytes, traced_peak_bytes
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.simulation import Simulation
from autohete_fx.planner.reasons import reasons_of
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.sharing import joined
from autohete_fx.planner.solve import proven, solve
from tests.planner_problems import MACHINE, cost, problem

HOST, STREAMED, DEVICE = (BlockDecision(optimizer=o) for o in (Optimizer.HOST, Optimizer.STREAMED, Optimizer.DEVICE))
FLOPS = (0.0, 2e12, 6e12)
BLOCK = cost(num_params=10, trained=(1, 3, 6), trained_states=(8, 12, 24), optimizer_bytes=44, product_flops=FLOPS)
WITH_HOST = replace(MACHINE, host_flops_per_s=5e11)  # half of the device's


def test_products_are_seconds_of_the_processor_that_updates():
    given = problem([BLOCK], machine=WITH_HOST)
    without = problem([replace(BLOCK, product_flops=())], machine=WITH_HOST)
    parts = itertools.product((1, 2), [p for p in Optimizer if p is not Optimizer.DEVICE], Optimizer)
    wholes = ((None, place, Optimizer.DEVICE) for place in Optimizer)
    for count, place, other in (*wholes, *(part for part in parts if part[1] is not part[2])):
        decision = BlockDecision(optimizer=place, num_moved_states=count, other_states=other)
        moved = 3 if count is None else count
        places = [place] * moved + [other] * (3 - moved)
        for on_device in (Optimizer.DEVICE, Optimizer.STREAMED):
            added = device_update_s(given, 0, decision, on_device) - device_update_s(without, 0, decision, on_device)
            assert added == pytest.approx(sum(f for f, at in zip(FLOPS, places, strict=True) if at is on_device) / 1e12)
        if Optimizer.DISK not in places:
            added = host_update_s(given, 0, decision) - host_update_s(without, 0, decision)
            assert added == pytest.approx(
                sum(f for f, at in zip(FLOPS, places, strict=True) if at.updates_on_host) / 5e11
            )
        held = {at: sum(n for n, p in zip(BLOCK.trained_states, places, strict=True) if p is at) for at in Optimizer}
        assert {at: BLOCK.states_at(decision, at) for at in Optimizer} == held
        assert (
            disk_bytes(given, 0, decision) == held[Optimizer.DISK]
            and streamed_bytes(BLOCK, decision) == held[Optimizer.STREAMED]
        )


def test_the_hosts_rate_is_known_the_devices_or_assumed():
    assert WITH_HOST.host_products_per_s == 5e11 and MACHINE.host_products_per_s == ASSUMED_HOST_FLOPS_PER_S
    assert replace(MACHINE, device_type="cpu", device_flops_per_s=(("bfloat16", 7.0),)).host_products_per_s == 7.0
    share = machine_of_rank(MACHINE, ranks_of_node=4, net_bytes_per_s=1.0, net_latency_s=0.0)
    assert share.host_products_per_s == ASSUMED_HOST_FLOPS_PER_S / 4


def test_steps_take_longer_by_them_and_no_bound_is_passed():
    given = [problem([replace(BLOCK, product_flops=flops)] * 3) for flops in ((), FLOPS)]
    without, with_products = (simulate(p, [DEVICE] * 3).step_s for p in given)
    assert with_products - without == pytest.approx(3 * 8.0)
    for device_type, p in itertools.product(("cuda", "cpu"), given):
        here = replace(p, machine=replace(MACHINE, device_type=device_type))
        assert work_bound_s(here) <= min(simulate(here, [d] * 3).step_s for d in (DEVICE, HOST)) + 1e-9


def test_the_planner_updates_products_where_they_are_fast():
    """The host is ten times as slow at AdamW's updates as the device, and at products as fast or a hundred times as slow."""
    for rate, expected in ((1e14, Optimizer.HOST), (1e10, Optimizer.DEVICE)):
        machine = replace(MACHINE, host_flops_per_s=rate, device_flops_per_s=(("bfloat16", 1e12),))
        block = replace(BLOCK, trained=(10,), trained_states=(44,), product_flops=(3e12,))
        schedule = Schedule(overlap=Overlap.STEP)
        plan = solve(problem([block] * 3, machine=machine, schedule=schedule), time_limit_s=2.0)
        assert {d.optimizer for d in plan.decisions} == {expected}


@pytest.mark.parametrize("overlap", [Overlap.NONE, Overlap.STEP])
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_updates_work_in_memory_of_their_processor(device_type: str, overlap: Overlap):
    machine = replace(MACHINE, device_type=device_type)
    given = problem([BLOCK] * 3, machine=machine, schedule=Schedule(overlap=overlap), update_workspace_bytes=10_000)
    for decision in (DEVICE, HOST, BlockDecision(optimizer=Optimizer.HOST, params=Params.HOST)):
        decisions = [decision] * 3
        found, without = (simulate(p, decisions) for p in (given, replace(given, update_workspace_bytes=0)))
        counts = device_type == "cpu" or decision is DEVICE
        gradients = 3 * (20 if decision is DEVICE else 0)
        if counts:
            expected = resident_bytes(given, plan_of(given, decisions)) + gradients + 10_000
            assert found.peak_bytes == expected and found.peak_phase == "optimizer step"
            assert traced_peak_bytes(given, plan_of(given, decisions), 0) == expected
        else:
            assert found.peak_bytes == without.peak_bytes
        use = device_bytes(given, range(3), decisions).sum(axis=0).max()
        assert use >= found.peak_bytes and (not counts or use == found.peak_bytes)
        assert found.step_s == without.step_s and host_bytes(given, 0, decision) == host_bytes(given, 1, decision)


@pytest.mark.parametrize("overlap", Overlap)
def test_slots_are_memory_of_plans_that_stream(overlap: Overlap):
    given = problem(
        [BLOCK] * 3,
        schedule=Schedule(overlap=overlap),
        allow_streamed_optimizer=True,
        update_workspace_bytes=3_000,
        slot_bytes=5_000,
    )
    for decisions in ([DEVICE] * 3, [STREAMED] * 3, [HOST, STREAMED, DEVICE]):
        found, without = (simulate(p, decisions) for p in (given, replace(given, slot_bytes=0)))
        streams = STREAMED in decisions
        assert found.peak_bytes - without.peak_bytes == streams * 5_000 and found.step_s == without.step_s
        use = device_bytes(given, range(3), decisions).sum(axis=0).max()
        assert use == found.peak_bytes if streams else use >= found.peak_bytes
        if streams:
            # The trace knows what blocks hold after the last streamed update, when slots are given back.
            counted = streaming_peak_bytes(given, decisions), traced_peak_bytes(given, plan_of(given, decisions), 0)
            assert {*counted} == {found.peak_bytes} or (
                decisions[2] is DEVICE and 8_000 < counted[0] < found.peak_bytes
            )


@pytest.mark.parametrize("overlap", Overlap)
def test_a_matrix_is_updated_on_the_lane_that_copied_its_states_up(overlap: Overlap):
    """44 bytes of states at 100 bytes a second, and 8e12 operations at 1e12 a second, block after block."""
    given = problem([BLOCK] * 3, schedule=Schedule(overlap=overlap), allow_streamed_optimizer=True)
    replayed = simulate(given, [STREAMED] * 3)
    up = sorted((e.start_s, e.end_s) for e in replayed.events if (e.lane, e.label) == (Lane.H2D, "states"))
    assert [end - begin for begin, end in up] == pytest.approx([8.44] * 3)
    assert replayed.step_s >= 3 * 8.44
    replays = Replays(given)
    assert replays.seconds(replays.row([STREAMED] * 3)[None]) == pytest.approx(replayed.step_s)


def test_plans_without_streaming_need_no_slots():
    """The same budget, with slots that fit beside nothing, or that are small: the host takes 40 s for a block's update then."""
    block = replace(BLOCK, product_flops=(), num_params=400, trained=(200, 200), trained_states=(800, 800))
    block = replace(block, optimizer_bytes=1600)
    given = problem(
        [block] * 3,
        machine=replace(MACHINE, h2d_bytes_per_s=1e5, d2h_bytes_per_s=1e5),
        allow_streamed_optimizer=True,
        allow_host_optimizer=True,
        update_workspace_bytes=10,
    )
    least = simulate(given, [STREAMED] * 3).peak_bytes
    for slots, expected in ((least, Optimizer.HOST), (20, Optimizer.STREAMED)):
        plan = solve(replace(given, device_budget_bytes=least + 20, slot_bytes=slots), time_limit_s=2.0)
        assert expected in {d.optimizer for d in plan.decisions} and plan.peak_bytes <= least + 20
        assert plan.reasons
        assert (
            proven(replace(given, device_budget_bytes=least + 20, slot_bytes=slots), plan, time_limit_s=1.0).gap
            <= plan.gap
        )
    with pytest.raises(InfeasiblePlanError) as refused:
        solve(replace(given, device_budget_bytes=100, slot_bytes=5_000), time_limit_s=2.0)
    smallest = refused.value.smallest_budget_bytes
    assert smallest is not None and solve(
        replace(given, device_budget_bytes=smallest, slot_bytes=5_000), time_limit_s=2.0
    )


def tried(given: Problem) -> list[Simulation]:
    """All plans by the simulator that keep the budgets."""
    everything = itertools.product(*(choices(given, block) for block in range(len(given.costs))))
    return [found for decisions in everything if fits(given, found := simulate(given, decisions, events=False))]


@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("slots", [150, 1_000])
def test_all_plans_tried_give_none_faster_and_none_below_the_bound(slots: int, overlap: Overlap):
    """Two blocks, whose states are too many for the device; slots that fit, and that do not."""
    block = replace(BLOCK, product_flops=(0.0, 2e11, 4e11), optimizer_bytes=440, trained_states=(80, 120, 240))
    given = problem(
        [block] * 2,
        schedule=Schedule(overlap=overlap),
        machine=replace(MACHINE, h2d_bytes_per_s=5e3, d2h_bytes_per_s=5e3, host_update_params_per_s=2.0),
        device_budget_bytes=800,
        allow_host_optimizer=True,
        allow_streamed_optimizer=True,
        update_workspace_bytes=30,
        slot_bytes=slots,
    )
    least_s = min(found.step_s for found in tried(given))
    plan = solve(given, time_limit_s=2.0)
    assert plan.lower_bound_s <= least_s * (1 + 1e-9) and plan.step_s <= least_s * 1.01
    assert any(decision.streams for decision in plan.decisions) == (slots < 1_000)


def test_a_refusal_names_the_smallest_budget_of_both_ways():
    """Within a host budget, streaming needs less: no gradients and no copies of parameters are there."""
    block = cost(param_bytes=200, grad_bytes=200, optimizer_bytes=400, num_params=50, trained=(50,))
    given = problem(
        [block] * 2,
        allow_host_optimizer=True,
        allow_streamed_optimizer=True,
        host_budget_bytes=800,
        slot_bytes=100,
    )
    least = min(found.peak_bytes for found in tried(given))
    with pytest.raises(InfeasiblePlanError) as refused:
        solve(replace(given, device_budget_bytes=least - 1), time_limit_s=2.0)
    assert refused.value.smallest_budget_bytes == least
    assert solve(replace(given, device_budget_bytes=least), time_limit_s=2.0).peak_bytes == least


@pytest.mark.parametrize("slots", [0, 100])
def test_a_refusal_keeps_nothing_of_those_who_asked(slots: int):
    """Until garbage is collected it would be the batch of a model that is compiled."""
    given = problem([BLOCK] * 2, allow_host_optimizer=True, allow_streamed_optimizer=True, device_budget_bytes=10)

    class Batch:
        pass

    def ask() -> "weakref.ref[Batch]":
        batch = Batch()
        with pytest.raises(InfeasiblePlanError):
            solve(replace(given, slot_bytes=slots), time_limit_s=1.0)
        return weakref.ref(batch)

    gc.collect()
    gc.disable()
    try:
        assert ask()() is None
    finally:
        gc.enable()


def test_reasons_and_baselines_count_no_slots_where_nothing_streams():
    free = problem([BLOCK] * 3, allow_host_optimizer=True, allow_streamed_optimizer=True, slot_bytes=3_000)
    given = replace(free, device_budget_bytes=simulate(free, [DEVICE] * 3).peak_bytes)
    without = replace(given, allow_streamed_optimizer=False, slot_bytes=0)
    assert reasons_of(given, [HOST] * 3) == reasons_of(without, [HOST] * 3)
    assert three_integers(given).step_s == three_integers(without).step_s


def plan_of(given: Problem, decisions: Sequence[BlockDecision]) -> Plan:
    return Plan(labels=given.labels, decisions=tuple(decisions))


def test_a_budget_below_the_workspace_is_met_elsewhere_or_refused():
    block = replace(BLOCK, saved_bytes=100)
    free = problem([block] * 3, schedule=Schedule(overlap=Overlap.STEP), update_workspace_bytes=400)
    least = simulate(free, [DEVICE] * 3).peak_bytes
    plan = solve(replace(free, device_budget_bytes=least - 100), time_limit_s=2.0)
    assert plan.peak_bytes <= least - 100


def test_graphs_of_one_step_share_the_largest_workspace():
    parts = [problem([BLOCK], update_workspace_bytes=n, slot_bytes=2 * n) for n in (7, 3)]
    assert joined(parts).update_workspace_bytes == 7 and joined(parts).slot_bytes == 14
