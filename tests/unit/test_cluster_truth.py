"""The simulator of pipelines against measured runs, and files of these that lack something."""

import json
import math
from pathlib import Path

import pytest

from autohete_fx.cluster.inputs.measurements import costs_of, read, rows_of, run_of, runs_of
from autohete_fx.cluster.simulation.simulate import simulate
from autohete_fx.errors import ClusterError

MEASURED = Path(__file__).parents[2] / "examples" / "benchmarks" / "measured"


def test_measured_runs_are_predicted():
    """Of the published runs: the mixed ones within 8%, most within 10%, the median within 5%."""
    layers, memory, network, runs = (
        read(MEASURED / f"{name}.json") for name in ("layers", "memory", "network", "runs")
    )
    errors = {}
    for run in runs_of(runs, network):
        step = simulate(run.plan, run.cluster, costs_of(layers, memory, run.plan.model), sums_within=False)
        error = abs(step.iteration_s / run.iteration_s - 1)
        errors[run.name] = error
        assert error < 0.08 or len(run.plan.used()) == 1, run.name
    assert sorted(errors.values())[len(errors) // 2] <= 0.05
    assert sum(error <= 0.1 for error in errors.values()) >= 0.75 * len(errors)


def test_micro_batches_between_rows_are_interpolated():
    table = costs_of(read(MEASURED / "layers.json"), read(MEASURED / "memory.json"), "OPT-350")
    at_2, at_3, at_4 = (table.layer_s("layer", "A100-40", 1, size)[0] for size in (2, 3, 4))
    assert at_3 == pytest.approx((at_2 + at_4) / 2)
    most = max(table.micro_batches("A100-40", 1))
    assert math.isclose(
        table.layer_s("layer", "A100-40", 1, 2 * most)[1], 2 * table.layer_s("layer", "A100-40", 1, most)[1]
    )


@pytest.fixture(scope="module")
def measured():
    return {
        name: json.loads((MEASURED / f"{name}.json").read_text()) for name in ("layers", "memory", "network", "runs")
    }


def predicted(row, files):
    run = run_of(row, files["network"])
    return simulate(
        run.plan, run.cluster, costs_of(files["layers"], files["memory"], run.plan.model), sums_within=False
    ).iteration_s


def test_runs_of_other_types_are_predicted_where_files_know_them(measured):
    """A type under a name that nobody knew: as fast; on nodes of another size, too. Pairs that nobody timed use both ports."""
    row = measured["runs"]["runs"][0]
    seconds = predicted(row, measured)
    other = json.loads(json.dumps([row, measured]).replace("GH-96", "H300-200"))
    assert predicted(*other) == pytest.approx(seconds, rel=0.02)
    assert predicted(other[0] | {"gpus_of_node": {"H300-200": 4}}, other[1]) == seconds
    mixed = next(row for row in measured["runs"]["runs"] if row["name"] == "mit/N4/N4_D1")
    network = {name: part for name, part in measured["network"].items() if name != "inter_cross_type"}
    assert predicted(mixed, measured | {"network": network}) == pytest.approx(predicted(mixed, measured), rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "OPT-30B"}, "no measurements of 'OPT-30B'"),
        ({"mbs": None}, "N2_D1' lacks 'mbs'"),
        ({"mbs": 0}, "micro-batches of 0"),
        ({"gbs": 0}, "a batch of 0"),
        ({"iteration_s": 0}, "iteration_s is 0"),
        ({"name": 7}, "its name is 7"),
        ({"peak_bytes": -1}, "peak_bytes is -1"),
        ({"stages": [{}]}, "lacks 'replicas'"),
        ({"stages": [{"layers": [0, 40], "replicas": [["GH-96", 4, 1]]}]}, "41 layers.*has 34"),
        ({"stages": [{"layers": [0, 33], "replicas": [["GH-96", 8, 1]]}]}, "8 GPUs GH-96. Expected was 1 to 4"),
        ({"stages": [{"layers": [0, 33], "replicas": [["GH-96", 3, 1]]}]}, "on GH-96 with 3 GPUs a layer"),
        ({"stages": [{"layers": [0, 33], "replicas": [["H100-80", 1, 1]]}]}, "network has no GPU 'H100-80'"),
    ],
)
def test_a_run_that_lacks_something_says_what(measured, change, message):
    row = {key: value for key, value in (measured["runs"]["runs"][0] | change).items() if value is not None}
    with pytest.raises(ClusterError, match=message):
        predicted(row, measured)


def record(files: dict, tp: str, micro_batch: str) -> dict:
    return files["layers"]["models"]["GPT-Neo-2.7"]["gpus"]["GH-96"]["runs"][tp][micro_batch]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda files: files["layers"].clear(), "lacks 'models'"),
        (lambda files: files["network"].pop("intra"), "network lacks 'intra'"),
        (lambda files: files["memory"]["models"]["GPT-Neo-2.7"].pop("4"), "no sizes of layer 'first'"),
        (
            lambda files: files["layers"]["models"]["GPT-Neo-2.7"]["gpus"]["GH-96"].pop("update_params"),
            "'update_params'",
        ),
        (
            lambda files: [record(files, "4", size).pop("first") for size in ("1", "2", "4", "8", "16", "32", "64")],
            "on GH-96 with 4 GPUs a layer",
        ),
        (lambda files: record(files, "4", "1").update(first=[None, 0.1]), "forward of first on GH-96 is None"),
        (lambda files: record(files, "1", "1").update(update_s="soon"), "update_s of GH-96 is 'soon'"),
        (lambda files: files["network"]["inter"].update({"GH-96": {}}), "GH-96 port has no fits"),
        (
            lambda files: files["network"]["inter"].update({"GH-96": {"1": [0, 0, -1, 1]}}),
            "carries nothing for 1 pairs",
        ),
    ],
)
def test_files_that_lack_something_say_what(measured, damage, message):
    files = json.loads(json.dumps(measured))
    damage(files)
    with pytest.raises(ClusterError, match=message):
        predicted(files["runs"]["runs"][0], files)
    with pytest.raises(ClusterError, match="no list"):
        rows_of({})
