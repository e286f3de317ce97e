"""Reasons of plans: every figure against replays of its own, on random problems, and what they are in words."""

import dataclasses
from unittest import mock

import pytest
from hypothesis import assume, given, settings

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import (
    Activations,
    Alternative,
    BlockDecision,
    BlockReasons,
    Lane,
    LaneTime,
    Memory,
    MemoryUse,
    Optimizer,
    Overlap,
    Params,
    Plan,
    Problem,
    Reasons,
    Schedule,
)
from autohete_fx.planner import reasons as planner_reasons
from autohete_fx.planner.baselines import fits, zero_offload
from autohete_fx.planner.model.choices import MAX_PREFETCH_DISTANCE, choices, copies
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.simulation import Simulation
from autohete_fx.planner.model.work import COPY_WEIGHT
from autohete_fx.planner.reasons import reasons_of
from autohete_fx.planner.solve import solve
from autohete_fx.report.why import why
from tests.planner_problems import QUIET, cost, problem, problems

KEEP = BlockDecision()
RECOMPUTE = BlockDecision(activations=Activations.RECOMPUTE)


def copied_s(replayed: Simulation) -> float:
    return sum(time.busy_s for time in replayed.busy_s if time.lane in (Lane.H2D, Lane.D2H))


def score(replayed: Simulation) -> float:
    return replayed.step_s + COPY_WEIGHT * copied_s(replayed)


def others(limited: Problem, plan: Plan, block: int) -> dict[BlockDecision, Simulation]:
    """Replays of the plan with every other choice of one block, at every distance."""
    farthest = max(1, min(MAX_PREFETCH_DISTANCE, len(limited.costs) - 1))
    own = dataclasses.replace(plan.decisions[block], prefetch_distance=1)
    every = {
        dataclasses.replace(choice, prefetch_distance=distance)
        for choice in choices(limited, block)
        if choice != own
        for distance in (range(1, farthest + 1) if copies(choice) else (1,))
    }
    return {decision: simulate(limited, changed(plan, block, decision)) for decision in every}


def changed(plan: Plan, block: int, decision: BlockDecision) -> tuple[BlockDecision, ...]:
    return *plan.decisions[:block], decision, *plan.decisions[block + 1 :]


@pytest.mark.slow
@settings(max_examples=20, **QUIET)
@given(problems(most_blocks=5))
def test_what_is_said_of_a_block_is_what_replays_find(limited: Problem):
    try:
        plan = solve(limited, time_limit_s=1.0)
    except InfeasiblePlanError:
        assume(False)
        return
    assert plan.reasons is not None
    own = simulate(limited, plan.decisions)
    for block, found in enumerate(plan.reasons.blocks):
        replays = others(limited, plan, block)
        assert found.num_others == len({dataclasses.replace(d, prefetch_distance=1) for d in replays})
        fitting = [score(replayed) for replayed in replays.values() if fits(limited, replayed)]
        unfitting = [replayed for replayed in replays.values() if not fits(limited, replayed)]
        better = [each for each in unfitting if score(each) < score(own) * (1 - 1e-8)]
        assert (found.next_best is None) == (not fitting)
        if found.next_best is not None:
            check(found.next_best, replays, own)
            assert score(replays[found.next_best.decision]) <= min(fitting) * (1 + 1e-8)
            assert not found.next_best.exceeded
        assert found.barred is not None or not better
        if found.barred is not None:
            check(found.barred, replays, own)
            barred = replays[found.barred.decision]
            check_exceeded(limited, found.barred, barred)
            assert score(barred) < score(own)
            assert all(barred.step_s <= each.step_s + 2e-6 * own.step_s for each in better)
            as_fast = [each for each in better if each.step_s == pytest.approx(barred.step_s, rel=1e-9)]
            assert all(lacking_bytes(limited, barred) <= lacking_bytes(limited, each) for each in as_fast)


def lacking_bytes(limited: Problem, replayed: Simulation) -> int:
    device, host = limited.device_budget_bytes, limited.host_budget_bytes
    lacking = 0 if device is None else max(0, replayed.peak_bytes - device)
    return lacking + (0 if host is None else max(0, replayed.host_bytes - host))


def check(said: Alternative, replays: dict[BlockDecision, Simulation], own: Simulation) -> None:
    replayed = replays[said.decision]
    assert said.step_s == pytest.approx(replayed.step_s, rel=1e-9)
    assert said.more_copies_s == pytest.approx(copied_s(replayed) - copied_s(own), rel=1e-9, abs=1e-9)


def check_exceeded(limited: Problem, said: Alternative, replayed: Simulation) -> None:
    assert not fits(limited, replayed)
    device, host = limited.device_budget_bytes, limited.host_budget_bytes
    expected = []
    if device is not None and replayed.peak_bytes > device:
        expected.append((Memory.DEVICE, replayed.peak_bytes - device, replayed.peak_block, replayed.peak_phase))
    if host is not None and replayed.host_bytes > host:
        expected.append((Memory.HOST, replayed.host_bytes - host, None, ""))
    found = [(use.memory, use.lacking_bytes, use.block, use.phase) for use in said.exceeded]
    if limited.micro_batches > 1:  # its forwards and backwards may reach the same peak: any is the moment
        found, expected = ([moment[:2] for moment in moments] for moments in (found, expected))
    assert found == expected


@pytest.mark.slow
@settings(max_examples=15, **QUIET)
@given(problems(most_blocks=6))
def test_what_is_said_of_the_whole_is_what_replays_find(limited: Problem):
    try:
        plan = solve(limited, time_limit_s=1.0)
    except InfeasiblePlanError:
        assume(False)
        return
    found, replayed = plan.reasons, simulate(limited, plan.decisions)
    assert found is not None and found == reasons_of(limited, plan.decisions)
    device, host, *_ = found.memory
    assert (device.used_bytes, device.limit_bytes) == (replayed.peak_bytes, limited.device_budget_bytes)
    assert (device.block, device.phase) == (replayed.peak_block, replayed.peak_phase)
    assert (host.used_bytes, host.limit_bytes) == (replayed.host_bytes, limited.host_budget_bytes)
    busy_s = {time.lane: time.busy_s for time in replayed.busy_s}
    assert found.waits_s == pytest.approx(plan.step_s - busy_s[Lane.COMPUTE], abs=1e-9)
    for time in found.meanwhile:
        assert 0 < time.busy_s <= min(found.waits_s, busy_s[time.lane]) * (1 + 1e-9)
    assert found.more_step_s <= plan.step_s * (1 + 1e-9)
    assert why(plan).count("\n") >= 3
    if limited.device_budget_bytes is not None:
        roomy = dataclasses.replace(limited, device_budget_bytes=limited.device_budget_bytes + found.more_bytes)
        assert solve(roomy, time_limit_s=1.0).lower_bound_s <= found.more_step_s * (1 + 1e-6)


def only_recompute(num_blocks: int) -> Problem:
    """Equal blocks and a budget that keeps the activations of all but the first."""
    free = problem(
        [cost()] * num_blocks, allow_offload_activations=False, allow_host_params=False, allow_host_optimizer=False
    )
    budget_bytes = simulate(free, [RECOMPUTE, *[KEEP] * (num_blocks - 1)]).peak_bytes
    return dataclasses.replace(free, device_budget_bytes=budget_bytes)


def test_memory_that_forbids_the_better_choice_is_named_with_the_moment():
    limited = only_recompute(3)
    plan = solve(limited)
    assert plan.reasons is not None and plan.reasons.binds(Memory.DEVICE)
    recomputed = plan.decisions.index(RECOMPUTE)
    keeps = simulate(limited, [KEEP] * 3)
    lacking = keeps.peak_bytes - plan.reasons.memory[0].used_bytes
    assert (
        f"layers.{recomputed}: recompute\n"
        "    its only other choice does not fit\n"
        f"    better but for memory: keep, 1.00 s faster ({1 / plan.step_s:.1%}), needs {lacking} B more device memory than there"
        f" is in the {keeps.peak_phase} of layers.{keeps.peak_block}\n"
    ) in why(plan) + "\n"
    assert plan.reasons.more_bytes < lacking and "would take as long, if one block" in why(plan)


def test_more_memory_changes_as_many_blocks_as_then_fit():
    """Five blocks must be recomputed; an eighth of the budget more keeps some of them."""
    free = dataclasses.replace(only_recompute(8), device_budget_bytes=None)
    budget_bytes = simulate(free, [RECOMPUTE] * 5 + [KEEP] * 3).peak_bytes
    limited = dataclasses.replace(free, device_budget_bytes=budget_bytes)
    plan = solve(limited)
    assert plan.reasons is not None and plan.decisions.count(RECOMPUTE) == 5
    roomy = dataclasses.replace(limited, device_budget_bytes=budget_bytes + plan.reasons.more_bytes)
    best = min(
        replayed.step_s
        for count in range(9)
        if fits(roomy, replayed := simulate(roomy, [RECOMPUTE] * count + [KEEP] * (8 - count)))
    )
    assert plan.reasons.more_step_s == pytest.approx(best) and best < plan.step_s
    assert f"more the step would take at most {best:.1f} s ({1 - best / plan.step_s:.1%} less)" in why(plan)


def test_the_lane_that_compute_waits_for_binds():
    slow = problem([cost(num_params=200, trained=())] * 2, schedule=Schedule(overlap=Overlap.NONE))
    found = reasons_of(slow, [BlockDecision(optimizer=Optimizer.HOST)] * 2)
    # the last gradient goes down for 0.2 s, both updates take 20 s, parameters of the last come up for 0.2 s
    assert found.waits_s == pytest.approx(0.2 + 40 + 0.2)
    assert {time.lane: round(time.busy_s, 6) for time in found.meanwhile} == {
        Lane.H2D: 0.4,
        Lane.D2H: 0.2,
        Lane.UPDATE: 40.0,
    }
    busy = reasons_of(slow, [KEEP] * 2)
    assert busy.meanwhile == () and busy.waits_s == 0


def test_of_very_many_choices_those_are_tried_that_change_one_thing():
    limited = dataclasses.replace(problem([cost()] * 4), device_budget_bytes=600)
    plan = solve(limited)
    with mock.patch.object(planner_reasons, "_MOST_CHOICES", 0):
        found = reasons_of(limited, plan.decisions)
    assert plan.reasons is not None
    for own, of_block, of_all in zip(plan.decisions, found.blocks, plan.reasons.blocks, strict=True):
        assert 0 < of_block.num_others < of_all.num_others
        for other in (of_block.next_best, of_block.barred):
            if other is not None:
                names = ("activations", "params", "optimizer")
                assert sum(getattr(other.decision, name) != getattr(own, name) for name in names) <= 1


def test_an_empty_plan_and_one_that_nobody_solved_say_so():
    empty = solve(problem([], fixed_bytes=7))
    assert empty.reasons is not None and why(empty).count("\n") == 3
    told = why(zero_offload(problem([cost()] * 2)))
    assert told.startswith("no reasons are recorded with this plan (status 'zero-offload')")
    assert "`autohete plan`" in told and "\n" not in told


# -- words -----------------------------------------------------------------------------------------------------------


def use(memory: Memory = Memory.DEVICE, used: int = 0, **changes: object) -> MemoryUse:
    return MemoryUse(**{"memory": memory, "used_bytes": used, "limit_bytes": None, **changes})  # pyright: ignore


def explained(decisions: tuple[BlockDecision, ...], blocks: tuple[BlockReasons, ...], **changes: object) -> list[str]:
    given_reasons = {"memory": (), "waits_s": 0.0, "meanwhile": (), "more_bytes": 0, "more_step_s": 10.0, **changes}
    plan = Plan(
        labels=tuple(f"layers.{i}" for i in range(len(decisions))),
        decisions=decisions,
        step_s=10.0,
        busy_s=(LaneTime(lane=Lane.COMPUTE, busy_s=9.0),),
        reasons=Reasons(blocks=blocks, **given_reasons),  # pyright: ignore
    )
    return why(plan).splitlines()


def test_blocks_of_which_the_same_is_said_are_one_row_with_ranges():
    def slower(step_s: float) -> BlockReasons:
        other = Alternative(decision=RECOMPUTE, step_s=step_s, more_copies_s=0.0)
        return BlockReasons(num_others=3, next_best=other)

    same = (KEEP,) * 4
    _, _, *rows = explained(same, (slower(10.5), slower(11.0), slower(10.5), BlockReasons(num_others=0)))
    assert rows == [
        "layers.0-2 (3): keep",
        "    next best: recompute, 500 ms to 1.00 s slower (5.0% to 10.0%)",
        "layers.3: keep",
        "    it has no other choice",
    ]
    _, _, *rows = explained((KEEP, RECOMPUTE), (slower(10.5), BlockReasons(num_others=0)))
    assert rows[0] == "layers.0: keep" and rows[2] == "layers.1: recompute"


def test_only_what_would_be_decided_otherwise_is_said_and_copies_where_time_does_not_tell():
    own = BlockDecision(
        activations=Activations.OFFLOAD,
        num_offloaded=2,
        params=Params.HOST,
        optimizer=Optimizer.HOST,
        num_moved_states=1,
    )
    as_fast = dataclasses.replace(own, keeps_fetched=True, prefetch_distance=3)
    faster = dataclasses.replace(own, activations=Activations.KEEP, num_offloaded=None, params=Params.DEVICE)
    lacking = use(Memory.HOST, 5, limit_bytes=3), use(used=2048, limit_bytes=1024, block=1, phase="backward")
    found = BlockReasons(
        num_others=9,
        next_best=Alternative(decision=as_fast, step_s=10.0, more_copies_s=0.25),
        barred=Alternative(decision=faster, step_s=9.0, more_copies_s=-0.25, exceeded=lacking),
    )
    _, _, *rows = explained((own, KEEP), (found, BlockReasons(num_others=2)))
    assert rows == [
        "layers.0: offload 2 largest, parameters host, optimizer host for the 1 smallest",
        "    next best: parameters host and kept for backward, as fast but with 250 ms more of copies",
        "    better but for memory: keep, parameters device, 1.00 s faster (10.0%), needs 2 B more host memory than there is"
        " and 1.00 KiB more device memory than there is in the backward of layers.1",
        "layers.1: keep",
        "    none of its 2 other choices fits",
    ]


def test_what_binds_comes_first():
    barred = Alternative(
        decision=RECOMPUTE,
        step_s=9.0,
        more_copies_s=0.0,
        exceeded=(use(used=9, limit_bytes=8, block=0, phase="forward"),),
    )
    memory = (
        use(used=7, limit_bytes=8, block=0, phase="backward"),
        use(Memory.HOST, 5, limit_bytes=9),
        use(Memory.DISK, 4),
    )
    meanwhile = tuple(LaneTime(lane=lane, busy_s=s) for lane, s in ((Lane.H2D, 0.2), (Lane.UPDATE, 0.9)))
    changes = {"memory": memory, "waits_s": 1.5, "meanwhile": meanwhile, "more_bytes": 1, "more_step_s": 9.0}
    blocks = (BlockReasons(num_others=1, barred=barred),)
    lines = explained((KEEP,), blocks, **changes)
    assert lines[:5] == [
        "the update lane binds: compute waits 1.50 s of the 10.0 s step (15%); meanwhile update works 900 ms, h2d works 200 ms",
        "device memory binds: 7 B in the backward of layers.0, 1 B below what the plan may use; with 1 B more the step would take"
        " at most 9.00 s (10.0% less)",
        "host memory does not bind: 5 B, 4 B below what the plan may use",
        "disk has no limit: 4 B",
        "",
    ]
    waits_little = explained((KEEP,), blocks, **{**changes, "waits_s": 0.9})
    works = "the compute lane binds: it works 9.00 s of the 10.0 s step"
    assert waits_little == [f"{works}; while it waits update works 900 ms, h2d works 200 ms", *lines[1:]]
    assert explained((KEEP,), blocks)[0] == works
