"""``autohete plan --cluster`` as a user calls it."""

import json
from pathlib import Path

import pytest

from autohete_fx.cli import main
from autohete_fx.cluster.commands import plan as command
from autohete_fx.cluster.plan import ClusterPlan

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}
MEASURED = str(Path(__file__).parents[2] / "examples" / "benchmarks" / "measured")


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """The same model on the same devices is traced for the first test that needs it."""
    real, known = command.priced_costs, {}

    def remembered(model, devices, **others):
        key = str([json.loads(Path(model).read_text()), list(devices), others])
        if key not in known:
            known[key] = real(model, devices, **others)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "priced_costs", remembered)
        yield


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.mark.slow
def test_a_plan_is_printed_saved_and_drawn(config, tmp_path, capsys):
    plan, chart = tmp_path / "plan.json", tmp_path / "gantt.svg"
    asked = ["plan", config, "--cluster", "2xA100-40G,2xL40S", "--batch", "16", "--seq", "128"]
    assert main([*asked, "--time-limit", "1", "--save", str(plan), "--plot", str(chart)]) == 0
    printed = capsys.readouterr().out
    assert "16 samples of 128 tokens a step" in printed
    assert "where it goes: compute" in printed
    assert "other ways to plan this cluster" in printed
    assert ClusterPlan.load(plan).global_batch == 16
    assert chart.read_text().lstrip().startswith("<?xml")
    assert main([*asked, "--solver", "scip"]) == 0
    by_scip = capsys.readouterr().out
    assert "as the solver counts" in printed and "as the solver counts" not in by_scip
    (ours,) = (line for line in by_scip.splitlines() if line.startswith("this plan"))
    (theirs,) = (line for line in printed.splitlines() if line.startswith("two stages"))
    assert ours.split()[2:4] == theirs.split()[2:4], "the step is the one that the table of other planners has"


@pytest.mark.slow
def test_a_way_to_plan_that_would_take_long_is_left_out(config, capsys, monkeypatch):
    monkeypatch.setattr(command, "MOST_COMPOSITIONS", 8)
    for cluster, is_left_out in (("2xA100-40G,2xL40S", True), ("2xA100-40G,1xL40S", False)):
        asked = ["plan", config, "--cluster", cluster, "--batch", "16", "--seq", "128", "--time-limit", "1"]
        assert main(asked) == 0
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("two stages"))
        assert ("left out: it would take long" in row) is is_left_out


@pytest.mark.slow
def test_json_has_the_plan_and_its_figures(config, capsys):
    asked = ["plan", config, "--cluster", "2xA100-40G,2xL40S", "--batch", "16", "--seq", "128", "--json"]
    assert main([*asked, "--time-limit", "1"]) == 0
    body = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # no Infinity or NaN, which JSON has not
    assert ClusterPlan.from_json(json.dumps(body["plan"])).iteration_s == body["iteration_s"] > 0
    assert sum(body["seconds_by_cause"].values()) == pytest.approx(body["iteration_s"])
    used = {name: gpu["used"] for name, gpu in body["gpus"].items()}
    assert used == {"a100-40g": 2, "l40s-48g": 2} or len(body["idle"]) > 0
    peaks = [held["peak_bytes"] for row in body["memory"] for held in row]
    assert max(peaks) < max(gpu["capacity_bytes"] for gpu in body["gpus"].values()) and body["frontier"] == []


@pytest.mark.slow
def test_measured_costs_are_planned_for(capsys):
    asked = [
        "plan",
        "OPT-350",
        "--costs",
        MEASURED,
        "--cluster",
        "1xA100-40,4xV100-16",
        "--batch",
        "16",
        "--seq",
        "2048",
    ]
    assert main([*asked, "--explain", "--time-limit", "1"]) == 0
    printed = capsys.readouterr().out
    assert "costs: measured layers" in printed
    assert "1 more V100-16" in printed and "4 more V100-16" in printed
    assert "twice the network" in printed


@pytest.mark.slow
def test_the_cheapest_plan_is_on_the_frontier(config, tmp_path, capsys):
    cluster = tmp_path / "cluster.json"
    nodes = [{"gpu": "a100-40g", "gpus": 2}, {"gpu": "l40s", "gpus": 2}]
    prices = {"a100-40g": 2.0, "l40s": 1.0}
    cluster.write_text(json.dumps({"schema_version": 1, "nodes": nodes, "usd_per_hour": prices}))
    asked = ["plan", config, "--cluster", str(cluster), "--batch", "16", "--seq", "128", "--objective", "cost"]
    chart = tmp_path / "frontier.svg"
    assert main([*asked, "--plot", str(chart)]) == 0
    printed = capsys.readouterr().out
    assert "faster or cheaper" in printed
    dollars = [float(word[1:]) for word in printed.partition("faster or cheaper")[2].split() if word.startswith("$")]
    assert dollars == sorted(dollars, reverse=True)
    assert chart.read_text().lstrip().startswith("<?xml")
    if "idle: " in printed:
        assert "cost more a token" in printed and "is less than the bubble" not in printed
    assert main([*asked, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [f"{row['usd_per_million_tokens']:.3f}" for row in body["frontier"]] == [f"{usd:.3f}" for usd in dollars]
    assert body["iteration_s"] == body["frontier"][-1]["iteration_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "8xA100-40G", "--ranks", "2"], "--ranks is about GPUs that are alike"),
        (["--device", "a100", "--symmetric-tp"], "--symmetric-tp is about clusters"),
        (["--device", "a100", "--objective", "cost"], "--objective is about clusters"),
        (["--cluster", "2xL40S", "--clip"], "--clip is about GPUs that are alike"),
        (["--cluster", "2xL40S", "--solver", "scip", "--symmetric-tp"], "leave it out"),
        (["--cluster", "2xL40S", "--solver", "scip", "--max-shards", "2"], "no shards anyway"),
        (["--device", "a100", "--given", "plan.json"], "--given is about clusters"),
        (["--cluster", "2xL40S", "--given", "plan.json", "--max-tp", "1"], "--max-tp is about a search"),
        (["--cluster", "2xL40S", "--given", "plan.json", "--time-limit", "5"], "--time-limit is about a search"),
        (["--cluster", "2xL40S", "--given", "missing.json"], "cannot read the cluster plan file 'missing.json'"),
        (["--cluster", "2xL40S", "--batch", "1000000"], "Expected were at most 65536"),
        (["--cluster", "8A100"], "has the part '8A100'"),
        (["--cluster", "2xL40S", "--costs", "measured", "--spot"], "--spot is about prices of data sheets"),
        (["--cluster", "2xL40S,2xH20", "--objective", "cost"], "there is no price of h20-96g"),
    ],
)
def test_what_does_not_go_together_is_said(config, capsys, words, message):
    assert main(["plan", config, *words]) == 2
    assert message in capsys.readouterr().err


NEO = ["plan", "GPT-Neo-2.7", "--costs", MEASURED, "--seq", "2048"]
"""A model whose states take 39.5 GiB."""


def test_a_model_that_little_memory_holds_in_shards_and_its_plan_is_priced_again(tmp_path, capsys):
    plan, asked = tmp_path / "plan.json", [*NEO, "--cluster", "4xV100-16"]
    assert main([*asked, "--batch", "16", "--save", str(plan), "--json"]) == 0
    searched = json.loads(capsys.readouterr().out)
    assert {stage.shards for _, _, stage in ClusterPlan.load(plan).stages()} == {4}
    assert "equal grid" in searched["baselines"] and "one type" not in searched["baselines"], "it is this plan"
    assert main([*asked, "--batch", "16", "--symmetric-tp", "--json"]) == 0
    assert "one type" in json.loads(capsys.readouterr().out)["baselines"], "it may have several degrees"
    assert main([*asked, "--batch", "16", "--max-shards", "1", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["iteration_s"] > searched["iteration_s"]
    assert all(stage["shards"] == 1 for row in whole["plan"]["pipelines"] for stage in row["stages"])

    again = tmp_path / "again.json"
    assert main([*asked, "--given", str(plan), "--save", str(again), "--json"]) == 0
    priced = json.loads(capsys.readouterr().out)
    same = ("plan", "iteration_s", "memory", "seconds_by_cause", "compute_bound_s")
    assert {key: priced[key] for key in same} == {key: searched[key] for key in same}
    assert priced["baselines"] == {} and ClusterPlan.load(again) == ClusterPlan.load(plan)
    assert main([*NEO, "--cluster", "5xV100-16", "--given", str(plan)]) == 0
    printed = capsys.readouterr().out
    assert "the plan was given" in printed and "tp x shards" in printed and "other ways" not in printed
    assert 'train with backend="autohete"' in printed and "--max-shards" not in printed
    assert "idle: 1 x V100-16; the given plan has no part for them" in printed


def test_a_given_plan_that_fits_no_more_or_another_model_is_refused(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    stages = [{"first": 0, "last": 16}, {"first": 17, "last": 33}]
    where = {"node": "x", "gpu": "V100-16", "tp": 1, "shards": 2, "recomputed": 0, "offloaded": 0}
    pipeline = {"stages": [where | stage for stage in stages], "micro_batch": 2, "micro_batches": 2}
    about = {"model": "GPT-Neo-2.7", "schedule": "1f1b", "planner": "given", "iteration_s": 0.0, "schema_version": 2}
    four = ["--cluster", "4xV100-16"]
    for changed, words, message in (
        (
            {},
            four,
            "GiB on each V100-16 of stage 0 of pipeline 0, which has layers 0-16. Expected was at most 16.0 GiB",
        ),
        ({}, ["--cluster", "3xV100-16"], "needs a node with 4 V100-16 for its 'x'"),
        ({}, [*four, "--batch", "8"], "the plan of --given has 4 samples a step"),
        ({"micro_batches": 1}, four, "2 stages and 1 micro-batches"),
        ({"stages": [where | stages[0]]}, four, "the plan has 17 layers"),
        ({"stages": [where | {"first": 0, "last": 33, "tp": 3, "shards": 1}]}, four, "with 3 GPUs a layer"),
        (
            {"stages": [where | stages[0], where | stages[1] | {"gpu": "V100"}]},
            four,
            "on V100-16 and on V100 of its node",
        ),
        ({"micro_batch": 3}, four, "Expected were samples that shards divide evenly"),
    ):
        plan.write_text(json.dumps(about | {"pipelines": [pipeline | changed]}))
        assert main([*NEO, *words, "--given", str(plan)]) == 2
        assert message in capsys.readouterr().err
    plan.write_text(json.dumps(about | {"model": "OPT-350", "pipelines": [pipeline]}))
    assert main([*NEO, *four, "--given", str(plan)]) == 2
    assert "the plan is of the model 'OPT-350', and 'GPT-Neo-2.7' was given" in capsys.readouterr().err


def test_measured_gpus_have_prices_of_a_file(tmp_path, capsys):
    cluster = tmp_path / "cluster.json"
    asked = ["plan", "OPT-350", "--costs", MEASURED, "--batch", "8", "--seq", "2048", "--objective", "cost"]
    assert main([*asked, "--cluster", "1xA100-40,1xV100-16"]) == 2
    assert "no price of A100-40, V100-16" in capsys.readouterr().err
    nodes = [{"gpu": "A100-40", "gpus": 1}, {"gpu": "V100-16", "gpus": 1}]
    prices = {"A100-40": 1.0, "V100-16": 4.0}
    cluster.write_text(json.dumps({"schema_version": 1, "nodes": nodes, "usd_per_hour": prices}))
    assert main([*asked, "--cluster", str(cluster), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["gpus"]["A100-40"]["used"], body["gpus"]["V100-16"]["used"]) == (1, 0)
    assert main([*asked, "--cluster", str(cluster), "--explain"]) == 0
    printed = capsys.readouterr().out
    assert " with 1 x A100-40 always at work" in printed, "the bound of the part that was chosen"
    others = printed.partition("other clusters, the cheapest plan of each")[2].partition("faster or cheaper")[0]
    (more,) = (line for line in others.splitlines() if line.startswith("1 more V100-16"))
    assert "1.00x" in more and more.endswith("1 x A100-40"), "as dear a GPU more is not bought for the cheapest plan"
    seconds = body["iteration_s"]
    assert body["usd_per_million_tokens"] == pytest.approx(seconds / 3600 / (8 * 2048) * 1e6)
    assert body["without_price"] == []
    for change, message in (
        ({"zones_gb_per_s": []}, "unknown entries ['zones_gb_per_s']"),
        ({"nodes": [{"gpu": "A100-41", "gpus": 1}]}, "no GPU 'A100-41'"),
        ({"nodes": [{"gpu": "A100-40", "gpus": 0}]}, "1 nodes of 0 A100-40"),
        ({"usd_per_hour": {"T4": 1.0}}, "prices or memory of ['T4']"),
        ({"usd_per_hour": {"A100-40": 0}}, "usd_per_hour of A100-40 is 0"),
    ):
        cluster.write_text(json.dumps({"schema_version": 1, "nodes": nodes, "usd_per_hour": prices} | change))
        assert main([*asked, "--cluster", str(cluster)]) == 2
        assert message in capsys.readouterr().err


def test_samples_are_as_long_as_those_that_were_measured(tmp_path, capsys):
    asked = ["plan", "OPT-350", "--cluster", "1xA100-40", "--batch", "1", "--costs"]
    assert main([*asked, MEASURED]) == 0
    printed = capsys.readouterr().out
    assert "1 sample of 2048 tokens" in printed and "as --seq counts them" not in printed
    layers = json.loads((Path(MEASURED) / "layers.json").read_text())
    for option, message in (
        (
            ["--seq", "1024"],
            "--seq 1024 was given, and the layers of --costs were measured with sequences of 2048 tokens",
        ),
        (["--dtype", "bf16"], "--dtype was given with --costs, whose layers were measured in a dtype of their own"),
    ):
        assert main([*asked, MEASURED, *option]) == 2
        assert message in capsys.readouterr().err
    for name in ("memory", "network"):
        (tmp_path / f"{name}.json").write_text((Path(MEASURED) / f"{name}.json").read_text())
    config = layers["models"]["OPT-350"]["config"]
    for seq, status, message in (
        (0, 2, "'OPT-350' cannot be read: seq is 0"),
        (None, 0, "assumed: 512 tokens a sample"),
    ):
        config["seq"] = seq
        if seq is None:
            del config["seq"]
        (tmp_path / "layers.json").write_text(json.dumps(layers))
        assert main([*asked, str(tmp_path), "--seq", "512"]) == status
        printed = capsys.readouterr()
        assert message in printed.err + printed.out


def test_types_without_a_price_are_named(capsys):
    asked = ["plan", "OPT-350", "--costs", MEASURED, "--cluster", "1xA100-40", "--batch", "1", "--seq", "2048"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "no price of A100-40: a cluster file may give it" in printed and "1 sample of 2048" in printed


def test_a_model_that_fits_nowhere_is_one_line(capsys):
    asked = ["plan", "GPT-Neo-2.7", "--costs", MEASURED, "--cluster", "1xV100-16", "--batch", "8", "--seq", "2048"]
    assert main(asked) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert "does not fit on 1 x V100-16" in error
    assert "states take 39.5 GiB, and these GPUs have 16.0 GiB" in error
