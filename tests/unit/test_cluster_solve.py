"""Plans for mixed clusters: against every plan there is, against published planners, and what cannot be."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.inputs.measurements import cluster_of, costs_of, plan_of_grids, read
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.memory import memory_of_plan
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.cluster.planner.shapes import Shape, Shaper, UnitType, divided_evenly, shard_counts
from autohete_fx.cluster.planner.solve import plan_cluster
from autohete_fx.cluster.simulation.events import Sends
from autohete_fx.cluster.simulation.simulate import simulate
from autohete_fx.cluster.spec import Cluster, Gpu, Joined, Node, steady_link
from autohete_fx.errors import ClusterError
from tests.thorough import thorough

MEASURED = Path(__file__).parents[2] / "examples" / "benchmarks" / "measured"
KINDS = ("first", *["layer"] * 6, "last")
PARAMS_BYTES, KEPT_BYTES, OUTPUT_BYTES = 1000, 2000, 100


def costs(speeds: dict[str, float], *, degrees: Sequence[int] = (1,), sizes: Sequence[int] = (1,)) -> CostTable:
    """Eight layers, the last twice as long as the others, the first hardly anything; by type, seconds of a layer's forward."""
    factor = {"first": 0.1, "layer": 1.0, "last": 2.0}
    return CostTable(
        model="toy",
        kinds=KINDS,
        times=tuple(
            LayerTime(
                kind=kind,
                gpu=gpu,
                tp=tp,
                micro_batch=size,
                forward_s=slow * factor[kind] * size / tp**0.9,
                backward_s=2 * slow * factor[kind] * size / tp**0.9,
            )
            for kind in factor
            for gpu, slow in speeds.items()
            for tp in degrees
            for size in sizes
        ),
        sizes=tuple(
            LayerBytes(
                kind=kind,
                tp=tp,
                params_bytes=PARAMS_BYTES // tp,
                kept_bytes=KEPT_BYTES // tp,
                output_bytes=OUTPUT_BYTES,
            )
            for kind in factor
            for tp in degrees
        ),
        updates=tuple(UpdateTime(gpu=gpu, fixed_s=0.01, s_per_byte=1e-6) for gpu in speeds),
    )


def cluster(nodes: Sequence[str], memory: dict[str, int], *, rate: float) -> Cluster:
    """A node for each word, with a GPU for each of its letters, which are types."""
    link = steady_link("port", rate, latency_s=0.0)
    types = sorted(set("".join(nodes)))
    return Cluster(
        gpus=tuple(Gpu(name=gpu, memory_bytes=memory[gpu]) for gpu in types),
        nodes=tuple(Node(name=f"{word[0]}{index}", gpu=word[0], gpus=len(word)) for index, word in enumerate(nodes)),
        within=tuple(Joined(source=gpu, target=gpu, link=steady_link("bus", 1e6, latency_s=0.0)) for gpu in types),
        between=tuple(Joined(source=a, target=b, link=link) for a in types for b in types),
    )


Place = tuple[str, UnitType]
"""A unit and its node."""


def layouts(given: Cluster, types: Sequence[UnitType]) -> Iterator[tuple[Place, ...]]:
    """Every way to make units of the GPUs of all nodes."""

    def of_node(node: Node, free: int) -> Iterator[tuple[Place, ...]]:
        if not free:
            yield ()
        for unit in types:
            if unit.gpu == node.gpu and unit.num_gpus <= free:
                for others in of_node(node, free - unit.num_gpus):
                    yield ((node.name, unit), *others)

    for rows in itertools.product(*(set(of_node(node, node.gpus)) for node in given.nodes)):
        yield tuple(itertools.chain(*rows))


def groups(units: tuple[Place, ...]) -> Iterator[tuple[tuple[Place, ...], ...]]:
    """Every way to put some of the units into pipelines, each an order of units."""
    if not units:
        yield ()
        return
    for size in range(1, len(units) + 1):
        for members in itertools.combinations(range(1, len(units)), size - 1):
            chosen = (units[0], *(units[index] for index in members))
            rest = tuple(unit for index, unit in enumerate(units) if index and index not in members)
            for others in groups(rest):
                for order in set(itertools.permutations(chosen)):
                    yield (order, *others)
    yield from groups(units[1:])  # the first one idle


def shares(total: int, shapes: Sequence[Shape]) -> Iterator[tuple[int, ...]]:
    """Every way to share samples out, each pipeline as many micro-batches as stages or more."""
    if not shapes:
        if not total:
            yield ()
        return
    for count in range(len(shapes[0].stages), total // shapes[0].micro_batch + 1):
        for others in shares(total - count * shapes[0].micro_batch, shapes[1:]):
            yield (count, *others)


def faster(
    given: Cluster, table: CostTable, batch: int, seconds: float, shards: Sequence[int] = ()
) -> ClusterPlan | None:
    """A plan that takes less than so many seconds, of all that there are. Those are simulated whose compute alone takes less.

    A stage computes ``k`` times between the way of the first micro-batch to it and the way of the last one back.
    """
    shaper, links = Shaper(given, table), Links(given)
    known_sizes, known, seen = sorted({row.micro_batch for row in table.times}), {}, set()

    def shapes_of(order: tuple[Place, ...]) -> list[tuple[Shape, list[float]]]:
        units = tuple(unit for _, unit in order)
        if units not in known:
            inner = itertools.combinations(range(1, len(KINDS)), len(units) - 1)
            cuts = [[0, *cut, len(KINDS)] for cut in inner]
            sizes = divided_evenly(units, known_sizes)
            made = [shaper.cut(units, cut, size, spread=False) for cut in cuts for size in sizes]
            known[units] = [(shape, stage_seconds(shaper, shape)) for shape in made if shape is not None]
        return known[units]

    whole = shaper.unit_types()
    for units in layouts(given, [dataclasses.replace(unit, shards=n) for unit in whole for n in (1, *shards)]):
        for found in groups(units):
            orders = tuple(sorted(found))
            if not orders or orders in seen:
                continue
            seen.add(orders)
            options = [[row for row in shapes_of(order) if sum(row[1]) < seconds] for order in orders]
            for rows in itertools.product(*options):
                for counts in shares(batch, [shape for shape, _ in rows]):
                    compute_s = max(
                        sum(stages[:place]) + count * own
                        for count, (_, stages) in zip(counts, rows, strict=True)
                        for place, own in enumerate(stages)
                    )
                    if compute_s < seconds:
                        plan = plan_of(orders, [shape for shape, _ in rows], counts)
                        if simulate(plan, given, table, links=links).iteration_s < seconds:
                            return plan
    return None


def stage_seconds(shaper: Shaper, shape: Shape) -> list[float]:
    """Compute of each stage for a micro-batch."""
    found = [shaper.cost(s.unit, s.first, s.last + 1, shape.micro_batch, recomputed=s.recomputed) for s in shape.stages]
    return [cost.forward_s + cost.backward_s for cost in found]


def plan_of(orders: Sequence[tuple[Place, ...]], shapes: Sequence[Shape], counts: Sequence[int]) -> ClusterPlan:
    """A plan of pipelines on given nodes."""
    return ClusterPlan(
        model="toy",
        pipelines=tuple(
            Pipeline(
                stages=tuple(
                    Stage(
                        node=node,
                        gpu=unit.gpu,
                        tp=unit.tp,
                        first=s.first,
                        last=s.last,
                        recomputed=s.recomputed,
                        shards=unit.shards,
                    )
                    for (node, unit), s in zip(order, shape.stages, strict=True)
                ),
                micro_batch=shape.micro_batch,
                micro_batches=count,
            )
            for order, shape, count in zip(orders, shapes, counts, strict=True)
        ),
    )


SLOW = pytest.mark.slow
SMALL = [
    pytest.param("a b", {"a": 10**6, "b": 10**6}, 1e6, (1,), (), id="two"),
    pytest.param("a a b", {"a": 60_000, "b": 30_000}, 1e5, (1,), (), id="little memory"),
    pytest.param("a b b", {"a": 25_000, "b": 25_000}, 1e6, (1,), (), id="less memory"),
    pytest.param("a a b b", {"a": 10**6, "b": 10**6}, 1e3, (1,), (), id="slow network", marks=SLOW),
    pytest.param("a a b b", {"a": 50_000, "b": 20_000}, 1e5, (1,), (), id="weak ones hold little"),
    pytest.param("aa a", {"a": 40_000}, 2e3, (1,), (2,), id="unlike nodes"),
    pytest.param("aa b a", {"a": 40_000, "b": 25_000}, 2e3, (1,), (), id="unlike nodes of two types"),
    pytest.param("a aa", {"a": 30_000}, 1e3, (1, 2), (2,), id="degrees"),
    pytest.param("a b b b b", {"a": 40_000, "b": 25_000}, 1e5, (1,), (), id="five", marks=SLOW),
    pytest.param("aa", {"a": 25_000}, 1e5, (1,), (2,), id="shards"),
    pytest.param("aa", {"a": 10**6}, 1e5, (1,), (2,), id="shards and room"),
    pytest.param("aaa", {"a": 40_000}, 1e5, (1,), (2, 3), id="three shards"),
    pytest.param("aa aa", {"a": 40_000}, 1e3, (1,), (2,), id="shards and a slow network"),
    pytest.param("aa bb", {"a": 40_000, "b": 25_000}, 1e4, (1,), (2,), id="shards of two types", marks=SLOW),
    pytest.param("aaaa", {"a": 18_000}, 1e5, (1, 2), (2, 4), id="shards of parts"),
]


def test_a_stage_of_layers_that_take_no_time_is_planned():
    given, table = cluster("aaa", {"a": 10**6}, rate=1e6), costs({"a": 1.0}, degrees=(1,))
    times = tuple(
        dataclasses.replace(row, forward_s=0.0, backward_s=0.0) if row.kind == KINDS[-1] else row for row in table.times
    )
    found = plan_cluster(given, dataclasses.replace(table, times=times), global_batch=4, sends=Sends.BUFFERED)
    assert found.timeline.iteration_s >= found.compute_bound_s > 0


def test_there_is_no_bound_where_its_program_finds_no_plan(monkeypatch):
    monkeypatch.setattr("autohete_fx.cluster.planner.counts.Counts.fastest", lambda *_: (0.0, []))
    given, table = cluster(["aa", "a"], {"a": 40_000}, rate=2e3), costs({"a": 0.1}, degrees=(1,))
    found = plan_cluster(given, table, global_batch=1)
    assert found.model_bound_s is None
    assert found.timeline.iteration_s >= found.compute_bound_s > 0


@pytest.mark.parametrize(("nodes", "memory", "rate", "degrees", "shards"), SMALL)
def test_no_plan_is_more_than_half_a_percent_faster(nodes, memory, rate, degrees, shards):
    given, batch = cluster(nodes.split(), memory, rate=rate), 6 if 3 in shards else 8
    table = costs({gpu.name: {"a": 0.1, "b": 0.25}[gpu.name] for gpu in given.gpus}, degrees=degrees)
    found = plan_cluster(given, table, global_batch=batch, shards=shards)
    assert faster(given, table, batch, found.timeline.iteration_s / 1.005, shards) is None
    assert faster(given, table, batch, found.timeline.iteration_s * 1.005, shards) is not None, "the search finds plans"
    check_fits(found.plan, given, table)
    assert found.plan.global_batch == batch
    if shards:
        whole = plan_cluster(given, table, global_batch=batch)
        assert found.timeline.iteration_s <= whole.timeline.iteration_s
        assert shards_of(whole.plan) == {1}


def check_fits(plan: ClusterPlan, given: Cluster, table: CostTable) -> None:
    for row, pipeline in zip(memory_of_plan(plan, table), plan.pipelines, strict=True):
        for held, stage in zip(row, pipeline.stages, strict=True):
            assert held.peak_bytes <= given.gpu(stage.gpu).memory_bytes


def shards_of(plan: ClusterPlan) -> set[int]:
    return {stage.shards for _, _, stage in plan.stages()}


def test_a_layer_that_fits_no_gpu_is_held_in_shards():
    given, table = cluster(["a" * 8], {"a": 38_000}, rate=1e6), costs({"a": 0.1})
    sizes = tuple(dataclasses.replace(row, params_bytes=5000) if row.kind == "first" else row for row in table.sizes)
    table = dataclasses.replace(table, sizes=sizes, optimizer_bytes_per_byte=6.0)
    with pytest.raises(ClusterError, match="does not fit on 8 x a"):
        plan_cluster(given, table, global_batch=16)
    plan = plan_cluster(given, table, global_batch=16, shards=(2, 4, 8)).plan
    assert plan.pipelines[0].stages[0].shards > 1
    check_fits(plan, given, table)
    assert ClusterPlan.from_json(plan.to_json()) == plan


def test_shards_take_no_more_gpus_than_their_nodes_have():
    given, table = cluster(["aaa", "aaaa"], {"a": 30_000}, rate=1e5), costs({"a": 0.1}, sizes=(1, 2))
    assert shard_counts(given) == [2, 3, 4] and shard_counts(given, 2) == [2] and shard_counts(given, 1) == []
    plan = plan_cluster(given, table, global_batch=24, shards=shard_counts(given)).plan
    assert shards_of(plan) != {1}
    taken = {node.name: 0 for node in given.nodes}
    for index, _, stage in plan.stages():
        taken[stage.node] += stage.num_gpus
        assert plan.pipelines[index].micro_batch % stage.shards == 0
    assert all(taken[node.name] <= node.gpus for node in given.nodes)
    check_fits(plan, given, table)


def test_shards_of_whole_nodes_are_counted_where_fewer_would_leave_a_rest():
    given, table = cluster(["aaaaaa", "bbbbbb"], {"a": 30_000, "b": 30_000}, rate=1e6), costs({"a": 0.1, "b": 0.1})
    plan = plan_cluster(given, table, global_batch=12, shards=(4, 6)).plan
    assert [[stage.shards for stage in pipeline.stages] for pipeline in plan.pipelines] == [[6], [6]]
    check_fits(plan, given, table)


def test_units_stand_on_nodes_of_any_size():
    given = cluster(["aaaa", "aa", "aaa"], {"a": 10**6}, rate=1e6)
    table = costs({"a": 0.1}, degrees=(1, 2))
    found = plan_cluster(given, table, global_batch=36).plan
    assert found.used() == {"a": 9}, "one GPU of the last node has no partner for a unit of two"
    taken = {node.name: 0 for node in given.nodes}
    for _, _, stage in found.stages():
        taken[stage.node] += stage.tp
    assert taken == {node.name: node.gpus for node in given.nodes}


def test_a_model_that_needs_units_of_two_fits_odd_nodes():
    given = cluster(["aaa", "aaa"], {"a": 25_000}, rate=1e6)
    pairs = costs({"a": 0.1}, degrees=(2,))
    assert plan_cluster(given, pairs, global_batch=8).plan.used() == {"a": 4}


def measured(scenario: str) -> tuple[Cluster, CostTable, list[dict]]:
    layers, memory, network, planners = (
        read(MEASURED / f"{name}.json") for name in ("layers", "memory", "network", "planners")
    )
    asked = planners["scenarios"][scenario]
    table = dataclasses.replace(costs_of(layers, memory, asked["model"]), overhead_bytes=int(4.5 * 2**30))
    rows = [row for row in planners["results"] if row["scenario"] == scenario and row.get("pipelines")]
    return cluster_of(network, asked["gpus"]), table, rows


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["S1", thorough("S4")])
def test_published_plans_are_slower(scenario):
    given, table, rows = measured(scenario)
    network = read(MEASURED / "network.json")
    ours = plan_cluster(given, table, global_batch=256, time_limit_s=120).timeline.iteration_s
    for row in rows:
        if row["planner"] in ("SAILOR", "Metis"):
            plan, nodes = plan_of_grids(
                table.model, row["pipelines"], micro_batch=row["mbs"], global_batch=256, network=network
            )
            assert ours < simulate(plan, nodes, table).iteration_s, row["planner"]


@pytest.mark.slow
def test_equal_inputs_give_equal_plans():
    given, table, _ = measured("S1")
    first, second = (plan_cluster(given, table, global_batch=64, time_limit_s=600) for _ in range(2))
    assert first.plan == second.plan
    assert first.first_s is not None and 0 < first.first_s < first.solve_s, "a plan is there long before the last"


@pytest.mark.slow
def test_gpus_behind_a_slow_port_do_not_join_others():
    given, table, _ = measured("S6")  # the node of RTX 3090 has one gigabit a second
    used = plan_cluster(given, table, global_batch=64).plan.used()
    assert "RTX-3090" not in used or len(used) == 1


@pytest.mark.slow
def test_symmetric_tensor_parallelism_has_one_degree():
    given, table, _ = measured("S4")
    found = plan_cluster(given, table, global_batch=32, symmetric_tp=True)
    assert len({stage.tp for _, _, stage in found.plan.stages()}) == 1


@pytest.mark.slow
def test_a_plan_of_any_degrees_is_no_slower_than_that_of_one():
    given, table, _ = measured("S4")
    found, free = (
        plan_cluster(given, table, global_batch=256, symmetric_tp=only, time_limit_s=600) for only in (True, False)
    )
    assert free.timeline.iteration_s <= found.timeline.iteration_s


def test_a_model_that_fits_nowhere_is_refused():
    given, table = cluster(["a", "a"], {"a": 5000}, rate=1e6), costs({"a": 0.1})
    with pytest.raises(ClusterError, match=r"toy does not fit on 2 x a.*Add GPUs"):
        plan_cluster(given, table, global_batch=8)


def test_a_cluster_without_costs_is_refused():
    given = cluster(["a", "a"], {"a": 10**6}, rate=1e6)
    with pytest.raises(ClusterError, match=r"no costs of toy on any GPU of the cluster, \['a'\]"):
        plan_cluster(given, costs({"b": 0.1}), global_batch=8)


def test_a_batch_smaller_than_every_micro_batch_is_refused():
    given, table = cluster(["a", "a"], {"a": 10**6}, rate=1e6), costs({"a": 0.1})
    with pytest.raises(ClusterError, match="global batch of 1"):
        plan_cluster(given, table, global_batch=1, micro_batches=(2,))
