"""Plans and what they must move first: bytes by source, seconds, and which plan is worth it."""

import dataclasses

import pytest

from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.cluster.planner.moving import Moving, all_from_cloud, layer_bytes, moved, nearest, settled
from autohete_fx.cluster.planner.solve import plan_cluster
from autohete_fx.cluster.store.sources import Bandwidths, move_s
from tests.unit.test_cluster_solve import KINDS, cluster, costs

TABLE = costs({"a": 1.0})
CLUSTER = cluster(["a"] * 4, {"a": 10**9}, rate=1e9)
LAYER = layer_bytes(TABLE, 0)
RATES = Bandwidths(local=4 * LAYER, peer=2 * LAYER, cloud=LAYER, cloud_of_all=1.5 * LAYER, cloud_first_s=0.0)
ALL = frozenset(range(len(KINDS)))


def plan(*lasts: int, nodes: str = "0123", seconds: float = 1.0) -> ClusterPlan:
    firsts = [0, *(last + 1 for last in lasts)]
    stages = tuple(
        Stage(node=f"a{node}", gpu="a", tp=1, first=first, last=last)
        for node, first, last in zip(nodes, firsts, lasts, strict=False)
    )
    pipeline = Pipeline(stages=stages, micro_batch=1, micro_batches=4)
    return ClusterPlan(model="toy", pipelines=(pipeline,), iteration_s=seconds)


def test_a_plan_moves_what_a_restore_of_it_would():
    one = plan(3, 7)
    twice = dataclasses.replace(one, pipelines=(*one.pipelines, *plan(3, 7, nodes="23").pipelines))
    held = {"a0": frozenset([0, 1]), "a3": frozenset([2])}
    rows = moved(twice, TABLE, held, dataclasses.replace(RATES, peer=1e3 * LAYER))
    assert sum(row.cloud for row in rows.values()) / LAYER == 5, "layers that no disk has are read once"
    assert (rows["a0"].local / LAYER, rows["a2"].peer / LAYER) == (2, 4)
    assert (rows["a1"].cloud, rows["a3"].cloud) == (2 * LAYER, 2 * LAYER), "both read some of what both need"
    assert move_s(all_from_cloud(twice, TABLE), RATES) == pytest.approx(4 / (1.5 / 4))


def test_nodes_of_a_kind_take_the_places_whose_layers_they_have():
    held = {"a3": frozenset(range(4)), "a1": frozenset(range(4, 8))}
    placed = settled(plan(3, 7), CLUSTER, TABLE, held)
    assert [stage.node for _, _, stage in placed.stages()] == ["a3", "a1"]
    assert move_s(moved(placed, TABLE, held, RATES), RATES) == pytest.approx(1.0)


def test_a_slower_plan_that_moves_less_wins_where_nodes_do_not_stay():
    fast, near = plan(1, 3, 5, 7, seconds=1.0), plan(3, 7, seconds=1.2)
    held = {"a0": frozenset(range(4)), "a1": frozenset(range(4, 8))}
    slow_peers = dataclasses.replace(RATES, peer=LAYER / 10, cloud=LAYER / 10, cloud_of_all=LAYER / 10)
    for lifetime_s, expected in ((10.0, near), (1000.0, fast)):
        found = nearest([fast, near], CLUSTER, TABLE, Moving(lifetime_s=lifetime_s, held=held, bandwidths=slow_peers))
        assert found.plan.iteration_s == expected.iteration_s
        assert bool(found.line) == (expected is near)
    short = nearest([fast, near], CLUSTER, TABLE, Moving(lifetime_s=10.0, held=held, bandwidths=slow_peers))
    assert "a plan of 1.20 s a step is taken before the fastest of 1.00 s" in short.line and "10.0 s" in short.line
    assert short.move_s < short.fastest_move_s


def test_the_solver_goes_by_what_moves_only_where_it_is_asked():
    free = plan_cluster(CLUSTER, TABLE, global_batch=8)
    held = {f"a{index}": ALL for index in range(4)}
    everywhere = plan_cluster(CLUSTER, TABLE, global_batch=8, moving=Moving(lifetime_s=1e9, held=held))
    assert everywhere.plan.iteration_s == pytest.approx(free.plan.iteration_s) and not everywhere.moves
    slow = Bandwidths(local=1e12, peer=1.0, cloud=1.0, cloud_of_all=1.0)
    one = Moving(lifetime_s=1.0, held={"a2": ALL}, bandwidths=slow)
    found = plan_cluster(CLUSTER, TABLE, global_batch=8, moving=one)
    assert {stage.node for _, _, stage in found.plan.stages()} == {"a2"} and found.moves
    assert found.timeline.iteration_s == pytest.approx(found.plan.iteration_s)
