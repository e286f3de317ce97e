"""Eight ranks that are not there, each in turn: all of them write the same graphs."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autohete_fx
from autohete_fx import Plan
from autohete_fx.errors import ShardError
from autohete_fx.runtime.shard import ranks as ranks_file
from autohete_fx.runtime.shard import shard
from autohete_fx.runtime.shard.imagined import imagined_mesh
from tests.dist.sharded import graphs_in, make, tokens
from tests.dist.test_shard_plans import BLOCKS, DECISIONS
from tests.layers import EAGER


def graphs_of(rank: int, name: str) -> list[str]:
    torch._dynamo.reset()
    decisions = DECISIONS[name]
    plan = Plan(labels=BLOCKS, decisions=tuple(decisions[at % len(decisions)] for at in range(len(BLOCKS))))
    with imagined_mesh(8, rank) as mesh:
        model = shard(make(layers=2), mesh)
        [compilation] = autohete_fx.preview(model, tokens(0, rank), options={**EAGER, "plan": plan})
    return graphs_in(compilation)


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


@pytest.mark.parametrize("name", ["mixed", "kept from host"])
def test_every_rank_writes_the_same_graphs(name: str):
    # Of the embedding's 131 rows the last rank has 12, and padding; of the single row all but the first have padding alone.
    first, *others = (graphs_of(rank, name) for rank in (0, 3, 7))
    assert "autohete.gather.issue" in first[0] and "8, '8-" in first[0]
    assert all(graphs == first for graphs in others)
