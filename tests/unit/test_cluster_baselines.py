"""Baselines for mixed clusters: they keep memory and the batch, and ours is not slower."""

import dataclasses
from pathlib import Path

import pytest

from autohete_fx.cluster.inputs.measurements import cluster_of, costs_of, read
from autohete_fx.cluster.memory import memory_of_plan
from autohete_fx.cluster.planner.baselines import BASELINES
from autohete_fx.cluster.planner.solve import plan_cluster
from tests.thorough import thorough

MEASURED = Path(__file__).parents[2] / "examples" / "benchmarks" / "measured"


def asked(model: str, gpus: dict[str, int]):
    layers, memory, network = (read(MEASURED / f"{name}.json") for name in ("layers", "memory", "network"))
    table = dataclasses.replace(costs_of(layers, memory, model), overhead_bytes=int(4.5 * 2**30))
    return cluster_of(network, gpus), table


@pytest.mark.slow
@pytest.mark.parametrize("model", ["OPT-350", thorough("GPT-Neo-2.7")])
def test_baselines_fit_and_ours_is_not_slower(model):
    cluster, table = asked(model, {"A100-40": 8, "V100-16": 8})
    ours = plan_cluster(cluster, table, global_batch=128, time_limit_s=60).timeline.iteration_s
    for name, make in BASELINES.items():
        plan = make(cluster, table, 128)
        assert plan is not None, name
        assert plan.global_batch == 128
        assert ours <= plan.iteration_s * (1 + 1e-9), name
        for row, pipeline in zip(memory_of_plan(plan, table), plan.pipelines, strict=True):
            for held, stage in zip(row, pipeline.stages, strict=True):
                assert held.peak_bytes <= cluster.gpu(stage.gpu).memory_bytes, name
        if name != "one type":
            assert len({stage.tp for _, _, stage in plan.stages()}) == 1, name


def test_equal_grids_have_equal_stages():
    cluster, table = asked("OPT-350", {"A100-40": 4, "V100-16": 4})
    plan = BASELINES["equal grid"](cluster, table, 64)
    assert plan is not None
    for pipeline in plan.pipelines:
        numbers = [len(stage.layers) for stage in pipeline.stages]
        assert max(numbers) - min(numbers) <= 1


@pytest.mark.parametrize("name", BASELINES)
def test_a_model_that_fits_nowhere_has_none(name):
    cluster, table = asked("GPT-Neo-2.7", {"V100-16": 1})
    assert BASELINES[name](cluster, table, 8) is None
