"""Replays of ranks that hold shards, on blocks made by hand: when collectives run, what waits for them, what they hold."""

from dataclasses import replace

import pytest

from autohete_fx.errors import PlanError
from autohete_fx.ir import (
    BlockDecision,
    BlockGraph,
    BlockKind,
    Lane,
    Optimizer,
    Overlap,
    Params,
    Plan,
    Problem,
    Schedule,
)
from autohete_fx.ir.block import Block
from autohete_fx.planner.given import fitted_plan
from autohete_fx.planner.model.figures import average_s, collective_s, kept_bytes
from autohete_fx.planner.model.footprint import held_bytes, resident_bytes
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.simulation import Simulation
from autohete_fx.planner.solve import solve
from tests.planner_problems import MACHINE, cost, problem

AGAIN, KEPT, REPLICATED = BlockDecision(), BlockDecision(keeps_fetched=True), BlockDecision(replicates=True)
RING = replace(MACHINE, net_bytes_per_s=40.0)


def shared(count: int, **changes: object) -> Problem:
    """Blocks of which two ranks hold 20 bytes each: a collective takes 0.5 s."""
    block = cost(gathered_bytes=40, gathered_again_bytes=40, reduced_bytes=40)
    return problem([block] * count, **{"machine": RING, "num_ranks": 2, **changes})


def times(replayed: Simulation, label: str) -> dict[int, tuple[float, float]]:
    found = {e.block: (round(e.start_s, 6), round(e.end_s, 6)) for e in replayed.events if e.label == label}
    assert found, f"nothing is labelled {label}"
    return found


def test_a_collective_is_a_ring():
    four = problem([cost()], machine=replace(MACHINE, net_bytes_per_s=50.0, net_latency_s=0.25), num_ranks=4)
    assert collective_s(four, 100) == pytest.approx(3 * 0.25 + 100 * 3 / 4 / 50)
    assert collective_s(four, 0) == 0 and collective_s(replace(four, num_ranks=1), 100) == 0


def test_replicas_average_after_the_last_backward_and_before_updates():
    # Three replicas: four messages of a third of 20 bytes, at 10 bytes a second.
    ring = replace(RING, replica_net_bytes_per_s=10.0)
    alone, many = shared(2, machine=ring), shared(2, machine=ring, num_replicas=3, micro_batches=2)
    block_s = 4 * (ring.net_latency_s + 20 / 3 / 10.0)
    assert average_s(many, 0, AGAIN) == pytest.approx(block_s) and average_s(alone, 0, AGAIN) == 0
    replayed, single = simulate(many, [AGAIN] * 2), simulate(replace(alone, micro_batches=2), [AGAIN] * 2)
    assert replayed.step_s == pytest.approx(single.step_s + 2 * block_s)
    found = times(replayed, "average")
    assert len([e for e in replayed.events if e.label == "average"]) == 2  # once a step
    assert min(begin for begin, _ in times(replayed, "update").values()) == max(end for _, end in found.values())
    host = BlockDecision(optimizer=Optimizer.HOST)
    copies_s = 20 / ring.h2d_bytes_per_s + 20 / ring.d2h_bytes_per_s + 2 * ring.latency_s
    assert average_s(many, 0, host) == pytest.approx(block_s + copies_s)


def test_no_update_overlaps_with_the_backward_of_a_replica():
    ring = replace(RING, replica_net_bytes_per_s=10.0, device_type="cuda")
    host = [BlockDecision(optimizer=Optimizer.HOST)] * 3
    given = {
        overlap: shared(3, machine=ring, num_replicas=2, schedule=Schedule(overlap=overlap))
        for overlap in (Overlap.BACKWARD, Overlap.STEP)
    }
    first, second = (simulate(each, host).step_s for each in given.values())
    assert first == second


def test_gathers_are_issued_a_block_ahead_and_reduces_waited_for_a_block_later():
    replayed = simulate(shared(2), [AGAIN, AGAIN])
    assert [(e.label, e.block, round(e.start_s, 6)) for e in replayed.events if e.lane is Lane.NET] == [
        ("gather", 0, 0.0),
        ("gather", 1, 0.5),
        ("gather", 1, 2.5),
        ("gather", 0, 3.0),
        ("reduce", 1, 5.0),
        ("reduce", 0, 7.0),
    ]
    assert times(replayed, "forward") == {0: (0.5, 1.5), 1: (1.5, 2.5)}
    assert times(replayed, "backward") == {1: (3.0, 5.0), 0: (5.0, 7.0)}
    assert replayed.step_s == pytest.approx(7.5 + 2 * 5 / 100)
    assert {time.lane: time.busy_s for time in replayed.busy_s}[Lane.NET] == pytest.approx(3.0)
    # backward of block 1: what is always there, activations and workspace, both blocks gathered, whole gradients of one
    assert (replayed.peak_bytes, replayed.peak_block, replayed.peak_phase) == (120 + 200 + 7 + 80 + 40, 1, "backward")
    assert {c.name: c.num_bytes for c in replayed.contributors}["whole gradients"] == 40


def test_what_is_kept_is_not_gathered_again():
    again, kept = (simulate(shared(3), [decision] * 3) for decision in (AGAIN, KEPT))
    # three gathers for backward, of which one is not hidden
    assert again.step_s - kept.step_s == pytest.approx(0.5)
    assert sum(e.label == "gather" for e in kept.events) == 3
    assert kept.peak_bytes - again.peak_bytes == 40
    assert kept_bytes(shared(3), 0, KEPT) == 40 and kept_bytes(shared(3), 0, AGAIN) == 0
    plan = Plan(labels=("a", "b", "c"), decisions=(KEPT, AGAIN, KEPT))
    assert held_bytes(shared(3), plan) == 3 * 100 + 2 * 40


@pytest.mark.parametrize("overlap", [Overlap.NONE, Overlap.STEP])
def test_what_is_replicated_is_gathered_once_a_step(overlap: Overlap):
    many = shared(3, micro_batches=4, schedule=Schedule(overlap=overlap), allow_replicating=True)
    again, kept, replicated = (simulate(many, [decision] * 3) for decision in (AGAIN, KEPT, REPLICATED))
    assert [sum(e.label == "gather" for e in each.events) for each in (again, kept, replicated)] == [24, 12, 3]
    # Of each later forward the first gather is not hidden, nor one of each backward.
    assert kept.step_s - replicated.step_s == pytest.approx(3 * 0.5)
    assert again.step_s - kept.step_s == pytest.approx(4 * 0.5)
    assert {c.name: c.num_bytes for c in replicated.contributors}["replicated parameters"] == 3 * 40
    plan = Plan(labels=("a", "b", "c"), decisions=(REPLICATED, AGAIN, KEPT))
    assert resident_bytes(many, plan) == 3 * 60 + 40 and held_bytes(many, plan) == 3 * 100 + 40
    # With several forwards in flight each keeps a copy of its own, and all share what is replicated.
    flying = replace(many, in_flight=2)
    assert simulate(flying, [KEPT] * 3).peak_bytes - kept.peak_bytes > simulate(flying, [REPLICATED] * 3).peak_bytes - (
        replicated.peak_bytes
    )


def test_a_block_is_replicated_where_the_net_binds_and_there_is_memory():
    slow = shared(4, micro_batches=4, machine=replace(RING, net_bytes_per_s=15.0), allow_replicating=True)
    roomy, tight = (solve(replace(slow, device_budget_bytes=budget)) for budget in (10_000, 550))
    assert all(d.replicates for d in roomy.decisions)
    # With less memory some are kept till backward instead.
    assert {d.replicates for d in tight.decisions} == {d.keeps_fetched for d in tight.decisions} == {False, True}
    assert roomy.step_s < solve(replace(slow, allow_replicating=False)).step_s


def test_only_shards_on_the_device_are_replicated():
    with pytest.raises(
        PlanError, match=r"replicates is given with params 'host' and keeps_fetched False; expected it with"
    ):
        BlockDecision(params=Params.HOST, replicates=True)
    with pytest.raises(PlanError, match=r"params 'device' and keeps_fetched True; expected it with params 'device'"):
        BlockDecision(keeps_fetched=True, replicates=True)


def test_one_rank_gathers_nothing():
    alone = shared(3, num_ranks=1)
    plain = problem([cost()] * 3, machine=RING)
    assert simulate(alone, [AGAIN] * 3) == simulate(plain, [AGAIN] * 3)


def test_a_shard_on_the_host_is_fetched_a_block_earlier_than_it_is_gathered():
    host = BlockDecision(params=Params.HOST)
    replayed = simulate(shared(4, training=False), [host] * 4)
    assert times(replayed, "fetch") == {0: (0.0, 0.2), 1: (0.2, 0.4), 2: (0.4, 0.6), 3: (1.7, 1.9)}
    assert times(replayed, "gather") == {0: (0.2, 0.7), 1: (0.7, 1.2), 2: (1.7, 2.2), 3: (2.7, 3.2)}
    assert times(replayed, "forward") == {0: (0.7, 1.7), 1: (1.7, 2.7), 2: (2.7, 3.7), 3: (3.7, 4.7)}
    # forward of block 1: states, activations of both, workspace, the shards of 1, 2 and 3, blocks 1 and 2 gathered
    assert replayed.peak_bytes == 4 * 40 + 10 + 100 + 5 + 3 * 20 + 2 * 40


def test_a_fetched_shard_goes_when_it_is_gathered_and_the_whole_stays_if_it_is_kept():
    kept = BlockDecision(params=Params.HOST, keeps_fetched=True)
    replayed = simulate(shared(2), [kept] * 2)
    assert sum(e.label == "fetch" for e in replayed.events) == sum(e.label == "gather" for e in replayed.events) == 2
    # backward of block 1: states, activations and workspace, both blocks gathered, whole gradients of one, and no shard
    assert replayed.peak_bytes == 2 * 40 + 200 + 7 + 80 + 40
    assert kept_bytes(shared(2), 0, kept) == 40


def test_updates_are_in_before_their_block_is_gathered():
    updating = shared(3, schedule=Schedule(overlap=Overlap.STEP))
    replayed = simulate(updating, [BlockDecision(optimizer=Optimizer.HOST)] * 3)
    uploads, forwards = times(replayed, "upload"), times(replayed, "forward")
    last_gathers = times(replayed, "gather")
    for block in range(3):
        assert last_gathers[block][0] >= uploads[block][1]
        assert forwards[max(0, block - 1)][0] >= uploads[block][1]
    streamed = simulate(
        replace(updating, allow_streamed_optimizer=True), [BlockDecision(optimizer=Optimizer.STREAMED)] * 3
    )
    assert all(times(streamed, "update")[block][1] <= times(streamed, "gather")[block][0] for block in range(3))


def test_gradients_go_home_after_they_are_reduced():
    replayed = simulate(shared(3), [BlockDecision(optimizer=Optimizer.HOST)] * 3)
    reduces, backwards, gradients = (times(replayed, label) for label in ("reduce", "backward", "gradients"))
    for block in range(3):
        assert reduces[block][0] == backwards[block][1]
        assert gradients[block][0] == max(reduces[block][1], backwards[max(0, block - 1)][1])


def test_what_only_the_forward_reads_is_gathered_once():
    read_once = cost(gathered_bytes=40, reduced_bytes=40)
    replayed = simulate(problem([read_once] * 2, machine=RING, num_ranks=2), [AGAIN] * 2)
    assert sum(e.label == "gather" for e in replayed.events) == 2


def test_a_plan_that_keeps_what_nobody_fetches_or_gathers_is_refused():
    blocks = tuple(
        Block(index=i, kind=BlockKind.LAYER, module_fqn=f"layers.{i}", forward_nodes=(), backward_nodes=())
        for i in range(2)
    )
    graph = BlockGraph(blocks=blocks, edges=(), digest="")
    plan = Plan(labels=("layers.0", "layers.1"), decisions=(AGAIN, KEPT))
    assert fitted_plan(plan, graph, shared(2)).decisions == plan.decisions
    for alone in (shared(2, num_ranks=1), problem([cost()] * 2)):
        with pytest.raises(PlanError, match=r"keeps_fetched for block 'layers.1', whose parameters are on the device"):
            fitted_plan(plan, graph, alone)
        with pytest.raises(PlanError, match=r"replicates for block 'layers.1', whose parameters are on the device"):
            fitted_plan(replace(plan, decisions=(AGAIN, REPLICATED)), graph, alone)
    fetched = replace(plan, decisions=(AGAIN, BlockDecision(params=Params.HOST, keeps_fetched=True)))
    assert fitted_plan(fetched, graph, problem([cost()] * 2)).decisions == fetched.decisions
