"""`autohete plan --ranks`: sharded training planned by one process, which is a rank of a job that does not run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autohete_fx
from autohete_fx.errors import ShardError
from autohete_fx.ir import BlockGraph, Plan, Problem
from autohete_fx.machine.devices import find_device, machine_of_spec
from autohete_fx.options import Options
from autohete_fx.planner import given
from autohete_fx.runtime.shard.imagined import imagined_mesh
from autohete_fx.whatif.blueprint import read_model
from autohete_fx.whatif.job import Job
from autohete_fx.whatif.trace import trace_model
from tests.dist import ranks
from tests.planned import plan

TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 500,
    "max_position_embeddings": 128,
}
SPEC = find_device("a100-40g")
OF_FOUR = Job(num_ranks=4).machine_of(machine_of_spec(SPEC), SPEC)
FACTORY = """
import torch
from tests.layers import Layers

def make():
    return Layers(), torch.zeros(64, 128)
"""


def config(folder: Path, **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return str(folder / "config.json")


def trained() -> dict[str, Any]:
    """The problem that ranks solve which are there, but for their machine."""
    from autohete_fx.runtime.shard import shard
    from tests.dist.sharded import mesh
    from tests.layers import EAGER, Layers

    solved: list[Problem] = []
    solve = given.solved_plan

    def keep(problem: Problem, graph: BlockGraph, **how: Any) -> Plan:
        solved.append(problem)
        return solve(problem, graph, **how)

    given.solved_plan = keep
    model = shard(Layers(), mesh())
    optimizer = autohete_fx.AdamW(model.parameters())
    options = {**EAGER, "inner_backend": "inductor", "solver_time_limit_s": 1}
    autohete_fx.preview(model, torch.zeros(64, 128), options=options)
    del optimizer
    return {} if not solved else comparable(solved[0])


def comparable(problem: Problem) -> dict[str, Any]:
    """All that does not follow from a machine's rates, as JSON has it."""
    kept = dataclasses.asdict(dataclasses.replace(problem, device_budget_bytes=None, host_budget_bytes=None))
    del kept["machine"], kept["schedule"], kept["allow_streamed_optimizer"]
    for cost in kept["costs"]:
        for name in [name for name in cost if name.endswith("_s")]:
            del cost[name]
        for _, partial in cost["partial"]:
            del partial["recompute_s"]
    return json.loads(json.dumps(kept, default=lambda value: value.value))


@pytest.mark.slow
def test_costs_are_those_of_ranks_that_train(tmp_path: Path):
    first, second = ranks.run("tests.e2e.test_whatif_ranks.trained", tmp_path)
    (tmp_path / "models.py").write_text(FACTORY)
    blueprint = read_model(f"{tmp_path / 'models.py'}:make", batch=1, seq=1, dtype=None)
    machine = dataclasses.replace(OF_FOUR, device_type="cpu")
    asked = comparable(trace_model(blueprint, machine, Options(), 2).problem)
    # Only the first one solves.
    assert first == asked and second == {}
    assert asked["num_ranks"] == 2 and sum(cost["gathered_bytes"] for cost in asked["costs"]) == 4 * 128 * 128 * 4


@pytest.mark.thorough
def test_a_few_layers_tell_the_cost_of_all(tmp_path: Path):
    model = read_model(config(tmp_path, num_hidden_layers=12), batch=2, seq=64, dtype=None)
    few = trace_model(model, OF_FOUR, Options(), 4)
    whole = trace_model(dataclasses.replace(model, num_layers=None), OF_FOUR, Options(), 4)
    assert (few.traced_layers, whole.traced_layers) == (6, 12)
    assert comparable(few.problem) == comparable(whole.problem)
    assert few.num_params == whole.num_params and few.flops == whole.flops
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_rank_computes_what_one_device_does_and_gathers_all_parameters(tmp_path: Path):
    model = read_model(config(tmp_path), batch=2, seq=64, dtype=None)
    of_four, alone = trace_model(model, OF_FOUR, Options(), 4), trace_model(model, OF_FOUR, Options())
    assert of_four.num_params == alone.num_params and of_four.flops == alone.flops
    for cost, of_one in zip(of_four.problem.costs, alone.problem.costs, strict=True):
        assert cost.gathered_bytes >= of_one.param_bytes > 0 or of_one.param_bytes == 0
        assert cost.forward_s == pytest.approx(of_one.forward_s, rel=0.05)


@pytest.mark.slow
def test_a_plan_of_ranks_says_what_is_of_all_and_what_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = config(tmp_path)
    of_two_nodes = ("--device", "a100-40g", "--ranks", "4", "--nodes", "2", "--micro-batches", "2")
    assert plan(small, *of_two_nodes) == 0
    out = capsys.readouterr().out
    for expected in (
        "batch 2 x 64 tokens x 2 micro-batches on each rank",
        "4 ranks on 2 nodes, each on A100 SXM4 40GB, from its data sheet (PCIe 4.0 x16, NVLink 3 between ranks",
        "on each rank; 2 layers",
        "ranks           4, tokens of all, all else of one; 46.6 GiB/s to other ranks",
        "net             works ",
        "lane binds",
        "2x link between ranks",
    ):
        assert expected in out, expected
    assert plan(small, *of_two_nodes, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_ranks"], found["num_nodes"], found["num_replicas"]) == (4, 2, 1)
    assert found["tokens"] == 4 * 2 * 2 * 64
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["step_s"])
    assert found["binds"] in ("compute", "h2d", "d2h", "update", "net") and found["net_share"] >= 0
    assert all(each["tokens_per_s"] * each["step_s"] == pytest.approx(found["tokens"]) for each in found["more"])
    small = config(tmp_path, num_hidden_layers=1)
    assert plan(small, "--device", "a100-40g", "--ranks", "4", "--replicas", "2", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_ranks"], found["num_nodes"], found["num_replicas"], found["tokens"]) == (4, 1, 2, 4 * 2 * 64)


@pytest.mark.slow
def test_a_sweep_of_ranks_has_a_row_for_each_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = config(tmp_path, num_hidden_layers=1)
    sweep = ["--device", "a100-40g", "--sweep", "ranks", "--ranks", "4", "--budget", "60MiB"]
    assert plan(small, *sweep) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdecimal()] == ["1", "2", "4"]
    assert plan(small, *sweep, "--json") == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["num_ranks"] for point in points] == [1, 2, 4]
    assert plan(small, *sweep[:-1], "1MiB") == 2
    assert "1.00 MiB" in capsys.readouterr().err


def test_a_rank_of_a_job_that_runs_is_none_of_one_that_does_not():
    with imagined_mesh(2) as mesh:
        assert mesh.size() == 2
        with pytest.raises(ShardError, match="process of its own"), imagined_mesh(4):
            pass
    assert not dist.is_initialized()
