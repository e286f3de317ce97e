"""Eight ranks that are not there, each in turn: all of them write the same graphs."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autohete_fx
from autohete_fx import BlockDecision, Compilation, Plan
from autohete_fx.compiler import captured
from autohete_fx.compiler.agreement import Agreement
from autohete_fx.errors import ShardError
from autohete_fx.runtime.shard import ranks as ranks_file
from autohete_fx.runtime.shard import shard
from autohete_fx.runtime.shard.imagined import imagined_mesh
from tests import planner_problems
from tests.dist.sharded import graphs_in, make, tokens
from tests.dist.test_shard_plans import BLOCKS, DECISIONS
from tests.layers import EAGER
from tests.thorough import thorough

MACHINE = replace(
    planner_problems.MACHINE,
    device_type="cpu",
    host_bytes=2**30,
    net_bytes_per_s=1e9,
    net_latency_s=1e-5,
    latency_s=1e-5,
    **dict.fromkeys(("device_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s"), 2e9),
    **dict.fromkeys(("device_update_params_per_s", "host_update_params_per_s"), 1e8),
    device_flops_per_s=(("float64", 1e10),),
)


def compiled_by(rank: int, **options: Any) -> Compilation:
    torch._dynamo.reset()
    with imagined_mesh(8, rank) as mesh:
        model = shard(make(layers=2), mesh)
        optimizer = autohete_fx.AdamW(model.parameters())  # its states count
        [compilation] = autohete_fx.preview(model, tokens(0, rank), options={**EAGER, **options})
        del optimizer
    return compilation


def graphs_of(rank: int, name: str) -> list[str]:
    decisions = DECISIONS[name]
    plan = Plan(labels=BLOCKS, decisions=tuple(decisions[at % len(decisions)] for at in range(len(BLOCKS))))
    return graphs_in(compiled_by(rank, plan=plan))


def test_an_optimizer_that_would_take_a_shard_for_a_whole_is_refused():
    with imagined_mesh(2) as mesh:
        model = shard(torch.nn.Linear(128, 256), mesh)
        params = list(model.parameters())
        for p in params:
            p.grad = torch.ones_like(p)
        before = [p.detach().clone() for p in params]
        for optimizer in (torch.optim.Adafactor(params), torch.optim.LBFGS(params)):
            with pytest.raises(
                ShardError, match=r"sharded parameters, the first of size \(256, 128\).*element by element"
            ):
                optimizer.step(lambda: torch.zeros(()))
        assert all(map(torch.equal, params, before))
        torch.optim.Adafactor([model.bias]).step()  # which each rank has whole
        assert not torch.equal(model.bias, before[1])


def test_a_model_or_a_mesh_on_a_device_for_which_the_process_group_has_no_backend_is_refused():
    told = r"is on cpu, .*for cuda alone\. .*init_process_group\(\) without"
    with imagined_mesh(2) as mesh:
        shard(torch.nn.Linear(128, 256), mesh)
        with (
            mock.patch.object(ranks_file, "device_types_of", lambda group: ["cuda"]),
            pytest.raises(ShardError, match=f"^weight of the model {told}"),
        ):
            shard(torch.nn.Linear(128, 256), mesh)
    dist.init_process_group("cuda:fake", rank=0, world_size=2, store=FakeStore())  # as "nccl" is for GPUs alone
    try:
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        with pytest.raises(ShardError, match=f"^the mesh {told}"):
            shard(torch.nn.Linear(128, 256), mesh)
    finally:
        dist.destroy_process_group()


def test_what_eager_code_gets_for_a_shard_follows_its_dtype_and_refusals_name_its_size_wherever_it_is_given():
    with imagined_mesh(2) as mesh:
        model = shard(torch.nn.Linear(128, 256), mesh)
        before = model.weight
        assert before is model.weight and before.dtype == torch.float32
        assert model.to(torch.bfloat16).weight.dtype == torch.bfloat16 and model.weight is model.weight
        for use in (
            lambda: torch.nn.init.xavier_uniform_(model.weight),
            lambda: torch.add(torch.ones(1), other=model.weight),
            lambda: torch.cat([torch.ones(1), model.weight]),
        ):
            with pytest.raises(ShardError, match=r"with a parameter of size \(256, 128\)"):
                use()


@pytest.mark.parametrize("name", [thorough("mixed"), "kept from host"])
def test_every_rank_writes_the_same_graphs(name: str):
    # Of the embedding's 131 rows the last rank has 12, and padding; of the single row all but the first have padding alone.
    first, *others = (graphs_of(rank, name) for rank in (0, 3, 7))
    assert "autohete.gather.issue" in first[0] and "8, '8-" in first[0]
    assert all(graphs == first for graphs in others)


@pytest.mark.slow
def test_every_rank_finds_the_same_plan_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each of them solves, though the first one's plan counts for all: nothing of a rank's own may reach the problem."""
    monkeypatch.setattr(captured, "machine_of", lambda *_: MACHINE)
    monkeypatch.setattr(Agreement, "first", lambda agreement, what, make: make())
    digests, problems, texts = [], [], []
    for rank in range(8):
        monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path / str(rank)))
        made = compiled_by(rank, profile="analytic", memory_budget="5MiB")
        digests.append(made.plan.digest)
        assert made.problem is not None
        problems.append(made.problem)
        assert problems[-1] == problems[0]
        texts.append(graphs_in(made))
        assert made.plan.status == "optimal"  # one that time ran out for may be another on each
    assert any(decision != BlockDecision() for decision in made.plan.decisions)
    assert "8, '8-" in texts[0][0]
    assert len(set(digests)) == 1 and all(text == texts[0] for text in texts)
