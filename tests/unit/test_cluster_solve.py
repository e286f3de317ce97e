"""Plans for mixed clusters: against every plan there is, against published planners, and what cannot be."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.measurements import cluster_of, costs_of, plan_of_grids, read
from autohete_fx.cluster.memory import memory_of_plan
from autohete_fx.cluster.place import placed
from autohete_fx.cluster.shapes import Shape, Shaper, UnitType
from autohete_fx.cluster.simulate import simulate
from autohete_fx.cluster.solve import plan_cluster
from autohete_fx.cluster.spec import Cluster, Gpu, Joined, Node, steady_link
from autohete_fx.errors import ClusterError

MEASURED = Path(__file__).parents[2] / "examples" / "benchmarks" / "measured"
KINDS = ("first", *["layer"] * 6, "last")
PARAMS_BYTES, KEPT_BYTES, OUTPUT_BYTES = 1000, 2000, 100


def costs(speeds: dict[str, float]) -> CostTable:
    """Eight layers, the last twice as long as the others, the first hardly anything; by type, seconds of a layer's forward."""
    factor = {"first": 0.1, "layer": 1.0, "last": 2.0}
    return CostTable(
        model="toy",
        kinds=KINDS,
        times=tuple(
            LayerTime(
                kind=kind,
                gpu=gpu,
                tp=1,
                micro_batch=1,
                forward_s=slow * factor[kind],
                backward_s=2 * slow * factor[kind],
            )
            for kind in factor
            for gpu, slow in speeds.items()
        ),
        sizes=tuple(
            LayerBytes(kind=kind, tp=1, params_bytes=PARAMS_BYTES, kept_bytes=KEPT_BYTES, output_bytes=OUTPUT_BYTES)
            for kind in factor
        ),
        updates=tuple(UpdateTime(gpu=gpu, fixed_s=0.01, s_per_byte=1e-6) for gpu in speeds),
    )


def cluster(counts: dict[str, int], memory: dict[str, int], *, rate: float) -> Cluster:
    """Nodes of one GPU each."""
    link = steady_link("port", rate, latency_s=0.0)
    return Cluster(
        gpus=tuple(Gpu(name=gpu, memory_bytes=memory[gpu]) for gpu in counts),
        nodes=tuple(
            Node(name=f"{gpu}{index}", gpu=gpu, gpus=1) for gpu, count in counts.items() for index in range(count)
        ),
        within=tuple(Joined(source=gpu, target=gpu, link=link) for gpu in counts),
        between=tuple(Joined(source=a, target=b, link=link) for a in counts for b in counts),
    )


def groups(units: tuple[UnitType, ...]) -> Iterator[tuple[tuple[UnitType, ...], ...]]:
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


def shares(total: int, depths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to share micro-batches out, each pipeline as many as stages or more."""
    if len(depths) == 1:
        if total >= depths[0]:
            yield (total,)
        return
    for count in range(depths[0], total + 1):
        for others in shares(total - count, depths[1:]):
            yield (count, *others)


def shapes_of(shaper: Shaper, order: tuple[UnitType, ...]) -> list[Shape]:
    """Every division of the layers."""
    inner = itertools.combinations(range(1, len(KINDS)), len(order) - 1)
    found = (shaper.cut(order, [0, *cuts, len(KINDS)], 1, spread=False) for cuts in inner)
    return [shape for shape in found if shape is not None]


def least_seconds(given: Cluster, table: CostTable, batch: int) -> float:
    """Of every plan there is: a lower bound of each, and where that is promising its simulation."""
    shaper = Shaper(given, table)
    units = tuple(unit for unit in shaper.unit_types() for node in given.nodes if node.gpu == unit.gpu)
    best, known, tried = float("inf"), {}, 0
    for pipelines in set(map(lambda found: tuple(sorted(found)), groups(units))):
        if not pipelines:
            continue
        for order in pipelines:
            if order not in known:
                known[order] = shapes_of(shaper, order)
        for shapes in itertools.product(*(known[order] for order in pipelines)):
            for counts in shares(batch, [len(shape.stages) for shape in shapes]):
                compute_s = max(
                    sum(s for s in _stage_seconds(table, shape)) + (count - 1) * max(_stage_seconds(table, shape))
                    for shape, count in zip(shapes, counts, strict=True)
                )
                if compute_s >= best:
                    continue
                plan = placed(given, list(zip(shapes, counts, strict=True)), model="toy")
                assert plan is not None
                best = min(best, simulate(plan, given, table).iteration_s)
                tried += 1
    assert tried > 1
    return best


def _stage_seconds(table: CostTable, shape: Shape) -> list[float]:
    key = tuple((s.unit, s.first, s.last, s.recomputed) for s in shape.stages)
    if key not in _SECONDS:
        costs_s = [
            table.stage(range(s.first, s.last + 1), s.unit.gpu, s.unit.tp, 1, recomputed=s.recomputed)
            for s in shape.stages
        ]
        _SECONDS[key] = [cost.forward_s + cost.backward_s for cost in costs_s]
    return _SECONDS[key]


_SECONDS: dict[tuple[object, ...], list[float]] = {}

SMALL = [
    pytest.param({"a": 1, "b": 1}, {"a": 10**6, "b": 10**6}, 1e6, id="two"),
    pytest.param({"a": 2, "b": 1}, {"a": 60_000, "b": 30_000}, 1e5, id="little memory"),
    pytest.param({"a": 1, "b": 2}, {"a": 25_000, "b": 25_000}, 1e6, id="less memory"),
    pytest.param({"a": 2, "b": 2}, {"a": 10**6, "b": 10**6}, 1e3, id="slow network"),
    pytest.param({"a": 2, "b": 2}, {"a": 50_000, "b": 20_000}, 1e5, id="weak ones hold little"),
    pytest.param({"a": 1, "b": 4}, {"a": 40_000, "b": 25_000}, 1e5, id="five", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("counts", "memory", "rate"), SMALL)
def test_no_plan_is_more_than_half_a_percent_faster(counts, memory, rate):
    _SECONDS.clear()
    given, table = cluster(counts, memory, rate=rate), costs({"a": 0.1, "b": 0.25})
    found = plan_cluster(given, table, global_batch=8)
    assert found.timeline.iteration_s <= 1.005 * least_seconds(given, table, 8)
    for row, pipeline in zip(memory_of_plan(found.plan, table), found.plan.pipelines, strict=True):
        for held, stage in zip(row, pipeline.stages, strict=True):
            assert held.peak_bytes <= memory[stage.gpu]
    assert found.plan.global_batch == 8


def measured(scenario: str) -> tuple[Cluster, CostTable, list[dict]]:
    layers, memory, network, planners = (
        read(MEASURED / f"{name}.json") for name in ("layers", "memory", "network", "planners")
    )
    asked = planners["scenarios"][scenario]
    table = dataclasses.replace(costs_of(layers, memory, asked["model"]), overhead_bytes=int(4.5 * 2**30))
    rows = [row for row in planners["results"] if row["scenario"] == scenario and row.get("pipelines")]
    return cluster_of(network, asked["gpus"]), table, rows


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["S1", "S4"])
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


def test_gpus_behind_a_slow_port_do_not_join_others():
    given, table, _ = measured("S6")  # the node of RTX 3090 has one gigabit a second
    used = plan_cluster(given, table, global_batch=64).plan.used()
    assert "RTX-3090" not in used or len(used) == 1


def test_symmetric_tensor_parallelism_has_one_degree():
    given, table, _ = measured("S4")
    found = plan_cluster(given, table, global_batch=32, symmetric_tp=True)
    assert len({stage.tp for _, _, stage in found.plan.stages()}) == 1


def test_a_model_that_fits_nowhere_is_refused():
    given, table = cluster({"a": 2}, {"a": 5000}, rate=1e6), costs({"a": 0.1})
    with pytest.raises(ClusterError, match=r"toy does not fit on 2 x a.*Add GPUs"):
        plan_cluster(given, table, global_batch=8)


def test_a_cluster_without_costs_is_refused():
    given = cluster({"a": 2}, {"a": 10**6}, rate=1e6)
    with pytest.raises(ClusterError, match=r"no costs of toy on any GPU of the cluster, \['a'\]"):
        plan_cluster(given, costs({"b": 0.1}), global_batch=8)


def test_a_batch_smaller_than_every_micro_batch_is_refused():
    given, table = cluster({"a": 2}, {"a": 10**6}, rate=1e6), costs({"a": 0.1})
    with pytest.raises(ClusterError, match="global batch of 1"):
        plan_cluster(given, table, global_batch=1, micro_batches=(2,))
