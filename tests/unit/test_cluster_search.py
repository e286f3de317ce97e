"""Searches of clusters whose nodes are unlike, and of those that nothing fits."""

import pytest

from autohete_fx.cluster.planner.search import Search
from autohete_fx.cluster.planner.shapes import shard_counts
from autohete_fx.cluster.planner.solve import _few_units, plan_cluster
from autohete_fx.cluster.simulation.events import Sends
from autohete_fx.errors import ClusterError
from tests.thorough import thorough
from tests.unit.test_cluster_solve import cluster, costs


@pytest.mark.parametrize(
    ("nodes", "added", "batch"),
    [(["aaaaaaaa"], "aa", 3), (["aaaa"], "bb", 5), thorough(["aaaa", "bb"], "bbbb", 7), (["aaaa"], "aaaaaaaa", 3)],
)
def test_a_node_more_makes_no_plan_slower(nodes: list[str], added: str, batch: int):
    """Gradients between nodes take longer than those within: what was best on the others is a plan still."""
    table = costs({"a": 0.1, "b": 0.5}, degrees=(1, 2, 4), sizes=(1, 2, 4))
    memory = {"a": 10**6, "b": 10**6}
    steps_s = [
        plan_cluster(given, table, global_batch=batch, shards=shard_counts(given)).plan.iteration_s
        for given in (cluster(nodes, memory, rate=2e3), cluster([*nodes, added], memory, rate=2e3))
    ]
    assert steps_s[1] <= steps_s[0] * 1.001, steps_s


def test_a_batch_of_fewer_samples_than_stages_is_told():
    """Every pipeline that holds the model has more stages than the batch has samples."""
    given, table = cluster(["aaaa", "aaaa"], {"a": 20_000}, rate=2e3), costs({"a": 0.1})
    assert all(len(pipe.stages) > 1 for pipe in plan_cluster(given, table, global_batch=8).plan.pipelines)
    with pytest.raises(ClusterError, match="a pipeline takes a micro-batch for each stage"):
        plan_cluster(given, table, global_batch=1)


def test_of_clusters_of_many_kinds_a_few_sets_of_nodes_are_tried():
    """They have more sets than could be counted."""
    names = "abcdefghijklmnop"
    given, table = cluster(list(names), dict.fromkeys(names, 10**6), rate=2e3), costs(dict.fromkeys(names, 0.1))
    found = list(_few_units(Search(given, table, 1, None, Sends.BLOCKING, 0.0)))
    assert len(found) == 16 and all(len(set(nodes)) == 5 for nodes in found)
    few = cluster(["aa", "bbb", "b"], dict.fromkeys("ab", 10**6), rate=2e3)
    found = list(_few_units(Search(few, table, 1, None, Sends.BLOCKING, 0.0)))
    assert [[node.name for node in nodes] for nodes in found] == [["a0", "b1"], ["a0", "b2"], ["b1", "b2"]]


@pytest.mark.parametrize(
    ("nodes", "degrees"), [(["aa", "bb"], (1,)), (["aaaa", "aa"], (4,)), (["aaaa", "b", "a"], (2, 4))]
)
def test_nodes_that_no_unit_fits_are_left_out(nodes: list[str], degrees: tuple[int, ...]):
    """Of type b there are no costs; of type a perhaps of larger units alone."""
    given = cluster(nodes, {"a": 10**6, "b": 10**6}, rate=2e3)
    plan = plan_cluster(given, costs({"a": 0.1}, degrees=degrees), global_batch=4).plan
    assert plan.global_batch == 4 and {stage.gpu for _, _, stage in plan.stages()} == {"a"}
